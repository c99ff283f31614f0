"""Parameter groups: which parameters decay, with which factor of the learning rate, and which are matrices."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipeline.errors import InputError
from pipeline.models.timm_methods import timm_method
from pipeline.optim.section import OptimSection

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


def parameter_groups(section: OptimSection, module: nn.Module) -> list[dict[str, Any]]:
    """The groups of the parameters that need a gradient, in a fixed order.

    Each group has "params"; the optimizer's penalty ("weight_decay" or "l1"), which is 0 for biases, norms and what
    the model exempts; "lr_scale", the factor of the learning rate, as timm computes it from `layer_decay`; and
    "matrices", true for the matrices inside the network where the optimizer treats them apart.
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
    """Names of biases, of norms' parameters, and of those in timm's `no_weight_decay()` (position embeddings, ...).

    The number of dimensions does not decide: a sparse matrix keeps its weights in a single one. Embeddings are
    among them where `decay_embeddings` is false.
    """
    exempt: Any = getattr(module, "no_weight_decay", set)
    names = set(exempt())
    kinds: tuple[type[nn.Module], ...] = NORMS if decay_embeddings else (*NORMS, nn.Embedding)
    for prefix, part in module.named_modules():
        for name, _ in part.named_parameters(recurse=False):
            if name == "bias" or isinstance(part, kinds):
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


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
