"""Operations on decoded images: policies, colour jitter, normalisation and erasing."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from ffcv.pipeline.allocation_query import AllocationQuery
from ffcv.pipeline.operation import Operation
from ffcv.pipeline.state import State

from widemix.api.sections import Device, jitter_strengths
from widemix.arguments import Numbers, build_section, check_arguments
from widemix.data.augment.batch import build_augmentation
from widemix.data.augment.erase import erase, sample_erasing
from widemix.data.normalise_and_mix import normalise, per_channel
from widemix.errors import InputError
from widemix.ffcv.order import Keyed
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD, DataSection


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
