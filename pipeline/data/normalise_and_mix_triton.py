"""`widemix.data.normalise_and_mix` in one pass over the numbers of a batch."""

import functools

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from widemix.data.augment import erase
from widemix.data.augment.erase import Erasing, normal_quantiles
from widemix.data.mixup import Mixture
from widemix.data.random import GOLDEN, M1, M2

_BLOCK = 2048  # numbers that a program writes
_COUNTERS, _LEVELS = tl.constexpr(erase.COUNTERS), tl.constexpr(erase.LEVELS)
_GOLDEN, _M1, _M2 = (tl.constexpr(int(word)) for word in (GOLDEN, M1, M2))


def normalise_and_mix_at_once(
    images: Tensor,
    mean: Tensor,
    std: Tensor,
    dtype: torch.dtype,
    erasing: Erasing | None,
    mixture: Mixture | None,
    to: Tensor | None = None,
) -> Tensor:
    """See `normalise_and_mix`."""
    device, (batch, side) = mean.device, images.shape[:2]
    images = images.to(device, non_blocking=True)
    to = torch.empty_like(images, dtype=dtype) if to is None else to
    tiles = triton.cdiv(3 * side**2, _BLOCK)
    erased: tuple[Tensor | None, ...] = (None,) * 4
    if erasing is not None:
        first = np.searchsorted(erasing.boxes[:, 0], np.arange(batch + 1))
        erased = (*_on(device, first, erasing.boxes, erasing.streams), _quantiles(device))
    mixed: tuple[Tensor | None, ...] = (None,) * 3
    if mixture is not None:
        mixed = _on(device, mixture.partners, mixture.weights, mixture.boxes)
    _launch(
        _normalise_and_mix, (batch * tiles,), images, to, mean, std, *erased, *mixed, batch, tiles,
        SIDE=side, MODE=None if erasing is None else erasing.mode, BLOCK=_BLOCK,
    )  # fmt: skip
    return to.permute(0, 3, 1, 2)


def _on(device: torch.device, *arrays: np.ndarray) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)


@functools.cache
def _quantiles(device: torch.device) -> Tensor:
    return torch.from_numpy(normal_quantiles()).to(device)


def _launch(kernel, grid: tuple[int], first: Tensor, *arguments, **constants) -> None:
    """Run a kernel on the GPU of its first argument. Products and sums are rounded one by one, as by PyTorch."""
    with torch.cuda.device_of(first):
        kernel[grid](first, *arguments, enable_fp_fusion=False, **constants)


@triton.jit
def _normalise_and_mix(
    images, out, mean, std, first, erased, streams, quantiles, partners, weights, cuts, batch, tiles,
    SIDE: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)  # place in the image: row, column, channel
    values = _normalise_and_erase(images, b, n, mean, std, first, erased, streams, quantiles, SIDE, MODE)
    if partners is not None:
        own, other = tl.load(weights + b), tl.load(weights + batch + b)
        inside = _inside(cuts + 4 * b, n, SIDE)
        if (other != 0) | (tl.load(cuts + 4 * b + 2) > 0):
            partner = tl.load(partners + b)
            others = _normalise_and_erase(
                images, partner, n, mean, std, first, erased, streams, quantiles, SIDE, MODE
            )
            values = tl.where(inside, others, values * own + others * other)
    tl.store(out + b.to(tl.int64) * (3 * SIDE * SIDE) + n, values, n < 3 * SIDE * SIDE)


@triton.jit
def _normalise_and_erase(
    images, b, n, mean, std, first, erased, streams, quantiles,
    SIDE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The numbers n of image b, normalised and erased."""
    real, channel = n < 3 * SIDE * SIDE, n % 3
    values = tl.load(images + b.to(tl.int64) * (3 * SIDE * SIDE) + n, real, 0).to(tl.float32)
    values = tl.div_rn(values - tl.load(mean + channel), tl.load(std + channel))
    if erased is not None:
        for box in range(tl.load(first + b), tl.load(first + b + 1)):
            inside = _inside(erased + 5 * box + 1, n, SIDE)
            if MODE == "const":
                fill = tl.zeros_like(values)
            else:
                stream, place = tl.load(streams + box), channel
                if MODE == "pixel":
                    top, left = tl.load(erased + 5 * box + 1), tl.load(erased + 5 * box + 2)
                    stream += ((n // (3 * SIDE) - top) * _COUNTERS).to(tl.uint64)
                    place = n % (3 * SIDE) - 3 * left
                bits = _scrambled(stream + (place // 4).to(tl.uint64)) >> (16 * (place % 4)).to(tl.uint64)
                fill = tl.load(quantiles + (bits & (_LEVELS - 1)), inside, 0)
            values = tl.where(inside, fill, values)
    return values


@triton.jit
def _inside(box, n, SIDE: tl.constexpr):
    """Whether numbers n of an image are in a box of (top, left, height, width)."""
    y, x = n // (3 * SIDE) - tl.load(box), n // 3 % SIDE - tl.load(box + 1)
    return (y >= 0) & (y < tl.load(box + 2)) & (x >= 0) & (x < tl.load(box + 3))


@triton.jit
def _scrambled(word):
    """See `widemix.data.random.scramble`."""
    word += _GOLDEN
    word = (word ^ (word >> 30)) * _M1
    word = (word ^ (word >> 27)) * _M2
    return word ^ (word >> 31)
