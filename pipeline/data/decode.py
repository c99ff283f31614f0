"""Decodes images of a .beton: each is cropped to a box, resized as Pillow does and flipped.

The boxes are sampled first, by pure functions that are tested without pixels. Pixels come from the C library
(pipeline/native), or from Pillow where that cannot be built: the same, bit for bit.
"""

import ctypes
import functools
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types
from PIL import Image

from widemix import native
from widemix.data.compiled import jit, run_on_threads
from widemix.data.random import CROP, FLIP, INTERPOLATION, key, uniform
from widemix.data.split import open_descriptor
from widemix.errors import InputError
from widemix.formats.beton import BYTES, COEFFICIENTS, RAW, Beton
from widemix.formats.checksums import MISMATCH, Checksums, crc32c_bands, image_chunks, sample_checksum
from widemix.formats.coefficients import restore
from widemix.formats.sources import CUT_SHORT, damaged_sample
from widemix.native.library import MESSAGE


@jit
def random_boxes(view_ids, height, width, seed, epoch, scale, ratio, hflip):
    """Random-resized crops, keyed by view id: int64 [B, 5] of (top, left, height, width, flip).

    Sampled as by `torchvision.transforms.RandomResizedCrop(scale=scale, ratio=ratio)`, and flipped with probability
    `hflip`. `height` and `width`, int64 [samples], are those of all images of the split, pixels.
    """
    boxes = np.empty((len(view_ids), 5), np.int64)
    for b in range(len(view_ids)):
        sample = view_ids[b] % len(height)
        sample_random_box(boxes[b], view_ids[b], height[sample], width[sample], seed, epoch, scale, ratio, hflip)
    return boxes


@jit
def sample_random_box(box, view_id, full_height, full_width, seed, epoch, scale, ratio, hflip):
    """`random_boxes` of one image, int64 [5]."""
    low, high = np.log(ratio[0]), np.log(ratio[1])
    stream = key(seed, epoch, view_id, CROP)
    box[0], box[1], box[2], box[3] = _fallback(full_height, full_width, ratio)
    for attempt in range(10):
        area = full_height * full_width * (scale[0] + (scale[1] - scale[0]) * uniform(stream, 4 * attempt))
        aspect = np.exp(low + (high - low) * uniform(stream, 4 * attempt + 1))
        w, h = int(round(np.sqrt(area * aspect))), int(round(np.sqrt(area / aspect)))
        if 0 < w <= full_width and 0 < h <= full_height:
            box[0] = int(uniform(stream, 4 * attempt + 2) * (full_height - h + 1))
            box[1] = int(uniform(stream, 4 * attempt + 3) * (full_width - w + 1))
            box[2], box[3] = h, w
            break
    box[4] = uniform(key(seed, epoch, view_id, FLIP), 0) < hflip


@jit
def padded_boxes(view_ids, height, width, side, padding, seed, epoch, hflip):
    """Squares of `side` pixels within the image and a border of `padding`: int64 [B, 5], as in `random_boxes`.

    torchvision's `RandomCrop(side, padding)`. Top and left may be negative: the border is black.
    """
    boxes = np.empty((len(view_ids), 5), np.int64)
    for b in range(len(view_ids)):
        sample = view_ids[b] % len(height)
        stream = key(seed, epoch, view_ids[b], CROP)
        boxes[b, 0] = int(uniform(stream, 0) * (height[sample] + 2 * padding - side + 1)) - padding
        boxes[b, 1] = int(uniform(stream, 1) * (width[sample] + 2 * padding - side + 1)) - padding
        boxes[b, 2:4] = side
        boxes[b, 4] = uniform(key(seed, epoch, view_ids[b], FLIP), 0) < hflip
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


