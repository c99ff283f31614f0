"""The optimiser: parameter groups, and torch's, timm's or beta-LASSO's step."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipeline.recipe.optim import OptimSection

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


def build_optimizer(section: OptimSection, module: nn.Module) -> torch.optim.Optimizer:
    """An optimiser of two groups: weights decay (or shrink by l1); biases, norms and what the model spares do not."""
    spared = undecayed(module)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    penalty, most = ("l1", section.l1) if section.name == "beta_lasso" else ("weight_decay", section.weight_decay)
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if name not in spared], penalty: most},
        {"params": [p for name, p in named if name in spared], penalty: 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, nesterov=section.momentum > 0)
    if section.name == "beta_lasso":
        from pipeline.models.lasso import BetaLasso

        return BetaLasso(groups, section.lr, section.l1, section.lasso_beta, section.momentum)
    if section.name == "lamb":
        from timm.optim import Lamb

        return Lamb(groups, lr=section.lr, betas=section.betas, eps=section.eps, max_grad_norm=None)
    fused = all(p.is_cuda for _, p in named)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=fused)


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
