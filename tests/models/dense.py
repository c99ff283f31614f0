"""The same networks as explicit matrices and sums: slow, plain, and sharing no code with what they check."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, gelu, layer_norm, pad, softmax

from widemix.models.pk_layers import MixingLayer, MixingMlp
from widemix.models.structured import StructuredLinear
from widemix.models.sw_mlp.sparse import SparseLinear

PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "square": torch.square,
}


class Times(nn.Module):
    """In the place of stochastic depth: the logits show which branch it scales."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return self.factor * x


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


def apply_mixing(
    section, module: MixingLayer | MixingMlp, x: Tensor, rows: int, channels: int, tokens: bool
) -> Tensor:
    """J_out (I (x) W2) phi(J_hidden (I (x) W1) J_in x) on vectors [B, m], by dense matrices."""
    phi = PHI[section.activation]
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


def apply_mixer(section, model, images: Tensor) -> Tensor:
    """Features of a Mixer, with every mixing as a dense layer on the flattened tokens."""
    x, channels = patches(model, images).flatten(1), model.stem.proj.out_channels

    def norm(module, x):
        return normed(module, x.unflatten(1, (-1, channels)), section.norm_eps).flatten(1)

    for block in model.blocks:
        skip = x
        if hasattr(block.skip, "index"):
            skip = x @ matrix(block.skip, x.shape[1], None).T
        elif not isinstance(block.skip, nn.Identity):
            skip = norm(block.skip.norm, x @ torch.kron(block.skip.fc.weight, torch.eye(channels, dtype=x.dtype)).T)
        mixed = apply_mixing(section, block.mlp_tokens, norm(block.norm1, x), channels, channels, tokens=True)
        x = skip + block.drop_path1.factor * mixed
        skip = x @ matrix(block.channel_skip, x.shape[1], None).T
        mixed = apply_mixing(
            section, block.mlp_channels, norm(block.norm2, x), x.shape[1] // channels, channels, tokens=False
        )
        x = skip + block.drop_path2.factor * mixed
    return norm(model.norm, x).unflatten(1, (-1, channels)).mean(1)


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    return x @ module.weight.T + (0 if module.bias is None else module.bias)


def mlp(module, x: Tensor) -> Tensor:
    return linear(module.fc2, gelu(linear(module.fc1, x)))


