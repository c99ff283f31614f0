"""Decoders of a random-resized and of a centre crop, compiled by FFCV around our C library."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

import numba
import numpy as np
from ffcv.fields.rgb_image import SimpleRGBImageDecoder
from ffcv.memory_managers.os_cache import OSCacheManager
from ffcv.pipeline.allocation_query import AllocationQuery
from ffcv.pipeline.compiler import Compiler
from ffcv.pipeline.state import State
from numba import types
from pydantic import Field

from widemix import native
from widemix.arguments import Numbers, build_section, check_arguments
from widemix.data.compiled import jit, native_symbol
from widemix.data.decode import sample_random_box
from widemix.data.random import INTERPOLATION, key, uniform
from widemix.errors import InputError
from widemix.ffcv.order import Keyed
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection

_NUMBER = types.int64
_decode = native_symbol("decode_from_memory", types.void(*[types.intp] * 10))
_read_number = native_symbol("read_number", _NUMBER(types.intp))


class _Decoder(SimpleRGBImageDecoder):
    """Pixels of a box, resized as Pillow does: uint8 [B, size, size, 3]."""

    def __init__(self, size: int, interpolation: str):
        super().__init__()
        if native.load() is None:
            raise InputError("widemix.ffcv needs the C library; `python -m widemix.native` says why it is not built")
        self.section = build_section(DataSection, path="", image_size=size, interpolation=interpolation)

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, AllocationQuery]:
        """FFCV's ring of buffers holds the batches."""
        shape, dtype = (self.section.image_size, self.section.image_size, 3), np.dtype("u1")
        return replace(previous_state, jit_mode=True, shape=shape, dtype=dtype), AllocationQuery(shape, dtype)

    def _code(self, sample_box: Any, arguments: tuple, seed: int, epoch: int) -> Callable:
        """Compiled code; `epoch` is an address. `sample_box` fills a sample's box, and says whether it is bicubic."""
        read, loop = self.memory_read, Compiler.get_iterator()

        def decode(batch_indices, images, metadata, storage_state):
            now = _read_number(epoch)
            for b in loop(len(batch_indices)):
                sample = np.int64(batch_indices[b])
                field = metadata[batch_indices[b]]
                height, width = np.int64(field["height"]), np.int64(field["width"])
                data = read(field["data_ptr"], storage_state)
                box = np.empty(5, np.int64)
                cubic = sample_box(box, sample, height, width, seed, now, *arguments)
                place, mode = images[b].ctypes.data, np.int64(field["mode"])
                _decode(
                    data.ctypes.data,
                    data.size,
                    mode,
                    height,
                    width,
                    box.ctypes.data,
                    cubic,
                    place,
                    images.shape[1],
                    sample,
                )
            return images[: len(batch_indices)]

        decode.is_parallel = True  # type: ignore[attr-defined]
        return decode


class RandomResizedCrop(Keyed, _Decoder):
    """Random-resized crop and flip: uint8 [B, size, size, 3]; for FFCV's decoder and `RandomHorizontalFlip`."""

    @check_arguments
    def __init__(
        self,
        size: int,
        scale: Numbers = (0.08, 1.0),
        ratio: Numbers = (3 / 4, 4 / 3),
        hflip: float = 0.5,
        interpolation: str = "bilinear",
    ):
        super().__init__(size, interpolation)
        self.augment = build_section(AugmentSection, scale=scale, ratio=ratio, hflip=hflip)

    def generate_code(self) -> Callable:
        """Compiled by FFCV."""
        augment, cubic = self.augment, ("bilinear", "bicubic", "random").index(self.section.interpolation)
        arguments = (augment.scale, augment.ratio, augment.hflip, cubic)
        return self._code(_random_box, arguments, self.order.seed, self.order.epoch.ctypes.data)


class CenterCrop(_Decoder):
    """`crop_pct` of the shorter side at the centre: uint8 [B, size, size, 3], for evaluation in any order."""

    @check_arguments
    def __init__(
        self, size: int, crop_pct: Annotated[float, Field(gt=0, le=1)] = 0.875, interpolation: str = "bilinear"
    ):
        super().__init__(size, interpolation)
        self.crop_pct, self._zero = crop_pct, np.zeros(1, np.int64)

    def generate_code(self) -> Callable:
        """Compiled by FFCV."""
        arguments = (self.crop_pct, self.section.interpolation != "bilinear")
        return self._code(_centre_box, arguments, 0, self._zero.ctypes.data)


@jit
def _random_box(box, sample, height, width, seed, epoch, scale, ratio, hflip, interpolation):
    sample_random_box(box, sample, height, width, seed, epoch, scale, ratio, hflip)
    return interpolation == 1 or (interpolation == 2 and uniform(key(seed, epoch, sample, INTERPOLATION), 0) < 0.5)


@jit
def _centre_box(box, sample, height, width, seed, epoch, fraction, cubic):
    side = max(int(fraction * min(height, width)), 1)
    box[0], box[1], box[2], box[3], box[4] = (height - side) // 2, (width - side) // 2, side, side, 0
    return cubic


def _mend_ffcv() -> None:
    """FFCV makes numba's shared type of uint8 arrays read-only in place; then numba finds no function for it."""
    data = types.Array(types.uint8, 1, "C", readonly=True)
    state = types.Tuple([data, types.uint64[::1], types.uint64[::1]])

    @cache
    def compile_reader(enabled: bool) -> Any:  # the same for each file
        def read(address, state):
            data, places, sizes = state
            return data[address : address + sizes[np.searchsorted(places, address)]]

        return Compiler.compile(read, data(numba.uint64, state))

    OSCacheManager.state_type = property(lambda manager: state)
    OSCacheManager.compile_reader = lambda manager: compile_reader(Compiler.is_enabled)


_mend_ffcv()
