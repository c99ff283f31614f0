"""A Mixer's block with the batch last in memory: the function of `MixerBlock.forward`.

By compiled code on CPUs (`by_c.py`), elsewhere by rows:

Shapes: B images, S0 and S tokens before and after the token mixing, C channels, m = S*C; a mixing multiplies d
numbers of a row to D or d2, for n rows.
"""

from dataclasses import dataclass
from functools import partial
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from widemix.models.batch_last import by_c
from widemix.models.batch_last.layers import (
    Block,
    features_of,
    index_of,
    layers_of,
    same_versions,
    sound_index,
    versions_of,
    weight_of,
)
from widemix.models.batch_last.operations import activate, add, images_of, norm, product
from widemix.models.permutation import Permute, commutation, compose, identity, inverse
from widemix.models.pk_layers import Mixing, MixingLayer, MixingMlp


def needs_eager_ops(block: Block, x: Tensor) -> bool:
    """Whether something wants to see PyTorch's operators on x, or the calls of the block's layers."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return True
    if type(x) is not Tensor or x.is_meta:
        return True
    for part in block.modules():
        hooks = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        if hooks and part is not block:
            return True
    return False


def forward(block: Block, x: Tensor) -> Tensor:
    """[B, S0, C] -> [B, S, C]; x is copied unless it lies in memory as `arrange` has it, and so does the result.

    Raises ValueError for another S0 or C than the block's.
    """
    batch, tokens, channels = x.shape
    own = features_of(block)
    if own != (tokens, channels):
        raise ValueError(f"features [B, {tokens}, {channels}] for a block of [B, {own[0]}, {own[1]}]")
    if by_c.takes(block, x):
        return by_c.forward(block, x)
    x = x.permute(1, 2, 0).contiguous().view(tokens * channels, batch)
    x = _mix(block.skip, block.norm1, block.mlp_tokens, block.drop_path1, x, channels)
    x = _mix(block.channel_skip, block.norm2, block.mlp_channels, block.drop_path2, x, channels)
    return images_of(x, channels)


def arrange(block: Block, x: Tensor) -> Tensor:
    """x [B, S, C] in memory as the block before this one gives it: [S, C, B] but for the compiled code."""
    return x.contiguous() if by_c.takes(block, x) else x.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def _mix(
    own_skip: nn.Module, own_norm: nn.Module, mixing: Mixing, drop_path: nn.Module, x: Tensor, channels: int
) -> Tensor:
    """skip(x) + drop_path(mixing(norm(x))): [S0*C, B] -> [S*C, B]."""
    places = places_of(mixing, x, channels)
    z, x = _normed(own_norm, x, places)
    skip = _skip(own_skip, x, channels)
    if isinstance(mixing, MixingLayer):
        bias = None
        y = _activated(mixing.act, _product(mixing.fc, z, places.rows), mixing.fc.bias, None)
    else:
        bias = mixing.fc2.bias
        hidden = _activated(mixing.act, _product(mixing.fc1, z, places.rows), mixing.fc1.bias, places.hidden)
        y = _product(mixing.fc2, hidden, places.rows)
    if isinstance(drop_path, nn.Identity):
        return add(skip, y, bias, places.outward)
    return skip + drop_path(add(None, y, bias, places.outward).t()).t()


def _normed(own_norm: nn.Module, x: Tensor, places: "Places") -> tuple[Tensor, Tensor]:
    """The norm of x at the places before a mixing, in the type of the products, and x."""
    if isinstance(own_norm, nn.LayerNorm):
        return norm(x, own_norm.weight, own_norm.bias, own_norm.eps, places.inward, _product_type(x))
    return x if places.source is None else add(None, x, None, places.source), x


def _product(layer: nn.Module, x: Tensor, rows: int) -> Tensor:
    """Its weight [D, d] times x, in which each of d numbers has n rows: [d*n, B] -> [D*n, B]."""
    weight, batch = cast(Tensor, weight_of(layer)), x.shape[1]
    x = x.view(weight.shape[1], rows * batch)
    return product(weight, x, _product_type(x)).view(len(weight) * rows, batch)


def _activated(act: nn.Module, x: Tensor, bias: Tensor, index: Tensor | None) -> Tensor:
    """act((x + bias)[index]): [D*n, B] -> [D*n, B]."""
    if index is None and isinstance(act, nn.GELU) and act.approximate == "none":
        return activate(x.view(len(bias), x.numel() // len(bias)), bias).view(x.shape)
    return act(add(None, x, bias, index))


def _skip(skip: nn.Module, x: Tensor, channels: int) -> Tensor:
    """[S0*C, B] -> [S*C, B]."""
    if isinstance(skip, nn.Identity):
        return x
    if isinstance(skip, Permute):
        return add(None, x, None, sound_index(skip))
    own_norm = cast(nn.Module, skip.norm)  # LN(W X) of the first block
    projected = _product(cast(nn.Module, skip.fc), x, channels)
    if isinstance(own_norm, nn.Identity):
        return projected
    own_norm = cast(nn.LayerNorm, own_norm)
    return norm(projected, own_norm.weight, own_norm.bias, own_norm.eps, None, _norm_type(projected))[0]


def _product_type(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _norm_type(x: Tensor) -> torch.dtype:
    """Return the type that PyTorch's own LayerNorm gives: autocast on GPUs lets it keep fp32."""
    return torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype


@dataclass(frozen=True)
class Places:
    """The permutations of a mixing for rows: where each goes before it, and from where each comes in and after it.

    None leaves all where they are. `source` is the inverse of `inward`, `rows` is n. `of` are the indices from which
    they were computed, with versions.
    """

    inward: Tensor | None
    source: Tensor | None
    hidden: Tensor | None
    outward: Tensor | None
    rows: int
    of: list[tuple[Tensor, int]]
    device: torch.device


_kept: WeakKeyDictionary[nn.Module, Places] = WeakKeyDictionary()


def places_of(mixing: Mixing, x: Tensor, channels: int) -> Places:
    """Those of a mixing of x [S0*C, B], kept until its permutations are others, or x is on another device."""
    modules = [mixing.permute_in, mixing.permute_out, getattr(mixing, "permute_hidden", None)]
    of = versions_of(*modules)
    kept = _kept.get(mixing)
    if kept is None or not same_versions(kept.of, of) or kept.device != x.device:
        with torch.inference_mode(False):  # training may follow
            kept = _kept[mixing] = _compute_places(mixing, x, channels, of)
    return kept


def _compute_places(mixing: Mixing, x: Tensor, channels: int, of: list[tuple[Tensor, int]]) -> Places:
    first, last = layers_of(mixing)
    width, out, rows = first.in_features, last.out_features, len(x) // first.in_features
    inward = index_of(mixing.permute_in, len(x) // channels, channels)
    outward = index_of(mixing.permute_out, rows, out)
    hidden = None
    if isinstance(mixing, MixingMlp) and isinstance(mixing.permute_hidden, Permute):
        width_inside = first.out_features
        inside = compose(index_of(mixing.permute_hidden, rows, width_inside), commutation(width_inside, rows))
        hidden = compose(commutation(rows, width_inside), inside)
    source = compose(commutation(rows, width), inward)
    to = partial(_to, x.device)
    returned = compose(outward, commutation(out, rows))
    return Places(to(inverse(source)), to(source), to(hidden), to(returned), rows, of, x.device)


def _to(device: torch.device, index: Tensor | None) -> Tensor | None:
    """An index on the device, None for the identity."""
    return None if index is None or torch.equal(index, identity(len(index))) else index.to(device)
