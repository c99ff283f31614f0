"""The wide matrices of mixings, made explicitly where they are small, and the receptive fields that they give.

Hayase & Karakida 2024, figure S.9 and appendix D.4. The layers of a mixing are J_c^T (I (x) W) J_c,
J2 (I (x) W) J1 or M * A on the flattened features; activations commute with permutations and leave both untouched.

Shapes: S tokens, C channels, m = S*C features, k units.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from widemix.errors import InputError
from widemix.models.layers import GroupedLinear
from widemix.models.mixer.blocks import MixerBlock
from widemix.models.mixer.network import Mixer
from widemix.models.structured import StructuredLinear
from widemix.models.sw_mlp.network import SwMlp, SwMlpBlock
from widemix.models.sw_mlp.sparse import SparseLinear
from widemix.plots.style import COLORS, label, new_figure, styled


class TooLargeError(InputError):
    """Effective weights that are too large to be made."""


LARGEST = 8192  # side of a matrix that is made
PIXELS = 512  # side of a plotted matrix


def effective_weights(
    block: MixerBlock | SwMlpBlock, features: tuple[int, ...], most: int = LARGEST
) -> dict[str, np.ndarray]:
    """Return the matrix of each layer of a block on its flattened input features: float32 [outputs, inputs].

    `features` is the shape of one sample of the block's input, (S, C) or (m,). Permutations that no activation
    separates from a layer belong to it. `TooLargeError` for matrices with a side above `most`.
    """
    layers = [
        (name, function, shape)
        for branch, shape in _branches(block, features)
        for name, function, shape in _layers(branch, getattr(block, branch), shape)
    ]
    largest = max(int(np.prod(shape)) for _, _, shape in layers)
    if largest > most:
        raise TooLargeError(f"effective weights of {largest:,} columns: at most {most:,} are made")
    with torch.no_grad():
        return {name: _matrix(function, shape) for name, function, shape in layers}


def block_weights(module: Any, features: tuple[int, ...], number: int) -> dict[str, np.ndarray]:
    """Return `effective_weights` of a network's block, from 0; `features` are its `input_features`.

    `InputError` if there is no such block.
    """
    if not 0 <= number < len(module.blocks):
        raise InputError(f"--block {number}: the network has blocks 0 to {len(module.blocks) - 1}")
    for block in module.blocks[:number]:
        with torch.no_grad():
            features = tuple(block(torch.zeros(1, *features)).shape[1:])
    return effective_weights(module.blocks[number], features)


def _branches(block: MixerBlock | SwMlpBlock, features: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Names of the parts of a block before its skip connections, and the shapes of their inputs."""
    if isinstance(block, SwMlpBlock):
        return [("fc1", features), ("fc2", (block.fc1.outputs,))]
    tokens = block.mlp_tokens(torch.zeros(1, *features)).shape[1:]
    return [("mlp_tokens", features), ("mlp_channels", tuple(tokens))]


def _layers(name: str, part: Any, shape: tuple[int, ...]) -> list[tuple[str, Callable[[Tensor], Tensor], tuple]]:
    """The layers of a mixing or masked layer, each as a function of features [k, *shape] without bias."""
    if isinstance(part, nn.Identity):
        return []
    if isinstance(part, SparseLinear):
        return [(name, lambda x: x @ part.dense_weight().T, shape)]
    layers, steps = [], part.steps()
    for step in steps:
        layers.append((f"{name}.{step.name}" if len(steps) > 1 else name, step, shape))
        with torch.no_grad():
            shape = tuple(step(torch.zeros(1, *shape)).shape[1:])
    return layers


