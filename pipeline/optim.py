"""The optimiser: parameter groups and torch's own AdamW and SGD."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipeline.recipe.schema import OptimSection

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


def build_optimizer(section: OptimSection, module: nn.Module) -> torch.optim.Optimizer:
    """AdamW or Nesterov SGD over two groups: weights decay; biases, norms and what the model names do not."""
    spared = undecayed(module)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name not in spared], "weight_decay": section.weight_decay},
        {"params": [p for name, p in named if name in spared], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "adamw":
        fused = all(p.is_cuda for _, p in named)
        return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=fused)
    return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, nesterov=section.momentum > 0)


def undecayed(module: nn.Module) -> set[str]:
    """Names of biases, of norms' parameters, and of those in timm's `no_weight_decay()` (position embeddings, ...).

    By what a parameter is and not by its axes: a sparse matrix keeps its weights on a single one.
    """
    named: Any = getattr(module, "no_weight_decay", set)
    names = set(named())
    for owner, part in module.named_modules():
        for name, _ in part.named_parameters(recurse=False):
            if name == "bias" or isinstance(part, NORMS):
                names.add(f"{owner}.{name}" if owner else name)
    return names
