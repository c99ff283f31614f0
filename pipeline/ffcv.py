"""widemix's pixels, augmentation and order in FFCV's `Loader`, for betons and training scripts that are FFCV's.

    loader = ffcv.Loader(path, batch_size, order=widemix.ffcv.Order(seed=0), pipelines={
        "image": [RandomResizedCrop(224), RandAugment("rand-m9-mstd0.5-inc1"), Normalize(device=device),
                  RandomErasing(0.25)],
        "label": [IntDecoder(), ToTensor(), Squeeze(), ToDevice(device)],
    })

Batches equal those of `widemix.Loader`, bit for bit, for the same seed, epoch and rank. FFCV's own operations may
stand between these. A file of `widemix prep` has a third field, which `"segments": None` leaves out. What FFCV makes
impossible: an error within a batch cannot reach the training loop, which would wait for ever, so a damaged image
is black, with a warning; batches are overwritten after some more, so copy those that you keep; and there is no mixup
or CutMix, because an operation does not know the step.

FFCV must be installed: `pip install 'widemix[ffcv]'`.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

try:
    from ffcv.fields.rgb_image import SimpleRGBImageDecoder
    from ffcv.memory_managers.os_cache import OSCacheManager
    from ffcv.pipeline.allocation_query import AllocationQuery
    from ffcv.pipeline.compiler import Compiler
    from ffcv.pipeline.operation import Operation
    from ffcv.pipeline.state import State
    from ffcv.traversal_order.base import TraversalOrder
except ImportError as error:
    raise ImportError(
        f"widemix.ffcv: FFCV cannot be imported ({error}); install it: as root `apt-get install g++ pkg-config "
        "libopencv-dev libturbojpeg0-dev python3-dev`, then `pip install 'widemix[ffcv]'`"
    ) from None

import numba
import numpy as np
import torch
from numba import types
from pydantic import Field

from widemix.api.sections import Device, jitter_strengths, process_topology
from widemix.arguments import Epoch, Numbers, Size, Whole, build_section, check_arguments
from widemix.data.augment.batch import build_augmentation
from widemix.data.augment.erase import erase, sample_erasing
from widemix.data.compiled import jit, native_symbol
from widemix.data.decode import sample_random_box
from widemix.data.normalise import normalise, per_channel
from widemix.data.order import RandomOrder, rank_slices, steps_per_epoch
from widemix.data.random import INTERPOLATION, key, uniform
from widemix.errors import InputError
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD, DataSection

_NUMBER = types.int64
_decode = native_symbol("decode_from_memory", types.void(*[types.intp] * 10))
_read_number = native_symbol("read_number", _NUMBER(types.intp))
_orders: "weakref.WeakValueDictionary[int, Order]" = weakref.WeakValueDictionary()  # by id of the loader's metadata


class Order(TraversalOrder):
    """widemix's order for `ffcv.Loader(order=Order(seed))`: each epoch another permutation by (seed, epoch).

    Step k of all ranks has the same samples for every number of ranks. rank, world: by default those of
    torch.distributed, or of the launcher's variables; FFCV's `distributed` stays False. Without `drop_last` ranks may
    differ by a batch.
    """

    @check_arguments
    def __init__(self, seed: Whole = 0, rank: Whole | None = None, world: Size | None = None):
        topology = process_topology(rank, world, "cpu")
        self.seed, self.rank, self.world = seed, topology.rank, topology.world
        self.epoch = np.zeros(1, np.int64)  # that is loaded
        self.first = 0, 0  # epoch and step that `resume` has set

    def __call__(self, loader: Any) -> "Order":
        """The order of one loader; FFCV calls this."""
        bound = copy.copy(self)
        bound.loader, bound.epoch = loader, np.zeros(1, np.int64)
        _orders[id(loader.reader.metadata)] = bound
        return bound

    def sample_order(self, epoch: int) -> np.ndarray:
        """The samples of this rank, in order: uint64."""
        self.epoch[0] = epoch
        indices, batch, drop_last = self.loader.indices, self.loader.batch_size, self.loader.drop_last
        order = RandomOrder(len(indices), batch * self.world, self.seed)
        steps = range(self.first[1] if epoch == self.first[0] else 0, self._steps(drop_last))
        parts = [
            places[rank_slices(len(places), self.rank, self.world, 1)[0]]
            for places in map(order.step, [epoch] * len(steps), steps)
        ]
        return indices[np.concatenate([np.empty(0, np.int64), *parts])].astype(np.uint64)

    def _steps(self, drop_last: bool) -> int:
        return steps_per_epoch(len(self.loader.indices), self.loader.batch_size * self.world, drop_last)


@check_arguments
def resume(loader: Any, epoch: Epoch, step: Whole) -> None:
    """Begin the next iteration of an FFCV loader that has an `Order` with this step of this epoch."""
    if not isinstance(loader.traversal_order, Order):
        raise InputError("widemix.ffcv.resume: the loader has no widemix.ffcv.Order")
    loader.traversal_order.first, loader.next_epoch = (epoch, step), epoch


class _Keyed(Operation):
    """An operation whose random numbers are a function of (seed, epoch, sample)."""

    order: Order

    def accept_globals(self, metadata: np.ndarray, memory_read: Callable) -> None:
        """Find the loader's order, which knows seed and epoch."""
        super().accept_globals(metadata, memory_read)
        order = _orders.get(id(metadata.base))
        if order is None or order.loader.reader.metadata is not metadata.base:
            name = type(self).__name__
            raise InputError(
                f"widemix.ffcv.{name} is random by epoch: give the loader order=widemix.ffcv.Order(seed=...)"
            )
        self.order = order


class _Decoder(SimpleRGBImageDecoder):
    """Pixels of a box, resized as Pillow does: uint8 [B, size, size, 3]."""

    def __init__(self, size: int, interpolation: str):
        super().__init__()
        if _decode is None:
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


class RandomResizedCrop(_Keyed, _Decoder):
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


class _Augment(_Keyed):
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
    def __init__(
        self,
        mean: Numbers = IMAGENET_MEAN,
        std: Numbers = IMAGENET_STD,
        device: Device = "cpu",
    ):
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


class RandomErasing(_Keyed):
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


def _mend_ffcv() -> None:
    """FFCV makes numba's shared type of uint8 arrays read-only in place; then numba finds no function for it."""
    data = types.Array(types.uint8, 1, "C", readonly=True)
    state = types.Tuple([data, types.uint64[::1], types.uint64[::1]])

    def compile_reader(manager: OSCacheManager) -> Any:
        def read(address, state):
            data, places, sizes = state
            return data[address : address + sizes[np.searchsorted(places, address)]]

        return Compiler.compile(read, data(numba.uint64, state))

    OSCacheManager.state_type = property(lambda manager: state)
    OSCacheManager.compile_reader = compile_reader


_mend_ffcv()
