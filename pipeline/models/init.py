"""Initial weights, the same in all families and a function of torch's seed."""

import math

from timm.layers import lecun_normal_
from torch import nn

from widemix.models.block_diagonal import GroupedLinear


def init_weights(model: nn.Module, head: nn.Module, head_bias: float = 0.0) -> None:
    """Sample linear layers from N(0, 1 / inputs), convolutions from LeCun normal; biases and the head's weight are 0.

    `head_bias` is the bias of every class.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | GroupedLinear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
        elif isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(head, nn.Linear):
        nn.init.zeros_(head.weight)
        nn.init.constant_(head.bias, head_bias)