def centre_boxes(samples: np.ndarray, height: np.ndarray, width: np.ndarray, fraction: float) -> np.ndarray:
    """The centre square of `fraction` times the shorter side: int64 [B, 5], as in `random_boxes`."""
    h, w = height[samples], width[samples]
    side = np.maximum((fraction * np.minimum(h, w)).astype(np.int64), 1)
    return np.stack([(h - side) // 2, (w - side) // 2, side, side, np.zeros_like(side)], axis=1)


def cubic(view_ids: np.ndarray, interpolation: str, seed: int, epoch: int) -> np.ndarray:
    """Which images are resized bicubically: bool [B]; with `random`, as in timm, about half of them."""
    if interpolation == "random":
        return _are_cubic(view_ids, seed, epoch)
    return np.full(len(view_ids), interpolation == "bicubic")


@jit
def _are_cubic(view_ids, seed, epoch):
    found = np.empty(len(view_ids), np.bool_)
    for b in range(len(view_ids)):
        found[b] = uniform(key(seed, epoch, view_ids[b], INTERPOLATION), 0) < 0.5
    return found


_pread = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uint64, types.int64))


@jit
def read_each(file, places, rows):
    """Fill rows uint8 [n, size] from these places of an open file, int64 [n]; return whether all could be read."""
    short = 0
    for i in range(len(rows)):
        short += _pread(file, rows[i].ctypes.data, rows.shape[1], places[i]) != rows.shape[1]
    return short == 0


class Decoder:
    """Decodes the images of a .beton, on as many threads as each call asks for."""

    def __init__(self, beton: Beton, checksums: Checksums | None = None, read: Any = None):
        """Samples are compared with their `checksums`, if there are any, whenever they are read.

        `read`: `read_with_pillow`, to decode without the C library although there is one.
        """
        self.beton = beton
        self.descriptor = open_descriptor(beton, self)
        self._read: Any = read or _compiled_reader() or read_with_pillow
        self._checksums = checksums

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle has a descriptor of its own."""
        return Decoder, (self.beton, self._checksums, self._read if self._read is read_with_pillow else None)

    def read(
        self, samples: np.ndarray, boxes: np.ndarray, bicubic: np.ndarray, images: np.ndarray, threads: int
    ) -> None:
        """Fill `images` with boxes of `samples`; `InputError` names a damaged one.

        Samples int64 [B], boxes int64 [B, 5] as in `random_boxes`, bicubic bool [B]; images uint8 [B, H, H, 3].
        """
        for b, reason in self.try_read(samples, boxes, bicubic, images, threads).items():
            raise InputError(damaged_sample(self.beton.path, int(samples[b]), reason))

    def try_read(
        self, samples: np.ndarray, boxes: np.ndarray, bicubic: np.ndarray, images: np.ndarray, threads: int
    ) -> dict[int, str]:
        """`read`, but the damaged samples are returned: index in the batch to reason. Their pixels are undefined."""
        return self.try_read_views(
            samples, np.asarray(boxes)[:, None], np.asarray(bicubic)[:, None], [images], threads
        )

    def try_read_views(
        self, samples: np.ndarray, boxes: np.ndarray, bicubic: np.ndarray, views: Sequence[np.ndarray], threads: int
    ) -> dict[int, str]:
        """`try_read` of V boxes of each sample, which is decoded once.

        Boxes int64 [B, V, 5], bicubic bool [B, V]; the k-th of `views` is uint8 [B, H, H, 3] with an H of its own.
        """
        if len(samples) and not (samples.min() >= 0 and samples.max() < len(self.beton)):
            raise InputError(
                f"{self.beton.path}: asked for samples {samples.min()}..{samples.max()} of {len(self.beton)}"
            )
        records = self._records(samples)
        if records is None:
            return dict.fromkeys(range(len(samples)), CUT_SHORT)
        labels = self._checked_labels(samples, records)
        if labels is None:
            return dict.fromkeys(range(len(samples)), CUT_SHORT)
        messages = np.zeros(len(samples), f"S{MESSAGE}")
        tables = self._tables(samples, records, labels)
        request = [np.arange(len(samples)), np.ascontiguousarray(boxes, np.int64)]
        request.append(np.ascontiguousarray(bicubic, np.uint8))
        run_on_threads(functools.partial(self._read, self.descriptor, tables, *request, views, messages), threads)
        return {int(b): messages[b].decode(errors="replace") for b in np.flatnonzero(messages)}

    def _records(self, samples: np.ndarray) -> np.ndarray | None:
        """As `Beton.read_records`, in one call: for each of Python's a thread would ask for the GIL again."""
        records = np.empty(len(samples), self.beton.records.dtype)
        size = records.itemsize
        done = read_each(
            self.descriptor, self.beton.records_at + samples * size, records.view(np.uint8).reshape(-1, size)
        )
        return records if done else self.beton.read_records(self.descriptor, samples)  # which raises what is wrong

    def targets(self, samples: np.ndarray) -> np.ndarray:
        """The targets of samples: float32 [B, targets]. `read` has compared them with the checksums."""
        records = self._records(samples)
        targets = None if records is None else self.beton.read_targets(self.descriptor, records)
        if targets is None:
            raise InputError(f"{self.beton.path}: {CUT_SHORT}")
        return targets

    def _checked_labels(self, samples: np.ndarray, records: np.ndarray) -> np.ndarray | None:
        """Return each sample's label, or its targets' checksum, int64 [B]; None as `Beton.read_targets`."""
        targets = self.beton.read_targets(self.descriptor, records)
        if targets is None or not targets.size:
            return None if targets is None else self.beton.label[samples].astype(np.int64)
        return crc32c_bands(targets.view(np.uint8).reshape(-1), targets[0].nbytes).astype(np.int64)

    def _tables(self, samples: np.ndarray, records: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray | None, ...]:
        """These samples' rows of the tables that the readers take: places from their records, others as opened."""
        beton, image, checksums = self.beton, records["f0"], self._checksums
        has_segments = "f2" in (records.dtype.names or ()) and records.dtype["f2"] == BYTES
        segments = records["f2"] if has_segments else np.zeros(len(records), BYTES)
        sizes = beton.height[samples], beton.width[samples]
        places = image["data_ptr"], beton.size[samples], segments["ptr"], segments["size"]
        columns = [column.astype(np.int64) for column in (*sizes, *places, labels)]
        mode = np.ascontiguousarray(image["mode"])
        if checksums is None:
            return mode, *columns, None, None, None
        return mode, *columns, checksums.samples[samples], checksums.first[samples], checksums.bands


