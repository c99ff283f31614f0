"""Accuracy on images whose pixels are shuffled in one fixed way: `widemix analyse pixels`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from widemix.data.grid import denormalise
from widemix.data.loader import EvalLoader
from widemix.distributed.topology import read_topology
from widemix.errors import InputError
from widemix.evaluation.assessment import assess_network
from widemix.evaluation.networks import Network
from widemix.plots.style import COLORS, label, new_figure, styled
from widemix.recipe.data import DataSection

ORDERS = {"original": "original", "patches": "patches, and pixels within patches", "all": "all pixels"}
ROW = 6  # images of a row of the sheet


@dataclass(frozen=True)
class PixelScores:
    """Top-1 (percent) and loss of one network for each order of the pixels that it gets."""

    network: str
    trained: str  # the order that it was trained with
    patch: int  # side of the patches that are shuffled
    samples: int
    top1: dict[str, float]
    loss: dict[str, float]


def shuffled_inputs(network: Network, order: str, patch: int | None = None) -> Network:
    """Return the network with its images in another order of pixels, one of `ORDERS`, by its `data.pixel_seed`.

    patch: side of the patches; by default those that it was trained with, or its own. `InputError` if they do not
    divide the image, or if it reads text.
    """
    if not isinstance(network.data, DataSection):
        raise InputError(f"{network.name}: reads {network.data.kind}, which has no pixels")
    side = patch_side(network) if patch is None else patch
    if side < 1 or network.data.image_size % side:
        raise InputError(
            f"{network.name}: patches of {side} pixels do not divide its {network.data.image_size} pixels"
        )
    return replace(network, data=network.data.model_copy(update={"pixel_order": order, "pixel_patch": side}))


def patch_side(network: Network) -> int:
    """Return the side of the patches that a network was trained with, or else of its own; 16 if it has none."""
    data: Any = network.data
    if data.pixel_order == "patches":
        return data.pixel_patch
    module: Any = network.module
    stem = getattr(module, "stem", None) or getattr(module, "patch_embed", None)
    side = getattr(stem, "patch_size", 16)
    return side if isinstance(side, int) else side[0]


def pixel_scores(
    network: Network,
    data: Path | None = None,
    split: str | None = None,
    batch: int | None = None,
    patch: int | None = None,
) -> PixelScores:
    """Evaluate a network with the original pixels, with patches shuffled, and with all pixels shuffled."""
    if network.data.targets != "class":
        raise InputError(f"{network.name}: predicts no classes (data.targets is {network.data.targets})")
    found = {order: assess_network(shuffled_inputs(network, order, patch), data, split, batch) for order in ORDERS}
    section = shuffled_inputs(network, "patches", patch).data
    assert isinstance(network.data, DataSection)
    assert isinstance(section, DataSection)
    return PixelScores(
        network.name,
        network.data.pixel_order,
        section.pixel_patch,
        found["original"].samples,
        {order: each.metrics["top1"] for order, each in found.items()},
        {order: each.metrics["loss"] for order, each in found.items()},
    )


@styled
def plot_scores(scores: Sequence[PixelScores], classes: int):
    """Return bars of top-1, in a group for each network."""
    figure, axes = new_figure(max(4.6, 1.6 + 1.3 * len(scores)), 3.4)
    width = 0.8 / len(ORDERS)
    for number, (order, text) in enumerate(ORDERS.items()):
        x = np.arange(len(scores)) + (number - 1) * width
        bars = axes.bar(x, [each.top1[order] for each in scores], width, color=COLORS[number], label=text)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.axhline(100 / classes, color="black", linewidth=0.8, linestyle="--")
    names = [f"{label(each.network)}\ntrained: {each.trained}" for each in scores]
    axes.set_xticks(range(len(scores)), names)
    axes.set_ylabel("top-1, %")
    axes.set_title("pixels at evaluation; dashed: chance", loc="left")
    figure.legend(loc="outside lower center", ncols=len(ORDERS), fontsize=8, title="shuffled")
    return figure


@styled
def plot_inputs(network: Network, data: Path | None = None, split: str | None = None, patch: int | None = None):
    """Return the first images of the split as the network gets them, a row for each order."""
    figure, axes = new_figure(1.1 * ROW, 1.25 * len(ORDERS), columns=ROW, rows=len(ORDERS), squeeze=False)
    for row, (order, text) in zip(axes, ORDERS.items(), strict=True):
        section = shuffled_inputs(network, order, patch).data
        assert isinstance(section, DataSection)
        changes = {"path": str(data or section.path), "eval_split": split or section.eval_split, "num_classes": 10**6}
        section = section.model_copy(update=changes)  # labels are not used
        loader = EvalLoader(section, ROW, read_topology(), samples=np.arange(ROW))
        with loader.batches() as batches:
            images = denormalise(next(batches).inputs, section)
        for place, image in zip(row, images, strict=False):
            place.imshow(image, interpolation="nearest")
        for place in row:
            place.axis("off")
            place.set_title(" ")  # room for the heading, which must not widen the first column
        heading = "original" if order == "original" else f"shuffled: {text}"
        row[0].annotate(heading, (0, 1.04), xycoords="axes fraction", annotation_clip=False).set_in_layout(False)
    return figure
