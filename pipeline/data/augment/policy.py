"""timm's augmentation policies on PIL pictures, each picture drawing its numbers from its own key.

Slow (one core: some 300 pictures of 224 pixels a second) but right: the operations are timm's and PIL's own.
"""

import random
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageOps
from timm.data import auto_augment
from timm.data.auto_augment import AugmentOp

from pipeline.errors import InputError


class Policy:
    """A timm policy string such as `rand-m9-mstd0.5-inc1`, for square pictures of `side` pixels."""

    def __init__(self, text: str, side: int, mean: tuple[float, float, float]):
        self.transform = _parse(text, side, mean)
        for op in _operations(self.transform):
            if op.aug_fn is auto_augment.posterize:
                op.aug_fn = posterize

    def __call__(self, picture: np.ndarray, stream: int) -> np.ndarray:
        """uint8 [side, side, 3] to the same, with the random numbers that `stream` (64 bits) seeds."""
        before = random.getstate(), np.random.get_state()  # timm draws from both module-wide generators
        try:
            random.seed(stream)
            np.random.seed(stream & 0xFFFFFFFF)
            return np.asarray(self.transform(Image.fromarray(picture)))
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def posterize(picture: Image.Image, bits: int, **_) -> Image.Image:
    """timm's posterize, but 0 bits give a black picture as in pillow-simd; Pillow 13 raises there."""
    if bits >= 8:
        return picture
    return ImageOps.posterize(picture, bits) if bits > 0 else Image.new(picture.mode, picture.size)


def _parse(text: str, side: int, mean: tuple[float, float, float]):
    """As `timm.data.create_transform` builds it: translations up to 0.45 of the side, the mean as fill colour."""
    params = {
        "translate_const": int(side * 0.45),
        "img_mean": tuple(min(255, round(255 * channel)) for channel in mean),
    }
    try:
        if text.startswith("rand"):
            return auto_augment.rand_augment_transform(text, params)
        if text.startswith("augmix"):
            return auto_augment.augment_and_mix_transform(text, params | {"translate_pct": 0.3})
        return auto_augment.auto_augment_transform(text, params)
    except (AssertionError, ValueError, KeyError, NotImplementedError) as error:
        raise InputError(f"augment.auto_augment {text!r} is not a policy that timm knows ({error})") from None


def _operations(transform) -> Iterator[AugmentOp]:
    if isinstance(transform, auto_augment.AutoAugment):
        for pair in transform.policy:
            yield from pair
    else:
        yield from transform.ops
