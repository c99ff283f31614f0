"""The same networks as explicit m x m matrices: slow, plain, and sharing no code with what they check."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from widemix.models.pk import MixingLayer, MixingMlp, Square
from widemix.models.structured import StructuredLinear


def matrix(permute: nn.Module, size: int, normal: Tensor | None) -> Tensor:
    """The m x m matrix of a permutation module: of its index vector, else of what the normal Mixer has there."""
    eye = torch.eye(size, dtype=torch.float64)
    if hasattr(permute, "index"):
        return torch.stack([eye[i] for i in permute.index.tolist()])
    return eye if normal is None else normal


def transposition(rows: int, columns: int) -> Tensor:
    """The matrix that takes a flattened [rows, columns] matrix to its flattened transpose, entry by entry."""
    result = torch.zeros(rows * columns, rows * columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            result[column * rows + row, row * columns + column] = 1
    return result


def structured(layer: StructuredLinear) -> Tensor:
    """W [O, I] of a structured layer, by its definition."""
    right = layer.right
    if layer.structure.kind == "block_diagonal":
        return torch.block_diag(*right)
    left = layer.left
    if layer.structure.kind == "low_rank":
        return left @ right
    if layer.structure.kind == "kronecker":
        return torch.kron(left, right)
    (g, _, d), (b, a, _) = right.shape, left.shape
    rank = left.shape[2] // g
    rows = [
        [
            sum(left[j, i, k * rank + r] * right[k, j * rank + r] for r in range(rank))  # [d]
            for k in range(g)
        ]
        for i in range(a)
        for j in range(b)
    ]
    return torch.stack([torch.cat(row) for row in rows]).view(a * b, g * d)


def apply_mixing(module: MixingLayer | MixingMlp, x: Tensor, rows: int, channels: int, tokens: bool) -> Tensor:
    """J_out (I (x) W2) phi(J_hidden (I (x) W1) J_in x) on vectors [B, m], by dense matrices."""
    phi = torch.square if isinstance(module.act, Square) else gelu
    layers = [module.fc] if isinstance(module, MixingLayer) else [module.fc1, module.fc2]
    out = rows * layers[-1].out_features
    into = transposition(x.shape[1] // channels, channels) if tokens else None
    back = transposition(channels, out // channels) if tokens else None
    x = x @ matrix(module.permute_in, x.shape[1], into).T
    for number, layer in enumerate(layers):
        weight = structured(layer) if isinstance(layer, StructuredLinear) else layer.weight
        groups = weight if weight.ndim == 3 else weight[None]
        wide = torch.block_diag(*(weight for weight in groups for _ in range(rows // len(groups))))
        x = x @ wide.T + layer.bias.view(len(groups), -1).repeat_interleave(rows // len(groups), 0).flatten()
        if isinstance(module, MixingLayer):
            x = phi(x)
        elif number == 0:
            x = phi(x @ matrix(module.permute_hidden, x.shape[1], None).T)
    return x @ matrix(module.permute_out, out, back).T


def apply_mixer(model, images: Tensor, channels: int) -> Tensor:
    """Logits of a Mixer, with every mixing as a dense layer on the flattened features."""

    def norm(module, x):
        if isinstance(module, nn.Identity):
            return x
        return layer_norm(x.unflatten(1, (-1, channels)), (channels,), module.weight, module.bias, 1e-6).flatten(1)

    side = model.stem.patch_size[0]
    patches = images.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    x = (patches @ model.stem.proj.weight.flatten(1).T + model.stem.proj.bias).flatten(1)
    for block in model.blocks:
        skip = x
        if hasattr(block.skip, "index"):
            skip = x @ matrix(block.skip, x.shape[1], None).T
        elif not isinstance(block.skip, nn.Identity):
            skip = norm(block.skip.norm, x @ torch.kron(block.skip.fc.weight, torch.eye(channels, dtype=x.dtype)).T)
        x = skip + apply_mixing(block.mlp_tokens, norm(block.norm1, x), channels, channels, tokens=True)
        skip = x @ matrix(block.channel_skip, x.shape[1], None).T
        x = skip + apply_mixing(
            block.mlp_channels, norm(block.norm2, x), x.shape[1] // channels, channels, tokens=False
        )
    pooled = norm(model.norm, x).unflatten(1, (-1, channels)).mean(1)
    return pooled @ model.head.weight.T + model.head.bias