def _matrix(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    return function(torch.eye(size).reshape(size, *shape)).flatten(1).T.float().numpy()


def receptive_fields(
    module: nn.Module, features: tuple[int, ...], units: int = 64, skips: bool = False, seed: int = 0
) -> list[dict[str, Any]]:
    """Return, for each mixing from the first on, the fraction of the first block's input that reaches a unit after
    it.

    `features` are the network's `input_features`. Over `units` units chosen at random: `mean`, `least` and `most` of
    the m features, `tokens` of the tokens (the mean; None in an SW-MLP). By propagation through what the masks and
    permutations connect, whatever the weights; with `skips` also through the skip connections.
    """
    steps = _steps(module, features, skips)
    random = np.random.default_rng(seed)
    results = []
    for depth, (name, _, shape) in enumerate(steps):
        size = int(np.prod(shape))
        chosen = torch.from_numpy(random.choice(size, min(units, size), replace=False))
        reached = nn.functional.one_hot(chosen, size).float().reshape(-1, *shape)
        for _, backward, _ in reversed(steps[: depth + 1]):
            reached = (backward(reached) > 0).float()
        fractions = reached.flatten(1).mean(1)
        tokens = reached.amax(2).mean().item() if reached.ndim == 3 else None
        result = {"mean": fractions.mean().item(), "least": fractions.min().item(), "most": fractions.max().item()}
        results.append({"mixing": name, **result, "tokens": tokens})
    return results


def _steps(module: Any, features: tuple[int, ...], skips: bool) -> list[tuple[str, Callable, tuple[int, ...]]]:
    """Of each mixing its name, the transpose of its connections, and the shape of its output."""
    steps = []
    for number, block in enumerate(module.blocks):
        for name, part, skip in _mixings(block):
            connected = _connections(part)
            around = _connections(skip) if skips else None
            outputs = tuple(connected(torch.zeros(1, *features)).shape[1:])
            steps.append((f"blocks.{number}.{name}", _transpose(connected, around, features), outputs))
            features = outputs
    return steps


def _mixings(block: Any) -> list[tuple[str, nn.Module, nn.Module]]:
    """Name, branch and skip of each mixing of a block."""
    if isinstance(block, MixerBlock):
        skips = block.skip, block.channel_skip
        return [("mlp_tokens", block.mlp_tokens, skips[0]), ("mlp_channels", block.mlp_channels, skips[1])]
    return [("fc", nn.Sequential(block.fc1, nn.Identity(), block.fc2), block.skip)]


def input_features(module: Any, image_size: int) -> tuple[int, ...]:
    """Return the shape of one sample of the first block's input: (S0, C) of a Mixer, (m,) of an SW-MLP.

    `InputError` for other networks, which have neither effective weights nor receptive fields.
    """
    if not isinstance(module, Mixer | SwMlp):
        raise InputError("effective weights and receptive fields are those of Mixers and SW-MLPs")
    found: list[tuple[int, ...]] = []
    handle = module.blocks[0].register_forward_pre_hook(lambda _, inputs: found.append(tuple(inputs[0].shape[1:])))
    try:
        with torch.no_grad():
            module(torch.zeros(1, 3, image_size, image_size))
    finally:
        handle.remove()
    return found[0]


def _connections(part: nn.Module) -> nn.Module:
    """A copy whose weights are ones where there are any, without biases, activations and norms."""
    part = copy.deepcopy(part).float()
    for name, layer in list(part.named_modules()):
        if isinstance(layer, nn.Linear | GroupedLinear | SparseLinear | StructuredLinear):
            for weight in layer.parameters():
                nn.init.ones_(weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif name and name.rpartition(".")[2] in ("act", "norm"):
            part.set_submodule(name, nn.Identity())
    return part


def _transpose(part: nn.Module, around: nn.Module | None, features: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    def backward(reached: Tensor) -> Tensor:
        x = torch.zeros(len(reached), *features, requires_grad=True)
        y = part(x) if around is None else part(x) + around(x)
        return torch.autograd.grad(y, x, reached)[0]

    return backward


@styled
def plot_weights(networks: dict[str, dict[str, np.ndarray]], values: bool = False):
    """Return figure S.9, a row for each network, a column for each layer: which weights there are, or values."""
    columns = max(len(layers) for layers in networks.values())
    figure, axes = new_figure(2.6 * columns + 0.4, 2.7 * len(networks) + 0.3, columns, len(networks), squeeze=False)
    for row, (name, layers) in zip(axes, networks.items(), strict=True):
        for place in row[len(layers) :]:
            place.set_visible(False)
        for place, (layer, matrix) in zip(row, layers.items(), strict=False):
            if values:
                limit = np.abs(matrix).max()
                place.imshow(matrix, cmap="RdBu", vmin=-limit, vmax=limit, interpolation="nearest")
            else:
                shown = shrink(matrix != 0)
                extent = (0, matrix.shape[1], matrix.shape[0], 0)
                place.imshow(shown, cmap="Greys", vmin=0, vmax=1, interpolation="nearest", extent=extent)
            place.set_title(f"{label(name)}\n{layer}")
            place.spines[:].set_visible(True)
    return figure


def shrink(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix of at most `PIXELS` rows and columns: the largest entry of each block of equal size."""
    rows, columns = (max(1, -(-size // PIXELS)) for size in matrix.shape)
    padded = np.pad(matrix, ((0, -matrix.shape[0] % rows), (0, -matrix.shape[1] % columns)))
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns).max((1, 3))


@styled
def plot_fields(networks: Sequence[dict[str, Any]]):
    """Return the fraction of the input that reaches a unit, by depth; dashed through the skip connections too."""
    figure, axes = new_figure(6, 3.8)
    for network, color in zip(networks, COLORS * len(networks), strict=False):
        for kind, line in (("fields", "o-"), ("fields_with_skips", "o--")):
            fields = network[kind]
            text = label(network["network"]) if kind == "fields" else None
            axes.plot(range(1, len(fields) + 1), [each["mean"] for each in fields], line, color=color, label=text)
        axes.axhline(network["features"] ** -0.5, color=color, linewidth=0.8, linestyle=":")
    axes.set(xlabel="mixings", ylabel="fraction of the features that reach a unit", yscale="log")
    axes.set_title(r"dashed: with skip connections; dotted: $1/\sqrt{m}$")
    axes.legend(fontsize=8)
    return figure
