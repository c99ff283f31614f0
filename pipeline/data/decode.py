"""Pictures from a .beton: which box of each, then decoded, cropped, resized as Pillow does and flipped.

The boxes are drawn first, by plain functions, so that what a picture undergoes can be tested apart from pixels. These
come from the compiled part (pipeline/native), or from Pillow where it cannot be built: the same, bit for bit.
"""

import ctypes
import functools
from typing import Any

import numpy as np

from pipeline import native
from pipeline.data.compiled import jit
from pipeline.data.random import CROP, FLIP, INTERPOLATION, key, uniform
from pipeline.data.split import descriptor
from pipeline.data.threads import run_on_threads
from pipeline.data.with_pillow import read_with_pillow
from pipeline.errors import InputError
from pipeline.formats.beton import Beton

MESSAGE = 200  # bytes that the compiled part may say of a damaged sample


@jit
def random_boxes(draws, height, width, seed, epoch, scale, ratio, hflip):
    """Random-resized crops by torchvision's law, keyed by draw: int64 [B, 5], (top, left, height, width, flip)."""
    boxes = np.empty((len(draws), 5), np.int64)
    low, high = np.log(ratio[0]), np.log(ratio[1])
    for b in range(len(draws)):
        sample = draws[b] % len(height)
        full_height, full_width = height[sample], width[sample]
        stream = key(seed, epoch, draws[b], CROP)
        box = boxes[b]
        box[:4] = _fallback(full_height, full_width, ratio)
        for attempt in range(10):
            area = full_height * full_width * (scale[0] + (scale[1] - scale[0]) * uniform(stream, 4 * attempt))
            aspect = np.exp(low + (high - low) * uniform(stream, 4 * attempt + 1))
            w, h = int(round(np.sqrt(area * aspect))), int(round(np.sqrt(area / aspect)))
            if 0 < w <= full_width and 0 < h <= full_height:
                box[0] = int(uniform(stream, 4 * attempt + 2) * (full_height - h + 1))
                box[1] = int(uniform(stream, 4 * attempt + 3) * (full_width - w + 1))
                box[2], box[3] = h, w
                break
        box[4] = uniform(key(seed, epoch, draws[b], FLIP), 0) < hflip
    return boxes


@jit
def padded_boxes(draws, height, width, side, padding, seed, epoch, hflip):
    """Squares of `side` pixels anywhere within the picture and a border of `padding`: int64 [B, 5], as above.

    torchvision's `RandomCrop(side, padding)`. Top and left may be negative: the border is black.
    """
    boxes = np.empty((len(draws), 5), np.int64)
    for b in range(len(draws)):
        sample = draws[b] % len(height)
        stream = key(seed, epoch, draws[b], CROP)
        boxes[b, 0] = int(uniform(stream, 0) * (height[sample] + 2 * padding - side + 1)) - padding
        boxes[b, 1] = int(uniform(stream, 1) * (width[sample] + 2 * padding - side + 1)) - padding
        boxes[b, 2:4] = side
        boxes[b, 4] = uniform(key(seed, epoch, draws[b], FLIP), 0) < hflip
    return boxes


@jit
def _fallback(height, width, ratio):
    """The largest centre crop whose aspect lies within `ratio`."""
    h, w = height, width
    if width / height < ratio[0]:
        h = int(round(width / ratio[0]))
    elif width / height > ratio[1]:
        w = int(round(height * ratio[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def centre_boxes(samples: np.ndarray, height: np.ndarray, width: np.ndarray, share: float) -> np.ndarray:
    """The centre square of `share` times the shorter side: int64 [B, 5], as `random_boxes`."""
    h, w = height[samples], width[samples]
    side = np.maximum((share * np.minimum(h, w)).astype(np.int64), 1)
    return np.stack([(h - side) // 2, (w - side) // 2, side, side, np.zeros_like(side)], axis=1)


def cubic(draws: np.ndarray, interpolation: str, seed: int, epoch: int) -> np.ndarray:
    """Which pictures are resized bicubically: bool [B]; of `random`, as in timm, about half."""
    if interpolation == "random":
        return np.array([uniform(key(seed, epoch, draw, INTERPOLATION), 0) < 0.5 for draw in draws], np.bool_)
    return np.full(len(draws), interpolation == "bicubic")


class Decoder:
    """A .beton's pictures, read by as many threads as are asked for."""

    def __init__(self, beton: Beton):
        self.beton = beton
        self._file = descriptor(beton, self)
        self._read: Any = _compiled_reader() or read_with_pillow
        places = (beton.offset, beton.size, beton.segments, beton.segments_size)
        self._tables = (beton.mode, *map(np.ascontiguousarray, (beton.height, beton.width, *places)))

    def read(
        self, samples: np.ndarray, boxes: np.ndarray, cubic: np.ndarray, pictures: np.ndarray, threads: int
    ) -> None:
        """Fill `pictures`, uint8 [B, side, side, 3], with boxes of `samples`; `InputError` names a damaged one."""
        for place, why in self.try_read(samples, boxes, cubic, pictures, threads).items():
            raise InputError(self.damage(int(samples[place]), why))

    def try_read(
        self, samples: np.ndarray, boxes: np.ndarray, cubic: np.ndarray, pictures: np.ndarray, threads: int
    ) -> dict[int, str]:
        """The same, but for what is damaged: its place in the batch, and in which way. Its pixels mean nothing."""
        if len(samples) and not (samples.min() >= 0 and samples.max() < len(self.beton)):
            raise InputError(
                f"{self.beton.path}: asked for samples {samples.min()}..{samples.max()} of {len(self.beton)}"
            )
        messages = np.zeros(len(samples), f"S{MESSAGE}")
        asked = [np.ascontiguousarray(samples, np.int64), np.ascontiguousarray(boxes, np.int64)]
        asked.append(np.ascontiguousarray(cubic, np.uint8))
        run_on_threads(functools.partial(self._read, self._file, self._tables, *asked, pictures, messages), threads)
        return {int(place): messages[place].decode(errors="replace") for place in np.flatnonzero(messages)}

    def damage(self, sample: int, why: str) -> str:
        """What to say of a damaged sample."""
        return f"{self.beton.path}: sample {sample} cannot be read: {why}; `widemix verify` finds what is damaged"


@functools.cache
def _compiled_reader() -> Any:
    """`read_pictures` of pipeline/native, called as `read_with_pillow` is; None where there is no compiled part."""
    library = native.load()
    if library is None:
        return None
    function = library.read_pictures
    function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 12, *[ctypes.c_int64] * 4]
    function.restype = None

    def read(file, tables, samples, boxes, cubic, pictures, messages, chunk, chunks):
        arrays = (*tables, samples, boxes, cubic, pictures, messages)
        assert all(array.flags.c_contiguous for array in arrays)  # of them the function has the addresses alone
        addresses = (array.ctypes.data for array in arrays)
        function(file, *addresses, pictures.shape[1], len(samples), chunk, chunks)

    return read
