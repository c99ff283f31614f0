"""The optimiser: parameter groups, and torch's, timm's, schedule-free or beta-LASSO's step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipeline.errors import InputError
from pipeline.recipe.optim import OptimSection

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
# What some optimisers count in a parameter group instead of beside each parameter: LAMB; schedule-free.
_COUNTERS = ("step", "k", "weight_sum", "lr_max")


def build_optimizer(section: OptimSection, module: nn.Module) -> torch.optim.Optimizer:
    """The section's optimiser over the parameters that need a gradient, in groups of `parameter_groups`."""
    groups = parameter_groups(section, module)
    adam: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, nesterov=section.momentum > 0)
    if section.name == "beta_lasso":
        from pipeline.models.lasso import BetaLasso

        return BetaLasso(groups, section.lr, section.l1, section.lasso_beta, section.momentum)
    if section.name == "lamb":
        from timm.optim import Lamb

        return Lamb(groups, **adam, max_grad_norm=None)
    if section.name == "schedule_free":
        from schedulefree import AdamWScheduleFree

        optimizer = AdamWScheduleFree(groups, **adam)
        optimizer.train()  # the weights stay those of training; `schedule_free_average` gives the others
        return optimizer
    adam["fused"] = all(p.is_cuda for group in groups for p in group["params"])
    if section.name == "muon":
        return MuonAndAdamW(groups, adam, section.momentum)
    return torch.optim.AdamW(groups, **adam)


def parameter_groups(section: OptimSection, module: nn.Module) -> list[dict[str, Any]]:
    """Weights decay (or shrink by l1); biases, norms and what the model spares do not.

    With `layer_decay` the groups are timm's: "lr_scale" is layer_decay^(layers to the head). For Muon the matrices
    inside the network are groups of their own, marked "matrices".
    """
    spared = undecayed(module, section.decay_embeddings)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    penalty, most = ("l1", section.l1) if section.name == "beta_lasso" else ("weight_decay", section.weight_decay)
    scales = _layer_scales(section.layer_decay, module)
    matrices = inner_matrices(module) if section.name == "muon" else set()
    found: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for name, p in named:
        found.setdefault((name not in matrices, scales.get(name, 1.0), name in spared), []).append(p)
    return [
        {"params": found[key], penalty: 0.0 if key[2] else most, "lr_scale": key[1], "matrices": not key[0]}
        for key in sorted(found)
    ]


def undecayed(module: nn.Module, decay_embeddings: bool = True) -> set[str]:
    """Names of biases, of norms' parameters, and of those in timm's `no_weight_decay()` (position embeddings, ...).

    By what a parameter is and not by its axes: a sparse matrix keeps its weights on a single one.
    """
    named: Any = getattr(module, "no_weight_decay", set)
    names = set(named())
    spared: tuple[type[nn.Module], ...] = NORMS if decay_embeddings else (*NORMS, nn.Embedding)
    for owner, part in module.named_modules():
        for name, _ in part.named_parameters(recurse=False):
            if name == "bias" or isinstance(part, spared):
                names.add(f"{owner}.{name}" if owner else name)
    return names


def inner_matrices(module: nn.Module) -> set[str]:
    """Names of the matrices that Muon is for: of two axes, neither embeddings nor the head (Jordan et al. 2024)."""
    network: Any = module
    outer = {id(p) for p in network.get_classifier().parameters()}
    outer |= {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    return {name for name, p in module.named_parameters() if p.ndim == 2 and id(p) not in outer}


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step, scaled layer by layer where the groups say so."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups marked "matrices", torch's AdamW for the others, as one optimiser.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025), so one learning rate and decay serve both.
    """

    def __init__(self, groups: list[dict[str, Any]], adam: dict[str, Any], momentum: float):
        super().__init__(groups, {"fused": adam["fused"]})
        self._parts: list[torch.optim.Optimizer] = []
        inner = [group for group in self.param_groups if group["matrices"]]
        outer = [group for group in self.param_groups if not group["matrices"]]
        if inner:
            muon = torch.optim.Muon(inner, lr=adam["lr"], momentum=momentum, adjust_lr_fn="match_rms_adamw")
            self._parts.append(muon)
        if outer:
            self._parts.append(torch.optim.AdamW(outer, **adam))
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None
        for part in self._parts:
            part.step()
        return None


def averages_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it trains other weights than it would have evaluated: schedule-free ones do."""
    return "weight_sum" in optimizer.defaults


def schedule_free_average(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> torch.Tensor:
    """x, to evaluate with, from the trained y = (1 - beta1) z + beta1 x (Defazio et al. 2024, equation 4)."""
    z = optimizer.state.get(weight, {}).get("z")
    return weight.clone() if z is None else weight.lerp(z, 1 - 1 / optimizer.defaults["betas"][0])


def group_scalars(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """What the optimiser counts in its groups: "group<number>/<counter>"."""
    return {
        f"group{number}/{name}": float(group[name])
        for number, group in enumerate(optimizer.param_groups)
        for name in _COUNTERS
        if name in group
    }


def set_group_scalars(optimizer: torch.optim.Optimizer, scalars: dict[str, float]) -> None:
    """The reverse of `group_scalars`."""
    for number, group in enumerate(optimizer.param_groups):
        for name in _COUNTERS:
            if f"group{number}/{name}" in scalars:
                value = scalars[f"group{number}/{name}"]
                group[name] = torch.tensor(value) if name == "step" else int(value) if name == "k" else value


def _layer_scales(decay: float, module: nn.Module) -> dict[str, float]:
    """Factor of the learning rate by parameter, as timm has it; none where nothing decays."""
    if decay == 1:
        return {}
    if not hasattr(module, "group_matcher"):
        raise InputError(f"optim.layer_decay {decay:g}: {type(module).__name__} has no order of layers; set it to 1")
    from timm.optim import param_groups_layer_decay

    groups: Any = param_groups_layer_decay(module, layer_decay=decay)
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    return {name: scales[id(p)] for name, p in module.named_parameters() if p.requires_grad}