def normed(module: nn.Module, x: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm over the last axis, or nothing where there is no norm."""
    if isinstance(module, nn.Identity):
        return x
    return layer_norm(x, x.shape[-1:], module.weight, module.bias, eps)


def standardised(module: nn.Module, x: Tensor) -> Tensor:
    """A batch norm in evaluation."""
    return (x - module.running_mean) / (module.running_var + 1e-5).sqrt() * module.weight + module.bias


def patches(model, images: Tensor) -> Tensor:
    """The patch layer: [B, 3, H, W] -> [B, S, C], row by row."""
    side = model.stem.patch_size[0]
    cut = images.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    return cut @ model.stem.proj.weight.flatten(1).T + model.stem.proj.bias


def apply_ff_only(section, model, images: Tensor) -> Tensor:
    x = torch.cat([model.cls_token.expand(len(images), 1, -1), patches(model, images)], 1) + model.pos_embed
    for block in model.blocks:
        x = x + block.drop_path1.factor * mlp(block.mlp1, normed(block.norm1, x))
        mixed = torch.stack([mlp(block.mlp2, one.T).T for one in normed(block.norm2, x.mT).mT])
        x = x + block.drop_path2.factor * mixed
    return normed(model.norm, x)[:, 0]


def permute_mlp(module, x: Tensor, side: int) -> Tensor:
    """Vision Permutator's mixing, place by place."""
    channels = x.shape[2]
    grid, part = x.view(-1, side, side, channels), channels // side
    along_h, along_w = torch.zeros_like(grid), torch.zeros_like(grid)
    for segment in range(side):
        of = slice(segment * part, (segment + 1) * part)
        for line in range(side):
            column = linear(module.mlp_h, torch.cat([grid[:, place, line, of] for place in range(side)], 1))
            row = linear(module.mlp_w, torch.cat([grid[:, line, place, of] for place in range(side)], 1))
            for place in range(side):
                along_h[:, place, line, of] = column[:, place * part : (place + 1) * part]
                along_w[:, line, place, of] = row[:, place * part : (place + 1) * part]
    along_c = linear(module.mlp_c, grid)
    weight = torch.exp(mlp(module.reweight, (along_h + along_w + along_c).mean((1, 2))).view(-1, channels, 3))
    weight = (weight / weight.sum(2, keepdim=True))[:, None, None]
    mixed = along_h * weight[..., 0] + along_w * weight[..., 1] + along_c * weight[..., 2]
    return linear(module.proj, mixed).flatten(1, 2)


def apply_permutator(section, model, images: Tensor) -> Tensor:
    x = patches(model, images)
    for block in model.blocks:
        side = int(x.shape[1] ** 0.5)
        x = x + block.drop_path1.factor * permute_mlp(block.mix, normed(block.norm1, x), side)
        x = x + block.drop_path2.factor * mlp(block.mlp, normed(block.norm2, x))
    return normed(model.norm, x).mean(1)


def repmlp_mixing(section, block, x: Tensor) -> Tensor:
    """RepMLP's mixing, channel by channel: a matrix and convolutions shared by groups, and a gate."""
    first, _, second, _ = block.gate
    gate = torch.sigmoid(linear(second, torch.relu(linear(first, x.mean(1)))))
    side, channels = int(x.shape[1] ** 0.5), []
    for channel in range(x.shape[2]):
        group = channel % section.share_sets

        def norm(values, module, group=group):
            parts = (module.running_mean, module.running_var, module.weight, module.bias)
            return batch_norm(values[:, None], *(part[group : group + 1] for part in parts))[:, 0]

        out = norm(x[:, :, channel] @ block.perceptron.dense.weight[group].T, block.perceptron.norm)
        for local in block.perceptron.local:
            kernel = local.conv.weight[group : group + 1]
            image = x[:, :, channel].view(-1, 1, side, side)
            out = out + norm(conv2d(image, kernel, padding=kernel.shape[-1] // 2).flatten(1), local.norm)
        channels.append(out * gate[:, channel : channel + 1])
    return torch.stack(channels, 2)


def apply_repmlp(section, model, images: Tensor) -> Tensor:
    x = patches(model, images)
    for block in model.blocks:
        mixed = repmlp_mixing(section, block, standardised(block.norm1.norm, x))
        x = x + block.drop_path1.factor * mixed
        first, its_norm, _, second, last_norm = block.ffn
        hidden = linear(first, standardised(block.norm2.norm, x))
        hidden = gelu(standardised(its_norm.norm, hidden))
        x = x + block.drop_path2.factor * standardised(last_norm.norm, linear(second, hidden))
    return normed(model.norm, x).mean(1)


def masked(layer: SparseLinear) -> Tensor:
    """The layer's matrix, place by place."""
    rows = []
    for row in range(layer.outputs):
        places = range(int(layer.row_starts[row]), int(layer.row_starts[row + 1]))
        at = {int(layer.columns[place]): layer.values[place] for place in places}
        zero = layer.values.new_zeros(())
        rows.append(torch.stack([at.get(column, zero) for column in range(layer.inputs)]))
    return torch.stack(rows)


def apply_sw_mlp(section, model, images: Tensor) -> Tensor:
    """Patch layer (S.1), vectorisation, blocks of equations S.16, S.17 or, as C.1 has them, a Mixer's, then LN."""
    z, eps = patches(model, images).flatten(1), section.norm_eps
    for number, block in enumerate(model.blocks):
        mixed = gelu(normed(block.norm, z, eps) @ masked(block.fc1).T + block.fc1.bias)
        if section.expansion:
            mixed = mixed @ masked(block.fc2).T + block.fc2.bias
            mixed = gelu(mixed) if section.outer_activation else mixed
        projects = section.project_features and number == 0
        z = mixed + (normed(block.skip.norm, z @ masked(block.skip.fc).T, eps) if projects else z)
    if section.pool:
        return normed(model.norm.norm, z.unflatten(1, (-1, section.channels)), eps).mean(1)
    return normed(model.norm, z, eps)


def monarch(layer, inputs: tuple[int, int], outputs: tuple[int, int], kronecker: bool) -> Tensor:
    """J_c^T L J_c R (equation 12) of r x s inputs and R x S outputs, or with equal blocks L (x) R."""
    if kronecker:
        return torch.kron(layer.left.weight, layer.right.weight)
    left, right = torch.block_diag(*layer.left.weight), torch.block_diag(*layer.right.weight)
    middle = transposition(inputs[0], outputs[1])
    return transposition(outputs[1], outputs[0]) @ left @ middle @ right


def apply_shallow(section, model, images: Tensor) -> Tensor:
    """B2 ReLU(B1 x); the two factors of a size are the nearest."""
    x = (images[:, :1] if section.grayscale else images).flatten(1)
    b1, b2 = model.stem[0], model.blocks[0]
    if section.matrices == "dense":
        return linear(b2, torch.relu(linear(b1, x)))
    pixels, width = (nearest(size) for size in (x.shape[1], section.width))
    is_kronecker = section.matrices == "kronecker"
    hidden = torch.relu(x @ monarch(b1, pixels, width, is_kronecker).T)
    return hidden @ monarch(b2, width, width, is_kronecker).T


def nearest(size: int) -> tuple[int, int]:
    return max((a, size // a) for a in range(1, size + 1) if size % a == 0 and a * a <= size)


def apply_lasso(section, model, images: Tensor) -> Tensor:
    """Two layers, each with a batch norm and a ReLU; or 9 x 9 windows of stride 2 with own weights."""
    (first, norm, _), (second, last_norm, _) = model.stem, model.blocks
    if section.kind == "s_fc":
        hidden = linear(first, images.flatten(1))
    else:
        padded, side = pad(images, (4, 4, 4, 4)), -(-images.shape[-1] // 2)
        windows = [
            padded[:, :, 2 * y : 2 * y + 9, 2 * x : 2 * x + 9].flatten(1) for y in range(side) for x in range(side)
        ]
        places = [window @ weight for window, weight in zip(windows, first.weight, strict=True)]
        hidden = torch.stack(places, 2).flatten(1)
    hidden = standardised(norm, hidden).clamp(min=0)
    return standardised(last_norm, linear(second, hidden)).clamp(min=0)


def apply_bottleneck_mlp(section, model, images: Tensor) -> Tensor:
    x = linear(model.stem, images.flatten(1))
    for block in model.blocks:
        x = x + mlp(block, normed(block.norm, x, section.norm_eps))
    return x


def apply_text_mixer(section, model, texts: Tensor) -> Tensor:
    """Padding is zeros, also within each block."""
    real, sizes = (texts != 0).double()[:, :, None], (section.tokens, section.width)
    x = model.embedding.weight[texts] * real
    for block in model.blocks:
        z = (normed(block.norm1, x) * real).flatten(1)
        z = apply_mixing(section, block.mlp_tokens, z, section.width, section.width, tokens=True)
        x = x + block.drop_path1.factor * z.unflatten(1, sizes)
        z = (normed(block.norm2, x) * real).flatten(1)
        z = apply_mixing(section, block.mlp_channels, z, section.tokens, section.width, tokens=False)
        x = x + block.drop_path2.factor * z.unflatten(1, sizes)
    return (normed(model.norm, x) * real).sum(1) / real.sum(1)


def apply_text_transformer(section, model, texts: Tensor) -> Tensor:
    """Of each text by itself, without its padding."""
    pooled, size = [], section.width // section.heads
    for ids in texts:
        length = int((ids != 0).sum())
        x = (model.embedding.weight[ids] + model.positions[0])[:length]
        for layer in model.encoder.layers:
            attention = layer.self_attn
            z = normed(layer.norm1, x, 1e-5)
            q, k, v = (z @ attention.in_proj_weight.T + attention.in_proj_bias).chunk(3, dim=1)
            heads = [
                softmax(q[:, of] @ k[:, of].T / size**0.5, dim=1) @ v[:, of]
                for of in (slice(head * size, (head + 1) * size) for head in range(section.heads))
            ]
            x = x + linear(attention.out_proj, torch.cat(heads, 1))
            x = x + linear(layer.linear2, gelu(linear(layer.linear1, normed(layer.norm2, x, 1e-5))))
        pooled.append(normed(model.norm, x).mean(0))
    return torch.stack(pooled)


FEATURES: dict[str, Callable[..., Tensor]] = {
    "mixer": apply_mixer,
    "s_mixer": apply_mixer,
    "ff_only": apply_ff_only,
    "permutator": apply_permutator,
    "repmlp": apply_repmlp,
    "sw_mlp": apply_sw_mlp,
    "shallow": apply_shallow,
    "s_fc": apply_lasso,
    "s_local": apply_lasso,
    "bottleneck_mlp": apply_bottleneck_mlp,
    "text_mixer": apply_text_mixer,
    "text_transformer": apply_text_transformer,
}


def logits(section, model, x: Tensor) -> Tensor:
    """What a network of this section computes, in evaluation, with a `Times` for each stochastic depth."""
    return linear(model.head, FEATURES[section.kind](section, model, x))
