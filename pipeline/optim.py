"""The optimiser: parameter groups and torch's own AdamW and SGD."""

import torch
from torch import nn

from pipeline.recipe.schema import OptimSection


def build_optimizer(section: OptimSection, module: nn.Module) -> torch.optim.Optimizer:
    """AdamW or Nesterov SGD over two groups: weights decay, biases and norms (fewer than two axes) do not."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "adamw":
        fused = all(p.is_cuda for _, p in named)
        return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=fused)
    return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, nesterov=section.momentum > 0)
