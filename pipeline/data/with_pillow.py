"""Decodes images of a .beton by Pillow alone, where the C library cannot be built: slower, the same pixels."""

import io
import os

import numpy as np
from PIL import Image

from widemix.formats.beton import COEFFICIENTS, RAW
from widemix.formats.checksums import MISMATCH, image_blocks, sample_checksum
from widemix.formats.coefficients import restore


def read_with_pillow(file, tables, samples, boxes, bicubic, views, messages, chunk, chunks) -> None:
    """Decode every `chunks`-th image from `chunk` on; `messages` gets the reason of each damaged one.

    Boxes [B, V, 5] and bicubic [B, V]: one for each of the V arrays [B, side, side, 3] of `views`.
    """
    mode, height, width, offset, size, segments, segments_size, label, checksum, *_ = tables
    for b in range(chunk, len(samples), chunks):
        sample = samples[b]
        shape = int(width[sample]), int(height[sample])
        try:
            data, table = (
                _read(file, int(place[sample]), int(length[sample]))
                for place, length in ((offset, size), (segments, segments_size))
            )
            if checksum is not None:
                record = mode[sample], *shape, label[sample], len(data), len(table)
                if sample_checksum(record, image_blocks(mode[sample], shape[0], data, table)) != checksum[sample]:
                    raise ValueError(MISMATCH)
            if mode[sample] == COEFFICIENTS:
                data = restore(data)
            image = Image.frombytes("RGB", shape, data) if mode[sample] == RAW else _jpeg(data, shape)
            for k, images in enumerate(views):
                images[b] = resized_box(image, boxes[b, k], bool(bicubic[b, k]), images.shape[1])
        except Exception as error:  # Pillow raises whatever its parsers meet in damaged bytes
            messages[b] = (str(error) or type(error).__name__).encode()


def _read(file: int, offset: int, size: int) -> bytes:
    data = os.pread(file, size, offset)
    if len(data) < size:
        raise ValueError("the file ends before it; it was cut short")
    return data


def _jpeg(data: bytes, shape: tuple[int, int]) -> Image.Image:
    """The decoded JPEG; `ValueError` unless it is of this (width, height)."""
    image = Image.open(io.BytesIO(data), formats=["JPEG"])
    if image.size != shape:
        raise ValueError(f"is of {image.size} pixels, the file's table says {shape}")
    return image.convert("RGB")


def resized_box(image: Image.Image, box: np.ndarray, bicubic: bool, side: int) -> np.ndarray:
    """The box of an image, resized and flipped: uint8 [side, side, 3]; outside of the image it is black."""
    top, left, height, width, flip = box.tolist()
    resample = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    pixels = np.asarray(image.crop((left, top, left + width, top + height)).resize((side, side), resample))
    return pixels[:, ::-1] if flip else pixels