@functools.cache
def _compiled_reader() -> Any:
    """`read_images` of pipeline/native with the signature of `read_with_pillow`; None where it cannot be built."""
    library = native.load()
    if library is None:
        return None
    function = library.read_images
    function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 17, *[ctypes.c_int64] * 4]
    function.restype = None

    def read(file, tables, samples, boxes, bicubic, views, messages, chunk, chunks):
        assert all(images.flags.c_contiguous for images in views)  # C gets addresses, not strides
        places = np.array([images.ctypes.data for images in views], np.uintp)
        sides = np.array([images.shape[1] for images in views], np.int64)
        arrays = (*tables, samples, boxes, bicubic, places, sides, messages)
        assert all(array is None or array.flags.c_contiguous for array in arrays)
        addresses = (None if array is None else array.ctypes.data for array in arrays)
        function(file, *addresses, len(views), len(samples), chunk, chunks)

    return read


def read_with_pillow(file, tables, samples, boxes, bicubic, views, messages, chunk, chunks) -> None:
    """Decode by Pillow alone every `chunks`-th image from `chunk` on; `messages` gets the reason of each damaged one.

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
                if sample_checksum(record, image_chunks(mode[sample], shape[0], data, table)) != checksum[sample]:
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
        raise ValueError(CUT_SHORT)
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
