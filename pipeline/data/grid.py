"""Grids of images with captions, and of training batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from widemix.data.batches import Batch
from widemix.data.normalise_and_mix import per_channel
from widemix.formats.manifest import read_manifest
from widemix.recipe.data import DataSection

MIN_TILE, GUTTER, TEXT = 112, 8, 12  # pixels: minimum side of a tile, gap between tiles, font size
BACKGROUND, TEXT_COLOR = (232, 232, 232), (40, 40, 40)


def training_grid(batch: Batch, count: int, section: DataSection) -> np.ndarray:
    """The first `count` images of a training batch, denormalised, above their targets: uint8 [height, width, 3]."""
    classes = read_manifest(Path(section.path)).classes
    captions = [_target_caption(target, classes) for target in batch.targets[:count].cpu()]
    return grid(list(denormalise(batch.inputs[:count], section)), captions, columns=8)


def _target_caption(target: torch.Tensor, classes: Sequence[str]) -> str:
    """The two likeliest classes with their probabilities, without those that only label smoothing has given any."""
    likeliest = target.topk(min(2, len(target)))
    pairs = zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
    named = [(fraction, label) for fraction, label in pairs if fraction > target.min()]
    names = [(fraction, classes[label] if label < len(classes) else f"class {label}") for fraction, label in named]
    return "\n".join(f"{name}: {fraction:.2f}" for fraction, name in names)


def denormalise(images: torch.Tensor, section: DataSection) -> np.ndarray:
    """Normalised images [B, 3, H, W] as uint8 [B, H, W, 3]; the noise of random erasing is clipped."""
    mean, std = (per_channel(values) for values in (section.mean, section.std))
    values = (images.float().cpu() * std + mean).clamp(0, 255)
    return values.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def grid(tiles: Sequence[np.ndarray], captions: Sequence[str], columns: int) -> np.ndarray:
    """Tiles uint8 [H, W, 3] of one size, row by row, each above its caption: uint8 [height, width, 3].

    Small tiles are enlarged by an integer factor, without interpolation; lines wider than a tile lose their middle.
    """
    zoom = max(1, -(-MIN_TILE // tiles[0].shape[0]))
    height, width = (zoom * size for size in tiles[0].shape[:2])
    row = height + max(text.count("\n") + 1 if text else 0 for text in captions) * (TEXT + 4) + GUTTER
    columns = min(columns, len(tiles))
    sheet = Image.new(
        "RGB", ((width + GUTTER) * columns + GUTTER, row * -(-len(tiles) // columns) + GUTTER), BACKGROUND
    )
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
    captions = ["\n".join(fitted(line, width, font) for line in text.split("\n")) for text in captions]
    for place, (tile, text) in enumerate(zip(tiles, captions, strict=True)):
        x, y = GUTTER + place % columns * (width + GUTTER), GUTTER + place // columns * row
        sheet.paste(Image.fromarray(tile).resize((width, height), Image.Resampling.NEAREST), (x, y))
        draw.multiline_text((x, y + height + 2), text, TEXT_COLOR, font, spacing=2)
    return np.asarray(sheet)


def fitted(text: str, width: int, font: Any) -> str:
    """Return the text, or its beginning and end where it is wider than so many pixels."""
    if font.getlength(text) <= width:
        return text
    kept = len(text)
    while kept > 2 and font.getlength(f"{text[: kept - kept // 3]}..{text[len(text) - kept // 3 :]}") > width:
        kept -= 1
    return f"{text[: kept - kept // 3]}..{text[len(text) - kept // 3 :]}"
