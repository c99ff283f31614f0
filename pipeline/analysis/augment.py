"""What a recipe's augmentation does, to be looked at: `widemix analyse augment`."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from pipeline.analysis.operations import AMPLIFIED, Shown, all_operations, compared
from pipeline.data.augment.program import compile_policy
from pipeline.data.decode import Decoder, centre_boxes, cubic
from pipeline.data.grid import GUTTER, INK, PAPER, TEXT, grid, training_grid
from pipeline.data.loader import Batch, TrainLoader
from pipeline.data.split import open_split
from pipeline.distributed.topology import Topology
from pipeline.errors import InputError
from pipeline.formats.beton import open_beton
from pipeline.recipe import Recipe
from pipeline.recipe.data import DataSection
from pipeline.recipe.policy import parse_policy


def draw_sheets(recipe: Recipe, folder: Path, pictures: int, seed: int) -> list[Path]:
    """Write `training.png` and `operations.png` into the folder; each whole or not at all.

    The first shows what the first step of a run with that seed trains on, the second each operation on the first
    picture of the split.
    """
    section = _pictures(recipe)
    batch = first_batch(recipe, pictures, seed)
    folder.mkdir(parents=True, exist_ok=True)
    training, operations = folder / "training.png", folder / "operations.png"
    heading = f"{pictures} pictures as the model sees them in step 1 of epoch 1, seed {seed}"
    sheet = [(f"{heading}\n{_settings(recipe)}", training_grid(batch, pictures, section))]
    write_png(stacked(sheet), training)
    write_png(stacked(_operations(recipe)), operations)
    return [training, operations]


def first_batch(recipe: Recipe, pictures: int, seed: int) -> Batch:
    """At least `pictures` of the first step's pictures, in whole mixing groups; on the CPU."""
    group = recipe.augment.mix_group if recipe.augment.mixing else 1
    batch = -(-pictures // group) * group
    there = len(open_split(recipe.data, recipe.data.train_split, open_beton))
    if batch > there:
        grouped = f" in whole groups of augment.mix_group {group}" if group > 1 else ""
        raise InputError(f"--pictures {pictures}: the training split has {there // group * group}{grouped}")
    alone = Topology(0, 1, 0, 1, torch.device("cpu"))
    loader = TrainLoader(recipe.data, recipe.augment, batch, 1, seed, alone)
    with loader.batches(epoch=0) as batches:
        return next(batches)


def _operations(recipe: Recipe) -> list[tuple[str, np.ndarray]]:
    """A heading and a grid for each operation, on the first training picture."""
    policy = parse_policy(recipe.augment.auto_augment) if recipe.augment.auto_augment else None
    section = _pictures(recipe)
    program = compile_policy(policy, section.mean)
    fill = program.fill & 255, program.fill >> 8 & 255, program.fill >> 16
    picture = _first_picture(section)
    parts = [
        (
            "Each operation over its range: ours, its peer's (Pillow as timm calls it), and the difference times "
            f"{AMPLIFIED}.\nThe picture before:",
            grid([picture], [""], 1),
        )
    ]
    for shown in all_operations(fill):
        tiles, words = compared(shown, picture)
        drawn = _is_drawn(shown, recipe, set(program.table[:, 0]))
        parts.append((f"{shown.name}{drawn}", grid(tiles, words, max(3, len(shown.arguments)))))
    return parts


def _is_drawn(shown: Shown, recipe: Recipe, numbers: set[float]) -> str:
    return f"  (drawn by {recipe.augment.auto_augment})" if shown.number in numbers else ""


def _pictures(recipe: Recipe) -> DataSection:
    if not isinstance(recipe.data, DataSection):
        raise InputError(f"data.kind {recipe.data.kind}: only pictures are augmented")
    return recipe.data


def _first_picture(section: DataSection) -> np.ndarray:
    """The first sample of the training split as its centre square, uint8 [H, W, 3]."""
    beton = open_split(section, section.train_split, open_beton)
    picture = np.empty((1, section.image_size, section.image_size, 3), np.uint8)
    first = np.zeros(1, np.int64)
    boxes = centre_boxes(first, beton.height, beton.width, 1.0)
    Decoder(beton).read(first, boxes, cubic(first, section.interpolation, 0, 0), picture, threads=1)
    return picture[0]


def _settings(recipe: Recipe) -> str:
    """What the recipe's augmentation sets, in one line."""
    settings = recipe.augment.model_dump(mode="json", exclude_defaults=True)
    return ", ".join(f"{key} {value}" for key, value in settings.items()) or "augmentation as in a silent recipe"


def stacked(parts: Sequence[tuple[str, np.ndarray]]) -> Image.Image:
    """Grids under each other, each below its lines of heading."""
    font, line = ImageFont.load_default(TEXT + 2), TEXT + 7
    heights = [line * (heading.count("\n") + 1) + tiles.shape[0] for heading, tiles in parts]
    widths = [font.getlength(text) for heading, _ in parts for text in heading.split("\n")]
    width = max(*(tiles.shape[1] for _, tiles in parts), int(max(widths)) + 2 * GUTTER)
    paper = Image.new("RGB", (width, sum(heights) + GUTTER), PAPER)
    draw, y = ImageDraw.Draw(paper), GUTTER
    for (heading, tiles), height in zip(parts, heights, strict=True):
        draw.multiline_text((GUTTER, y), heading, INK, font)
        paper.paste(Image.fromarray(tiles), (0, y + height - tiles.shape[0]))
        y += height
    return paper


def write_png(picture: Image.Image, path: Path) -> None:
    """The picture under its name once it is whole; what was there before stays until then."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        picture.save(unfinished, format="PNG", optimize=True)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
