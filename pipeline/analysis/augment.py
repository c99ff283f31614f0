"""Sheets of a recipe's augmented images and of every operation: `widemix analyse augment`."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from widemix.analysis.operations import AMPLIFIED, Comparison, all_comparisons, comparison_tiles
from widemix.data.augment.program import compile_policy
from widemix.data.batches import Batch
from widemix.data.decode import Decoder, centre_boxes, cubic
from widemix.data.grid import BACKGROUND, GUTTER, TEXT, TEXT_COLOR, grid, training_grid
from widemix.data.loader import TrainLoader
from widemix.data.split import open_split
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.files import atomic_write
from widemix.formats.beton import open_beton
from widemix.recipe import Recipe
from widemix.recipe.data import DataSection
from widemix.recipe.policy import parse_policy
from widemix.tally import track


def write_sheets(recipe: Recipe, folder: Path, images: int, seed: int) -> list[Path]:
    """Write `training.png` and `operations.png` into the folder, each atomically; returns their paths.

    The first has the images of the first step of a run with this seed, the second each operation on the first
    image of the training split.
    """
    section = _image_section(recipe)
    batch = first_batch(recipe, images, seed)
    folder.mkdir(parents=True, exist_ok=True)
    training, operations = folder / "training.png", folder / "operations.png"
    heading = f"{images} images as the model sees them in step 1 of epoch 1, seed {seed}"
    parts = [(f"{heading}\n{settings_line(recipe)}", training_grid(batch, images, section))]
    write_png(stacked(parts), training)
    write_png(stacked(operation_parts(recipe)), operations)
    return [training, operations]


def first_batch(recipe: Recipe, images: int, seed: int) -> Batch:
    """At least `images` images of the first step, in whole mixup groups, on the CPU."""
    group = recipe.augment.mix_group if recipe.augment.mixes_images else 1
    batch = -(-images // group) * group
    available = len(open_split(recipe.data, recipe.data.train_split, open_beton))
    if batch > available:
        grouped = f" in whole groups of augment.mix_group {group}" if group > 1 else ""
        raise InputError(f"--images {images}: the training split has {available // group * group}{grouped}")
    changes = {"global_batch": batch, "grad_accum_steps": 1, "seed": seed, "precision": "fp32"}
    train, topology = recipe.train.model_copy(update=changes), Topology(0, 1, 0, 1, torch.device("cpu"))
    loader = TrainLoader(recipe.data, recipe.augment, train, topology)
    with loader.batches(epoch=0) as batches:
        return next(batches)


def operation_parts(recipe: Recipe) -> list[tuple[str, np.ndarray]]:
    """A heading and a grid for each operation, on the first training image."""
    policy = parse_policy(recipe.augment.auto_augment) if recipe.augment.auto_augment else None
    section = _image_section(recipe)
    program = compile_policy(policy, section.mean, section.interpolation)
    fill = program.fill & 255, program.fill >> 8 & 255, program.fill >> 16
    image = _first_image(section)
    parts = [
        (
            "Each operation over its range: ours, its peer's (Pillow as timm calls it), and the difference times "
            f"{AMPLIFIED}.\nThe image before:",
            grid([image], [""], 1),
        )
    ]
    comparisons = all_comparisons(fill)
    for comparison in track(comparisons, "operations compared", len(comparisons), "operations"):
        tiles, captions = comparison_tiles(comparison, image)
        note = _used_by(comparison, recipe, set(program.table[:, 0]))
        parts.append((f"{comparison.name}{note}", grid(tiles, captions, max(3, len(comparison.arguments)))))
    return parts


def _used_by(comparison: Comparison, recipe: Recipe, numbers: set[float]) -> str:
    """A note next to the operations of the recipe's policy, which have these numbers."""
    return f"  (used by {recipe.augment.auto_augment})" if comparison.number in numbers else ""


def _image_section(recipe: Recipe) -> DataSection:
    if not isinstance(recipe.data, DataSection):
        raise InputError(f"data.kind {recipe.data.kind}: only images are augmented")
    return recipe.data


def _first_image(section: DataSection) -> np.ndarray:
    """The first sample of the training split as its centre square, uint8 [H, W, 3]."""
    beton = open_split(section, section.train_split, open_beton)
    image = np.empty((1, section.image_size, section.image_size, 3), np.uint8)
    first = np.zeros(1, np.int64)
    boxes = centre_boxes(first, beton.height, beton.width, 1.0)
    Decoder(beton).read(first, boxes, cubic(first, section.interpolation, 0, 0), image, threads=1)
    return image[0]


def settings_line(recipe: Recipe) -> str:
    """The augment keys that the recipe sets, in one line."""
    settings = recipe.augment.model_dump(mode="json", exclude_defaults=True)
    return ", ".join(f"{key} {value}" for key, value in settings.items()) or "augmentation: all defaults"


def stacked(parts: Sequence[tuple[str, np.ndarray]]) -> Image.Image:
    """Pairs of heading and grid as one image, from top to bottom."""
    font, line = ImageFont.load_default(TEXT + 2), TEXT + 7
    heights = [line * (heading.count("\n") + 1) + tiles.shape[0] for heading, tiles in parts]
    widths = [font.getlength(text) for heading, _ in parts for text in heading.split("\n")]
    width = max(*(tiles.shape[1] for _, tiles in parts), int(max(widths)) + 2 * GUTTER)
    sheet = Image.new("RGB", (width, sum(heights) + GUTTER), BACKGROUND)
    draw, y = ImageDraw.Draw(sheet), GUTTER
    for (heading, tiles), height in zip(parts, heights, strict=True):
        draw.multiline_text((GUTTER, y), heading, TEXT_COLOR, font)
        sheet.paste(Image.fromarray(tiles), (0, y + height - tiles.shape[0]))
        y += height
    return sheet


def write_png(image: Image.Image, path: Path) -> None:
    """Write a PNG atomically: until it is complete, a file of that name stays as it was."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    atomic_write(path, buffer.getvalue())
