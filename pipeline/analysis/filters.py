"""Filters of the patch layer and of token-mixing units, as sheets: `widemix analyse filters`.

As in figure 5 of Tolstikhin et al. 2021, filters are sorted by frequency, and those of opposite phases are next to
each other. Shapes: n filters of h x w positions, with or without 3 colours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from torch import nn

from widemix.errors import InputError
from widemix.models.mixer.network import Mixer
from widemix.models.permutation import Permute
from widemix.models.pk_layers import Mixing
from widemix.models.structured import StructuredLinear
from widemix.plots.style import label, new_figure, styled

_TOKEN_MIXINGS = ("mlp_tokens.fc1", "linear_tokens")  # of timm's networks


@dataclass(frozen=True)
class Filters:
    """The filters of one layer, and how they are sorted."""

    layer: str
    values: np.ndarray  # float32 [n, h, w] or [n, h, w, 3]
    order: np.ndarray  # int64 [n]: opposites next to each other, lowest frequency first
    frequency: np.ndarray  # float64 [n]: `mean_frequency`, in the order of the layer
    opposition: np.ndarray  # float64 [n // 2]: cosine of each successive pair of `order`; -1 is exactly opposite,
    # nan where a filter of the pair is all zeros

    @property
    def median_opposition(self) -> float:
        """The median of `opposition`; nan where no pair has one."""
        known = self.opposition[~np.isnan(self.opposition)]
        return float(np.median(known)) if len(known) else math.nan

    def as_json(self) -> dict[str, Any]:
        """Return what --json writes, without the values; nan becomes null."""
        arrays = {name: getattr(self, name).tolist() for name in ("order", "frequency")}
        opposition = [None if math.isnan(cosine) else cosine for cosine in self.opposition.tolist()]
        return {"layer": self.layer, "shape": list(self.values.shape), **arrays, "opposition": opposition}


def patch_filters(module: nn.Module) -> tuple[str, np.ndarray]:
    """Return the name of the first convolution of a network and its filters: float32 [n, h, w, 3]."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels == 3 and layer.groups == 1:
            return name, layer.weight.detach().float().cpu().permute(0, 2, 3, 1).numpy()
    raise InputError("the network has no convolution of images, so no patch filters")


def token_filters(module: nn.Module, block: int) -> tuple[str, np.ndarray]:
    """Return the name of a block's token mixing, and the weights by which each of its units reads the tokens.

    float32 [units, h, w], with the tokens on their grid. `InputError` if there is no such block, or its tokens have
    no grid: they are mixtures of patches, or permuted.
    """
    blocks: Any = getattr(module, "blocks", ())
    if not 0 <= block < len(blocks):
        raise InputError(f"--blocks {block}: the network has {len(blocks)} blocks, from 0")
    layers = dict(blocks[block].named_modules())
    mixing = layers.get("mlp_tokens")
    names = [f"mlp_tokens.{mixing.steps()[0].name}"] if isinstance(mixing, Mixing) else _TOKEN_MIXINGS
    name = next((name for name in names if name in layers), None)
    if name is None:
        raise InputError(f"--blocks {block}: has no token mixing with a usual name ({', '.join(_TOKEN_MIXINGS)})")
    if isinstance(mixing, Mixing) and isinstance(mixing.permute_in, Permute):
        raise InputError(f"--blocks {block}: its tokens are randomly permuted with the channels and have no grid")
    layer: Any = layers[name]
    matrix = layer.dense_weight() if isinstance(layer, StructuredLinear) else layer.weight
    weight = matrix.detach().float().cpu().flatten(0, -2).numpy()
    if block > 0 and isinstance(module, Mixer) and module.section.project_tokens:
        raise InputError(f"--blocks {block}: its tokens are projected (model.project_tokens) and have no grid")
    side = round(weight.shape[1] ** 0.5)
    if side**2 != weight.shape[1]:
        raise InputError(f"--blocks {block}: {weight.shape[1]} tokens are no square grid")
    return f"blocks.{block}.{name}", weight.reshape(-1, side, side)


