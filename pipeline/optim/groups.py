"""Parameter groups: which parameters decay, with which factor of the learning rate, and which are matrices."""

from fnmatch import fnmatch
from typing import Any

from torch import nn

from widemix.errors import InputError
from widemix.models.timm_methods import timm_method
from widemix.optim.section import OptimSection


def parameter_groups(section: OptimSection, module: nn.Module) -> list[dict[str, Any]]:
    """The groups of the parameters that need a gradient, in a fixed order.

    Each group has "params"; the optimizer's penalty ("weight_decay" or "l1"), which is 0 for those of `undecayed`;
    "lr_scale", the factor of the learning rate, as timm computes it from `layer_decay`; and "matrices", true for the
    matrices inside the network where the optimizer treats them apart.
    """
    no_penalty = undecayed(module, section.decay_embeddings)
    scales = _layer_scales(section.layer_decay, module)
    matrices = inner_matrices(module) if section.spec.splits_matrices else set()
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            key = (name not in matrices, scales.get(name, 1.0), name in no_penalty)
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
    outer = {id(p) for p in timm_method(module, "get_classifier", "optim.name muon")().parameters()}
    outer |= {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    return {name for name, p in module.named_parameters() if p.ndim == 2 and id(p) not in outer}


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
