"""Pictures side by side with words under them, and training pictures as the model sees them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from pipeline.data.loader import Batch
from pipeline.formats.manifest import read_manifest
from pipeline.recipe.data import DataSection

LEAST, GUTTER, TEXT = 112, 8, 12  # pixels: a tile's side at least, the gap between tiles, the size of letters
PAPER, INK = (232, 232, 232), (40, 40, 40)


def training_grid(batch: Batch, count: int, section: DataSection) -> np.ndarray:
    """The first `count` pictures as the model sees them, normalisation undone, over what they should be called."""
    classes = read_manifest(Path(section.path)).classes
    words = [_target_words(target, classes) for target in batch.targets[:count].cpu()]
    return grid(list(visible(batch.inputs[:count], section)), words, columns=8)


def _target_words(target: torch.Tensor, classes: Sequence[str]) -> str:
    """The likelier of two mixed classes first. What every class gets by smoothing is not named."""
    likeliest = target.topk(min(2, len(target)))
    pairs = zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
    named = [(share, label) for share, label in pairs if share > target.min()]
    names = [(share, classes[label] if label < len(classes) else f"class {label}") for share, label in named]
    return "\n".join(f"{name}: {share:.2f}" for share, name in names)


def visible(images: torch.Tensor, section: DataSection) -> np.ndarray:
    """Normalised pictures [B, 3, H, W] as uint8 [B, H, W, 3]. What erasing made whiter than white is white."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (section.mean, section.std))
    values = (images.float().cpu() * std + mean).clamp(0, 1) * 255
    return values.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def grid(tiles: Sequence[np.ndarray], words: Sequence[str], columns: int) -> np.ndarray:
    """Tiles uint8 [H, W, 3] of one size, row by row, each with its lines of words below: uint8 [height, width, 3].

    Small tiles are enlarged by a whole factor, each pixel a square.
    """
    zoom = max(1, -(-LEAST // tiles[0].shape[0]))
    height, width = (zoom * size for size in tiles[0].shape[:2])
    row = height + max(text.count("\n") + 1 if text else 0 for text in words) * (TEXT + 4) + GUTTER
    columns = min(columns, len(tiles))
    paper = Image.new("RGB", ((width + GUTTER) * columns + GUTTER, row * -(-len(tiles) // columns) + GUTTER), PAPER)
    draw, font = ImageDraw.Draw(paper), ImageFont.load_default(TEXT)
    for place, (tile, text) in enumerate(zip(tiles, words, strict=True)):
        x, y = GUTTER + place % columns * (width + GUTTER), GUTTER + place // columns * row
        paper.paste(Image.fromarray(tile).resize((width, height), Image.Resampling.NEAREST), (x, y))
        draw.multiline_text((x, y + height + 2), text, INK, font, spacing=2)
    return np.asarray(paper)
