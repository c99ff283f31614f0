"""Build the optimizer with its parameter groups, set its learning rate, read and write the numbers in its groups.

A group says which parameters decay, with which factor of the learning rate, and whether they are matrices.
"""

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from widemix.errors import InputError
from widemix.models.registry import classifier
from widemix.optim.section import OptimSection


def build_optimizer(section: OptimSection, module: nn.Module) -> torch.optim.Optimizer:
    """The section's optimizer over the parameters that need a gradient, in the groups of `parameter_groups`."""
    return section.spec.build(parameter_groups(section, module), section)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, times each group's "lr_scale"."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def group_scalars(optimizer: torch.optim.Optimizer, counters: Iterable[str]) -> dict[str, float]:
    """The `counters` that the optimizer has in its groups by now: "group<number>/<counter>" -> value."""
    return {
        f"group{number}/{name}": float(group[name])
        for number, group in enumerate(optimizer.param_groups)
        for name in counters
        if name in group
    }


def set_group_scalars(optimizer: torch.optim.Optimizer, counters: Iterable[str], scalars: dict[str, float]) -> None:
    """The reverse of `group_scalars`: an int or float stays one; others, and those not there yet, become tensors.

    Where the groups are others than those saved, as `--resume PATH` allows, all get the value that those share.
    Raises `InputError` if they share none.
    """
    for name in counters:
        saved = [value for key, value in sorted(scalars.items()) if re.fullmatch(rf"group\d+/{name}", key)]
        others = len(saved) not in (0, len(optimizer.param_groups))
        if others and len(set(saved)) > 1:
            raise InputError(
                f"the checkpoint has {name} of {len(saved)} parameter groups, the optimizer now has "
                f"{len(optimizer.param_groups)}; keep optim.layer_decay and train.freeze, or take weights alone by "
                "train.init_from"
            )
        for number, group in enumerate(optimizer.param_groups):
            value = saved[0] if others else scalars.get(f"group{number}/{name}")
            if value is not None:
                kind = type(group.get(name))
                group[name] = kind(value) if kind in (int, float) else torch.tensor(value, dtype=torch.float32)


def parameter_groups(section: OptimSection, module: nn.Module) -> list[dict[str, Any]]:
    """The groups of the parameters that need a gradient, in a fixed order.

    Each group has "params"; the optimizer's penalty ("weight_decay" or "l1"), which is 0 for those of `undecayed`;
    "lr_scale", the factor of the learning rate, as timm computes it from `layer_decay`, times those that a layer has
    for its own parameters (`rate_factors`); and "matrices", true for the matrices inside the network where the
    optimizer treats them apart.
    """
    no_penalty = undecayed(module, section.decay_embeddings)
    scales, own = _layer_scales(section.layer_decay, module), _own_scales(module)
    matrices = inner_matrices(module) if section.spec.splits_matrices else set()
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            scale = scales.get(name, 1.0) * own.get(name, 1.0)
            key = (name not in matrices, scale, name in no_penalty)
            groups.setdefault(key, []).append(parameter)
    penalty = section.spec.penalty
    weight = getattr(section, penalty)
    return [
        {"params": groups[key], penalty: 0.0 if key[2] else weight, "lr_scale": key[1], "matrices": not key[0]}
        for key in sorted(groups)
    ]


def undecayed(module: nn.Module, decay_embeddings: bool = True) -> set[str]:
    """Names of the parameters without decay, as timm chooses them (`timm.optim.param_groups_weight_decay`).

    They are vectors and scalars (norms, layer scales), biases, and what matches the names or patterns of the model's
    `no_weight_decay()` (position embeddings, ...); where `decay_embeddings` is false the weights of embeddings too. A
    matrix that a module keeps on one axis decays: those that `matrices_on_one_axis` of the module names.
    """
    exempt: Any = getattr(module, "no_weight_decay", set)
    patterns, matrices, embeddings = set(exempt()), set(), set()
    for prefix, part in module.named_modules():
        matrices |= {f"{prefix}.{name}".lstrip(".") for name in getattr(part, "matrices_on_one_axis", ())}
        if isinstance(part, nn.Embedding) and not decay_embeddings:
            embeddings.add(f"{prefix}.weight".lstrip("."))
    return embeddings | {
        name
        for name, parameter in module.named_parameters()
        if (parameter.ndim <= 1 and name not in matrices)
        or name.endswith(".bias")
        or any(fnmatch(name, pattern) for pattern in patterns)
    }


def inner_matrices(module: nn.Module) -> set[str]:
    """Names of the matrices that Muon is for (Jordan et al. 2024): two dimensions, no embeddings, not the head."""
    outer = {id(p) for p in classifier(module, "optim.name muon").parameters()}
    outer |= {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    return {name for name, p in module.named_parameters() if p.ndim == 2 and id(p) not in outer}


def _own_scales(module: nn.Module) -> dict[str, float]:
    """Factor of the learning rate by parameter name, where a layer has some for its parameters."""
    return {
        f"{prefix}.{name}".lstrip("."): scale
        for prefix, part in module.named_modules()
        for name, scale in getattr(part, "rate_factors", {}).items()
    }


def _layer_scales(decay: float, module: nn.Module) -> dict[str, float]:
    """Factor of the learning rate by parameter name, as timm has it; empty for a decay of 1."""
    if decay == 1:
        return {}
    if not hasattr(module, "group_matcher"):
        raise InputError(
            f"optim.layer_decay {decay:g}: {type(module).__name__} does not define an order of layers; set it to 1"
        )
    from timm.optim import param_groups_layer_decay

    groups: Any = param_groups_layer_decay(module, layer_decay=decay)
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    return {name: scales[id(p)] for name, p in module.named_parameters() if p.requires_grad}
