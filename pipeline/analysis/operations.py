"""Compares every operation of policies and of colour jitter with its peer, over its range of arguments."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from widemix.data.augment.batch import scratch_for
from widemix.data.augment.color_jitter import turn_hue
from widemix.data.augment.filters import gaussian_smooth
from widemix.data.augment.operations import apply
from widemix.data.augment.program import sample_argument
from widemix.data.augment.registry import OPERATIONS, Operation

AMPLIFIED = 128  # factor of differences, so that they are visible
LARGEST = 128  # pixels: larger images are reduced, their differences to the maximum of each block
MAGNITUDES = range(0, 11, 2)  # shown of an operation that names no arguments


@dataclass(frozen=True)
class Comparison:
    """An operation of ours and its peer, as functions of image and argument, and the arguments to compare."""

    name: str
    number: int | None  # see `widemix.data.augment.registry`; None: not an operation of policies
    arguments: tuple[float, ...]  # a single unused one if the operation has none
    peer: str
    ours: Callable[[np.ndarray, float], np.ndarray]
    theirs: Callable[[np.ndarray, float], np.ndarray] | None  # None: there is no peer


def all_comparisons(fill: tuple[int, int, int]) -> list[Comparison]:
    """Every operation over its whole range; those that move pixels with both interpolations and RGB colour `fill`."""
    values = [_of_operation(operation, fill, None) for operation in OPERATIONS if not operation.moves]
    moves = [
        _of_operation(operation, fill, resample)
        for resample in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
        for operation in OPERATIONS
        if operation.moves
    ]
    return [*values, *moves, *_of_jitter()]


def _of_operation(operation: Operation, fill: tuple[int, int, int], resample: Image.Resampling | None) -> Comparison:
    def ours(image: np.ndarray, argument: float) -> np.ndarray:
        changed = image.copy()
        if operation.function is not None:
            operation.function(changed, float(argument))
            return changed
        packed = np.uint32(fill[0] | fill[1] << 8 | fill[2] << 16)
        cubic = resample == Image.Resampling.BICUBIC
        apply(changed, operation.number, float(argument), cubic, packed, scratch_for(*image.shape[:2]))
        return changed

    name = operation.title if resample is None else f"{operation.title}, {resample.name.lower()}"
    arguments = tuple(operation.shown) if len(operation.shown) else _arguments_of_maps(operation)
    return Comparison(name, operation.number, arguments, "Pillow", ours, _peer(operation, fill, resample))


def _peer(
    operation: Operation, fill: tuple[int, int, int], resample: Image.Resampling | None
) -> Callable[[np.ndarray, float], np.ndarray] | None:
    from timm.data import auto_augment

    if operation.peer is None:
        return None
    function = getattr(auto_augment, operation.peer)
    options = {} if resample is None else {"fillcolor": fill, "resample": resample}

    def theirs(image: np.ndarray, argument: float) -> np.ndarray:
        arguments = (argument,) if operation.has_argument else ()
        return np.asarray(function(Image.fromarray(image), *arguments, **options))

    return theirs


def _arguments_of_maps(operation: Operation) -> tuple[float, ...]:
    """Arguments that its magnitude maps give for magnitudes from 0 to 10, with some signs of each."""
    if not operation.has_argument:
        return (0.0,)
    rows = [np.array([operation.number, *each], np.float64) for each in operation.magnitude_maps.values()]
    return tuple(sorted({sample_argument(row, m / 10, np.uint64(m), 0) for row in rows for m in MAGNITUDES}))


def _of_jitter() -> list[Comparison]:
    from torchvision.transforms import functional as F

    def turn(image: np.ndarray, turns: float) -> np.ndarray:
        changed = image.copy()
        turn_hue(changed.reshape(-1), turns)
        return changed

    def smooth(image: np.ndarray, sigma: float) -> np.ndarray:
        changed, scratch = image.copy(), scratch_for(*image.shape[:2])
        rows = changed.reshape(len(changed), -1)
        between = scratch.mixed.reshape(rows.shape)
        gaussian_smooth(rows, sigma, scratch.taps, scratch.wide, between, scratch.weighted)
        return changed

    def turn_with_torchvision(image: np.ndarray, turns: float) -> np.ndarray:
        return np.asarray(F.adjust_hue(Image.fromarray(image), turns))

    def smooth_with_torchvision(image: np.ndarray, sigma: float) -> np.ndarray:
        size = min(23, 2 * min(image.shape[:2]) - 1)  # torchvision cannot mirror more than the image's width
        tensor = torch.from_numpy(image).permute(2, 0, 1)
        return F.gaussian_blur(tensor, [size, size], [sigma, sigma]).permute(1, 2, 0).numpy()

    turns, sigmas = (-0.5, -0.3, -0.1, 0.0, 0.1, 0.3, 0.5), (0.1, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0)
    return [
        Comparison("hue of colour jitter, turns", None, turns, "Pillow", turn, turn_with_torchvision),
        Comparison("gaussian_blur_prob, pixels", None, sigmas, "torchvision", smooth, smooth_with_torchvision),
    ]


def comparison_tiles(comparison: Comparison, image: np.ndarray) -> tuple[list[np.ndarray], list[str]]:
    """Tiles and captions of three rows: ours, the peer's, the difference times `AMPLIFIED`; without a peer of one."""
    several = len(comparison.arguments) > 1
    numbers = [f" {argument:.3g}" if several else "" for argument in comparison.arguments]
    results = [comparison.ours(image, argument) for argument in comparison.arguments]
    ours = [_reduced(result, np.mean) for result in results]
    if comparison.theirs is None:
        return ours, [f"ours{number}" for number in numbers]
    peers, differences, verdicts = [], [], []
    for argument, result in zip(comparison.arguments, results, strict=True):
        try:
            peers_result = comparison.theirs(image, argument)
        except ValueError:  # Pillow 13 keeps no fewer than one bit
            blank = np.full_like(ours[0], 255)
            peers.append(blank)
            differences.append(blank)
            verdicts.append(f"{comparison.peer} refuses")
            continue
        apart = np.abs(result.astype(int) - peers_result)
        peers.append(_reduced(peers_result, np.mean))
        differences.append(_reduced((apart * AMPLIFIED).clip(0, 255).astype(np.uint8), np.max))
        verdicts.append(f"max {apart.max()}, mean {apart.mean():.1g}" if apart.any() else "identical")
    labels = [f"{whose}{number}" for whose in ("ours", comparison.peer) for number in numbers]
    return [*ours, *peers, *differences], [*labels, *verdicts]


def _reduced(image: np.ndarray, merge: Callable[..., np.ndarray]) -> np.ndarray:
    """An image with each block of pixels merged into one, if it is larger than `LARGEST`; the rest is cut off."""
    block = -(-max(image.shape[:2]) // LARGEST)
    height, width = (size // block for size in image.shape[:2])
    blocks = image[: height * block, : width * block].reshape(height, block, width, block, 3)
    return merge(blocks, axis=(1, 3)).round().astype(np.uint8)
