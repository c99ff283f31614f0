"""Operations for FFCV's `Loader`: decoders of crops, compiled by FFCV around our C library, and augmentation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

import numba
import numpy as np
import torch
from ffcv.fields.rgb_image import SimpleRGBImageDecoder
from ffcv.memory_managers.os_cache import OSCacheManager
from ffcv.pipeline.allocation_query import AllocationQuery
from ffcv.pipeline.compiler import Compiler
from ffcv.pipeline.operation import Operation
from ffcv.pipeline.state import State
from numba import types
from pydantic import Field

from widemix import native
from widemix.api.loader_arguments import Device, jitter_strengths
from widemix.arguments import Numbers, build_section, check_arguments
from widemix.data.augment.batch import build_augmentation
from widemix.data.augment.erase import erase, sample_erasing
from widemix.data.compiled import jit, native_symbol
from widemix.data.decode import sample_random_box
from widemix.data.normalise_and_mix import normalise, per_channel
from widemix.data.random import INTERPOLATION, key, uniform
from widemix.errors import InputError
from widemix.ffcv.order import Keyed
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD, DataSection

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


class _Augment(Keyed):
    """Augments uint8 [B, H, W, 3] in place, on as many threads as the loader has."""

    def __init__(self, section: AugmentSection, mean: Sequence[float], interpolation: str):
        super().__init__()
        data = build_section(DataSection, path="", mean=tuple(mean), interpolation=interpolation)
        self.augmentation = build_augmentation(section, data.mean, data.interpolation)

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, None]:
        """Not compiled by FFCV: its code is in numba's cache on disk."""
        return replace(previous_state, jit_mode=False), None

    def generate_code(self) -> Callable:
        """Called for each batch."""

        def augment(images, memory, indices):
            threads = self.order.loader.num_workers
            self.augmentation(images, indices.astype(np.int64), self.order.seed, int(self.order.epoch[0]), threads)
            return images

        augment.with_indices = True  # type: ignore[attr-defined]
        return augment


class RandAugment(_Augment):
    """RandAugment, AutoAugment or AugMix by timm's policy string, as `Loader(auto_augment=policy)`.

    mean: fill colour of pixels from outside, on a scale of 0 to 1. interpolation: of operations that move pixels.
    """

    @check_arguments
    def __init__(self, policy: str, mean: Numbers = IMAGENET_MEAN, interpolation: str = "bilinear"):
        super().__init__(build_section(AugmentSection, auto_augment=policy), mean, interpolation)


class ColorJitter(_Augment):
    """Colour jitter, grayscale, Gaussian blur and solarisation, with `Loader`'s arguments; after `RandAugment`."""

    @check_arguments
    def __init__(
        self,
        color_jitter: float | Numbers = 0.0,
        color_jitter_prob: float = 1.0,
        grayscale_prob: float = 0.0,
        gaussian_blur_prob: float = 0.0,
        solarize_prob: float = 0.0,
    ):
        section = build_section(
            AugmentSection,
            color_jitter=jitter_strengths(color_jitter),
            color_jitter_prob=color_jitter_prob,
            grayscale_prob=grayscale_prob,
            gaussian_blur_prob=gaussian_blur_prob,
            solarize_prob=solarize_prob,
        )
        super().__init__(section, IMAGENET_MEAN, "bilinear")


class Normalize(Operation):
    """uint8 [B, H, W, 3] on the host to float32 [B, 3, H, W] on the device, channels last in memory.

    Instead of FFCV's `ToTensor`, `ToDevice`, `ToTorchImage` and `NormalizeImage`.
    """

    @check_arguments
    def __init__(self, mean: Numbers = IMAGENET_MEAN, std: Numbers = IMAGENET_STD, device: Device = "cpu"):
        super().__init__()
        self.device = torch.device(device)
        data = build_section(DataSection, path="", mean=mean, std=std)
        # Multiplied on the host: on the device FFCV's streams would not wait for it.
        self.mean, self.std = (per_channel(rgb).to(device) for rgb in (data.mean, data.std))

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, AllocationQuery]:
        """Memory on the device."""
        height, width, channels = previous_state.shape
        state = replace(
            previous_state, jit_mode=False, device=self.device, shape=(channels, height, width), dtype=torch.float32
        )
        return state, AllocationQuery((height, width, channels), torch.float32, self.device)

    def generate_code(self) -> Callable:
        """Called for each batch."""
        return lambda images, memory: normalise(torch.from_numpy(images), self.mean, self.std, memory)


class RandomErasing(Keyed):
    """timm's random erasing of float32 [B, 3, H, W], after `Normalize`."""

    @check_arguments
    def __init__(self, re_prob: float, re_mode: str = "pixel", re_count: int = 1):
        super().__init__()
        self.augment = build_section(AugmentSection, re_prob=re_prob, re_mode=re_mode, re_count=re_count)

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, None]:
        """In place."""
        if previous_state.dtype is not torch.float32:
            raise InputError("widemix.ffcv.RandomErasing fills with normalised values: place it after Normalize")
        return replace(previous_state, jit_mode=False), None

    def generate_code(self) -> Callable:
        """Called for each batch."""

        def erase_boxes(images, memory, indices):
            view_ids, epoch = indices.astype(np.int64), int(self.order.epoch[0])
            erase(images, sample_erasing(view_ids, images.shape[-1], self.augment, self.order.seed, epoch))
            return images

        erase_boxes.with_indices = True  # type: ignore[attr-defined]
        return erase_boxes
