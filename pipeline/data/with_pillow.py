"""Decodes pictures of a .beton by Pillow alone, where the C library cannot be built: slower, the same pixels."""

import io
import os

import numpy as np
from PIL import Image

from pipeline.formats.beton import JPEG


def read_with_pillow(file, tables, samples, boxes, bicubic, pictures, messages, chunk, chunks) -> None:
    """Decode every `chunks`-th picture from `chunk` on; `messages` gets the reason of each damaged one."""
    mode, height, width, offset, size, *_ = tables
    for b in range(chunk, len(samples), chunks):
        sample = samples[b]
        shape = int(width[sample]), int(height[sample])
        try:
            data = os.pread(file, int(size[sample]), int(offset[sample]))
            if len(data) < size[sample]:
                raise ValueError("the file ends before it; it was cut short")
            picture = _jpeg(data, shape) if mode[sample] == JPEG else Image.frombytes("RGB", shape, data)
            pictures[b] = _resized(picture, boxes[b], bool(bicubic[b]), pictures.shape[1])
        except Exception as error:  # Pillow raises whatever its parsers meet in damaged bytes
            messages[b] = (str(error) or type(error).__name__).encode()


def _jpeg(data: bytes, shape: tuple[int, int]) -> Image.Image:
    """The decoded JPEG; `ValueError` unless it is of this (width, height)."""
    picture = Image.open(io.BytesIO(data), formats=["JPEG"])
    if picture.size != shape:
        raise ValueError(f"is of {picture.size} pixels, the file's table says {shape}")
    return picture.convert("RGB")


def _resized(picture: Image.Image, box: np.ndarray, bicubic: bool, side: int) -> np.ndarray:
    """The box of a picture, resized and flipped; outside of the picture it is black."""
    top, left, height, width, flip = box.tolist()
    resample = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    pixels = np.asarray(picture.crop((left, top, left + width, top + height)).resize((side, side), resample))
    return pixels[:, ::-1] if flip else pixels
