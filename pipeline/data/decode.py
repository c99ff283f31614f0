"""Pictures from a .beton: which box of each, then decode, crop, resize and flip with FFCV's compiled library.

The boxes are drawn first, by plain functions, so that what a picture undergoes can be tested apart from pixels.
"""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
from numba import types

from data_prep.beton import JPEG, Beton
from pipeline.data.compiled import jit
from pipeline.data.random import CROP, FLIP, key, uniform
from pipeline.data.threads import share_out
from pipeline.errors import InputError


def _ffcv_library() -> str:
    """FFCV's shared library, found without importing FFCV (4 s, for a numba dictionary made at import)."""
    spec = importlib.util.find_spec("ffcv")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    found = sorted(folder.glob("_libffcv*.so")) if folder else []
    if not found:
        raise InputError("FFCV's compiled library is missing; `widemix doctor` says how to mend it")
    return str(found[0])


# By symbol name instead of ctypes pointer, so that numba can keep the compiled code on disk.
llvmlite.binding.load_library_permanently(_ffcv_library())
_imdecode: Any = types.ExternalFunction(
    "imdecode",
    types.int32(
        *(types.uintp, types.uint64, types.uint32, types.uint32),  # source, bytes, height, width
        *(types.uintp, types.uint32, types.uint32, types.uint32, types.uint32),  # target, height, width, x, y
        *(types.uint32, types.uint32, types.boolean, types.boolean),  # scale, crop?, flip?
    ),
)
_resize: Any = types.ExternalFunction("resize", types.void(*[types.int64] * 11))


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


def decode(beton: Beton, samples: np.ndarray, boxes: np.ndarray, pictures: np.ndarray, threads: int) -> None:
    """Fill `pictures`, uint8 [B, side, side, 3], with the boxes of `samples`. `InputError` names a damaged sample."""
    if len(samples) and not (samples.min() >= 0 and samples.max() < len(beton)):
        raise InputError(f"{beton.path}: asked for samples {samples.min()}..{samples.max()} of {len(beton)}")
    damaged = np.zeros(len(samples), np.bool_)
    tables = (beton.mode, beton.height, beton.width, beton.offset, beton.size)
    work = functools.partial(_decode_share, beton.bytes, tables, samples, boxes, pictures, damaged)
    share_out(work, threads)
    if damaged.any():
        raise InputError(
            f"{beton.path}: sample {int(samples[damaged.argmax()])} is not a whole JPEG; prepare the folder again"
        )


@jit
def _decode_share(data, tables, samples, boxes, pictures, damaged, chunk, chunks):
    """Every `chunks`-th picture from `chunk` on."""
    mode, height, width, offset, size = tables
    scratch = np.empty(0, np.uint8)
    for b in range(chunk, len(samples), chunks):
        sample = samples[b]
        h, w = height[sample], width[sample]
        pixels = data.ctypes.data + offset[sample]
        if mode[sample] == JPEG:
            if scratch.size < 3 * h * w:
                scratch = np.empty(3 * h * w, np.uint8)
            target = scratch.ctypes.data
            damaged[b] = _imdecode(pixels, size[sample], h, w, target, h, w, 0, 0, 1, 1, False, False) != 0
            pixels = target
        _crop(pixels, h, w, boxes[b], pictures[b])
        if boxes[b, 4]:
            _flip(pictures[b])


@jit
def _crop(pixels, height, width, box, picture):
    """Resize a box of the pixels at that address to the picture. What lies outside of them is black."""
    top, left, bottom, right = box[0], box[1], box[0] + box[2], box[1] + box[3]
    side = picture.shape[0]
    if top >= 0 and left >= 0 and bottom <= height and right <= width:
        _resize(0, pixels, height, width, top, bottom, left, right, picture.ctypes.data, side, side)
        return
    first, last = max(top, 0), min(bottom, height)
    start, stop = max(left, 0), min(right, width)
    picture[:] = 0
    if last > first and stop > start:  # such a box has the picture's own size: nothing to resize
        within = np.empty((last - first, stop - start, 3), np.uint8)
        address = within.ctypes.data
        _resize(0, pixels, height, width, first, last, start, stop, address, last - first, stop - start)
        picture[first - top : last - top, start - left : stop - left] = within


@jit
def _flip(picture):
    side = picture.shape[1]
    for row in range(side):
        for column in range(side // 2):
            for channel in range(3):
                kept = picture[row, column, channel]
                picture[row, column, channel] = picture[row, side - 1 - column, channel]
                picture[row, side - 1 - column, channel] = kept
