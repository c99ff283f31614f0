"""Features of named layers of any network, reduced as they are computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn

from widemix.errors import InputError

Reduced = TypeVar("Reduced")

# Modules whose output is added to a skip connection, by the last part of their names, in our networks and timm's.
_MIXERS = {"mlp_tokens", "mlp_channels", "linear_tokens", "outer_act", "mlp1", "mlp2", "mix", "gated", "ffn"}
_BRANCHES = _MIXERS | {"attn", "mlp", "self_attn", "linear2"}


def layers_before_skips(module: nn.Module) -> list[str]:
    """Return the names of the modules whose outputs are added to skip connections, in the order of the network.

    `InputError` if it has none with a usual name.
    """
    chosen: list[str] = []
    for name, _ in module.named_modules():
        inside = any(name.startswith(f"{other}.") for other in chosen)
        if name.rpartition(".")[2] in _BRANCHES and not inside:
            chosen.append(name)
    if not chosen:
        known = ", ".join(name for name, _ in module.named_modules() if name.count(".") == 1)
        raise InputError(f"no layers with a usual name before skip connections; name some as patterns, of {known}")
    return chosen


def layers_by_pattern(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the modules that match a pattern such as `blocks.*.norm1`; `InputError` for one without."""
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:6])
            raise InputError(f"layers {pattern}: matches no module of the network; its names are {some}, ...")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


@contextmanager
def recording(
    module: nn.Module, layers: Sequence[str], reduce: Callable[[Tensor], Reduced]
) -> Iterator[dict[str, Reduced]]:
    """Within the context every forward pass of `module` fills the dictionary: `reduce` of each layer's output.

    A layer of several outputs counts with its first. The outputs themselves are not kept, so that the memory is that
    of one forward pass.
    """
    features: dict[str, Reduced] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
            features[name] = reduce(output[0] if isinstance(output, tuple) else output)

        return hook

    handles = [module.get_submodule(name).register_forward_hook(record(name)) for name in layers]
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def layer_features(
    module: nn.Module,
    inputs: Tensor,
    layers: Sequence[str],
    reduce: Callable[[Tensor], Reduced],
) -> dict[str, Reduced]:
    """Return `reduce` of the output of each named layer for one batch of inputs, in the order of `layers`."""
    with recording(module, layers, reduce) as features:
        module(inputs)
    silent = [name for name in layers if name not in features]
    if silent:
        raise InputError(f"layer {silent[0]}: the network's forward pass does not call it; name others")
    return {name: features[name] for name in layers}