def mean_frequency(filters: np.ndarray) -> np.ndarray:
    """Return the mean spatial frequency of each filter in cycles a position, weighted by power: float64 [n].

    From 0, a constant filter, to sqrt(1/2), a chessboard. A filter of zeros has 0.
    """
    values = np.asarray(filters, np.float64)
    values = values.reshape(*values.shape[:3], -1)
    power = (np.abs(np.fft.fft2(values, axes=(1, 2))) ** 2).sum(3)
    radius = np.hypot(np.fft.fftfreq(values.shape[1])[:, None], np.fft.fftfreq(values.shape[2]))
    total = power.sum((1, 2))
    return (power * radius).sum((1, 2)) / np.where(total > 0, total, 1)


def sort_filters(filters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `order`, `frequency` and `opposition` of `Filters`.

    The two most opposite filters are a pair, then the two most opposite of the others, and so on; pairs are sorted by
    their mean frequency. Of an odd number one is left, the last.
    """
    frequency = mean_frequency(filters)
    flat = np.asarray(filters, np.float64).reshape(len(filters), -1)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    unit = flat / np.where(norms > 0, norms, 1)
    cosine = unit @ unit.T
    first, second = np.triu_indices(len(flat), 1)
    free, pairs = np.ones(len(flat), bool), []
    for place in np.argsort(cosine[first, second], kind="stable"):
        a, b = first[place], second[place]
        if free[a] and free[b]:
            free[a] = free[b] = False
            pairs.append((a, b))
            if 2 * len(pairs) >= len(flat) - 1:
                break
    pairs.sort(key=lambda pair: frequency[list(pair)].mean())
    order = np.array([*(each for pair in pairs for each in pair), *np.flatnonzero(free)], np.int64)
    opposition = [cosine[a, b] if norms[a] > 0 < norms[b] else np.nan for a, b in pairs]
    return order, frequency, np.array(opposition)


def layer_filters(module: nn.Module, blocks: Sequence[int] | None = None) -> list[Filters]:
    """Return the patch filters of a network and the token-mixing units of some blocks, sorted.

    Without `blocks` the units of the first three, as far as there are any on a grid.
    """
    found = [patch_filters(module)]
    for block in range(3) if blocks is None else blocks:
        try:
            found.append(token_filters(module, block))
        except InputError:
            if blocks is not None:
                raise
    return [Filters(name, values, *sort_filters(values)) for name, values in found]


@styled
def plot_filters(network: str, filters: Filters):
    """Return a sheet of all filters, row by row in their order, each scaled to its largest value; grey is 0."""
    values = filters.values[filters.order]
    n, h, w = values.shape[:3]
    largest = np.abs(values).reshape(n, -1).max(1).reshape(-1, *[1] * (values.ndim - 1))
    tiles = 0.5 + 0.5 * values / np.maximum(largest, 1e-30)
    if tiles.ndim == 3:
        tiles = np.repeat(tiles[..., None], 3, axis=3)
    columns = 2 * max(1, round((n / 1.6) ** 0.5 * (h / w) ** 0.5 * 1.26 / 2))
    rows = -(-n // columns)
    sheet = np.ones((rows * (h + 1) + 1, columns * (w + 1) + 1, 3))
    for place, tile in enumerate(tiles):
        y, x = divmod(place, columns)
        sheet[1 + y * (h + 1) :, 1 + x * (w + 1) :][:h, :w] = tile
    height, width = sheet.shape[:2]
    figure, axes = new_figure(7.5, 7.5 * height / width + 1.0)
    axes.imshow(sheet, interpolation="nearest")
    axes.axis("off")
    scale = ScalarMappable(Normalize(-1, 1), "gray")
    low, high = float(largest.min()), float(largest.max())
    text = f"weight over the largest of its filter, which are {low:.2g} to {high:.2g}"
    figure.colorbar(scale, ax=axes, orientation="horizontal", shrink=0.5, aspect=40, label=text)
    pair = f"median cosine of pairs {filters.median_opposition:.2f}" if n > 1 else ""
    axes.set_title(f"{label(network)}, {filters.layer}: by frequency, {pair}", loc="left")
    return figure
