"""Sheets of a recipe's augmented images, and of every operation beside its peer: `widemix analyse augment`."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from widemix.data.augment.batch import scratch_for
from widemix.data.augment.color_jitter import turn_hue
from widemix.data.augment.filters import gaussian_smooth
from widemix.data.augment.operations import apply
from widemix.data.augment.program import compile_policy, sample_argument
from widemix.data.augment.registry import OPERATIONS, Operation
from widemix.data.batches import Batch
from widemix.data.decode import Decoder, centre_boxes, cubic
from widemix.data.grid import BACKGROUND, GUTTER, TEXT, TEXT_COLOR, grid, training_grid
from widemix.data.loader import TrainLoader
from widemix.data.split import open_split
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.files import atomic_write
from widemix.formats.beton import open_beton
from widemix.progress_line import track
from widemix.recipe import Recipe
from widemix.recipe.data import DataSection
from widemix.recipe.policy import parse_policy

AMPLIFIED = 128  # factor of differences, so that they are visible
LARGEST = 128  # pixels: larger images are reduced, their differences to the maximum of each block
MAGNITUDES = range(0, 11, 2)  # shown of an operation that names no arguments


@dataclass(frozen=True)
class Comparison:
    """An operation of ours and its peer, as functions of image and argument, and the arguments to compare."""

    name: str
    number: int | None  # see `widemix.data.augment.registry`; None: not an operation of policies
    arguments: tuple[float, ...]  # a single unused one if the operation has none
    peer: str
    ours: Callable[[np.ndarray, float], np.ndarray]
    theirs: Callable[[np.ndarray, float], np.ndarray] | None  # None: there is no peer


def all_comparisons(fill: tuple[int, int, int]) -> list[Comparison]:
    """Every operation over its whole range; those that move pixels with both interpolations and RGB colour `fill`."""
    values = [_of_operation(operation, fill, None) for operation in OPERATIONS if not operation.moves]
    moves = [
        _of_operation(operation, fill, resample)
        for resample in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
        for operation in OPERATIONS
        if operation.moves
    ]
    return [*values, *moves, *_of_jitter()]


def _of_operation(operation: Operation, fill: tuple[int, int, int], resample: Image.Resampling | None) -> Comparison:
    def ours(image: np.ndarray, argument: float) -> np.ndarray:
        changed = image.copy()
        if operation.function is not None:
            operation.function(changed, float(argument))
            return changed
        packed = np.uint32(fill[0] | fill[1] << 8 | fill[2] << 16)
        cubic = resample == Image.Resampling.BICUBIC
        apply(changed, operation.number, float(argument), cubic, packed, scratch_for(*image.shape[:2]))
        return changed

    name = operation.title if resample is None else f"{operation.title}, {resample.name.lower()}"
    arguments = tuple(operation.shown) if len(operation.shown) else _arguments_of_maps(operation)
    return Comparison(name, operation.number, arguments, "Pillow", ours, _peer(operation, fill, resample))


def _peer(
    operation: Operation, fill: tuple[int, int, int], resample: Image.Resampling | None
) -> Callable[[np.ndarray, float], np.ndarray] | None:
    from timm.data import auto_augment

    if operation.peer is None:
        return None
    function = getattr(auto_augment, operation.peer)
    options = {} if resample is None else {"fillcolor": fill, "resample": resample}

    def theirs(image: np.ndarray, argument: float) -> np.ndarray:
        arguments = (argument,) if operation.has_argument else ()
        return np.asarray(function(Image.fromarray(image), *arguments, **options))

    return theirs


def _arguments_of_maps(operation: Operation) -> tuple[float, ...]:
    """Arguments that its magnitude maps give for magnitudes from 0 to 10, with some signs of each."""
    if not operation.has_argument:
        return (0.0,)
    rows = [np.array([operation.number, *each], np.float64) for each in operation.magnitude_maps.values()]
    return tuple(sorted({sample_argument(row, m / 10, np.uint64(m), 0) for row in rows for m in MAGNITUDES}))


def _of_jitter() -> list[Comparison]:
    from torchvision.transforms import functional as F

    def turn(image: np.ndarray, turns: float) -> np.ndarray:
        changed = image.copy()
        turn_hue(changed.reshape(-1), turns)
        return changed

    def smooth(image: np.ndarray, sigma: float) -> np.ndarray:
        changed, scratch = image.copy(), scratch_for(*image.shape[:2])
        rows = changed.reshape(len(changed), -1)
        between = scratch.mixed.reshape(rows.shape)
        gaussian_smooth(rows, sigma, scratch.taps, scratch.wide, between, scratch.weighted)
        return changed

    def turn_with_torchvision(image: np.ndarray, turns: float) -> np.ndarray:
        return np.asarray(F.adjust_hue(Image.fromarray(image), turns))

    def smooth_with_torchvision(image: np.ndarray, sigma: float) -> np.ndarray:
        size = min(23, 2 * min(image.shape[:2]) - 1)  # torchvision cannot mirror more than the image's width
        tensor = torch.from_numpy(image).permute(2, 0, 1)
        return F.gaussian_blur(tensor, [size, size], [sigma, sigma]).permute(1, 2, 0).numpy()

    turns, sigmas = (-0.5, -0.3, -0.1, 0.0, 0.1, 0.3, 0.5), (0.1, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0)
    return [
        Comparison("hue of colour jitter, turns", None, turns, "Pillow", turn, turn_with_torchvision),
        Comparison("gaussian_blur_prob, pixels", None, sigmas, "torchvision", smooth, smooth_with_torchvision),
    ]


def comparison_tiles(comparison: Comparison, image: np.ndarray) -> tuple[list[np.ndarray], list[str]]:
    """Tiles and captions of three rows: ours, the peer's, the difference times `AMPLIFIED`; without a peer of one."""
    several = len(comparison.arguments) > 1
    numbers = [f" {argument:.3g}" if several else "" for argument in comparison.arguments]
    results = [comparison.ours(image, argument) for argument in comparison.arguments]
    ours = [_reduced(result, np.mean) for result in results]
    if comparison.theirs is None:
        return ours, [f"ours{number}" for number in numbers]
    peers, differences, verdicts = [], [], []
    for argument, result in zip(comparison.arguments, results, strict=True):
        try:
            peers_result = comparison.theirs(image, argument)
        except ValueError:  # Pillow 13 keeps no fewer than one bit
            blank = np.full_like(ours[0], 255)
            peers.append(blank)
            differences.append(blank)
            verdicts.append(f"{comparison.peer} refuses")
            continue
        apart = np.abs(result.astype(int) - peers_result)
        peers.append(_reduced(peers_result, np.mean))
        differences.append(_reduced((apart * AMPLIFIED).clip(0, 255).astype(np.uint8), np.max))
        verdicts.append(f"max {apart.max()}, mean {apart.mean():.1g}" if apart.any() else "identical")
    labels = [f"{whose}{number}" for whose in ("ours", comparison.peer) for number in numbers]
    return [*ours, *peers, *differences], [*labels, *verdicts]


def _reduced(image: np.ndarray, merge: Callable[..., np.ndarray]) -> np.ndarray:
    """An image with each block of pixels merged into one, if it is larger than `LARGEST`; the rest is cut off."""
    block = -(-max(image.shape[:2]) // LARGEST)
    height, width = (size // block for size in image.shape[:2])
    blocks = image[: height * block, : width * block].reshape(height, block, width, block, 3)
    return merge(blocks, axis=(1, 3)).round().astype(np.uint8)


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
