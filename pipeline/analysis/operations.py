"""Every operation of a policy or the colour jitter over its range, beside its peer's result, and the difference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from pipeline.data.augment import operations as op
from pipeline.data.augment.hue import turn_hue
from pipeline.data.augment.operations import apply
from pipeline.data.augment.scratch import scratch_for
from pipeline.data.augment.smooth import gaussian_smooth

AMPLIFIED = 128  # what differences are multiplied by to be seen
LARGEST = 128  # pixels: larger pictures are shown smaller, their differences by the greatest of the pixels left out


@dataclass(frozen=True)
class Shown:
    """An operation and the arguments that it is shown with, ours and its peer: picture, argument -> picture."""

    name: str
    number: int | None  # of `pipeline.data.augment.operations`; None: not one of a policy's
    arguments: tuple[float, ...]  # one, unused, where the operation has none
    peer: str
    ours: Callable[[np.ndarray, float], np.ndarray]
    peers: Callable[[np.ndarray, float], np.ndarray]


def all_operations(fill: tuple[int, int, int]) -> list[Shown]:
    """Over timm's whole range, magnitudes 0 to 10 and both signs; what moves pixels by both interpolations."""
    from timm.data import auto_augment as timm

    bits, thresholds, amounts = (8, 6, 4, 3, 2, 1, 0), (256, 230, 179, 128, 77, 26, 0), (0, 11, 33, 55, 77, 99, 110)
    factors, reach = (0.1, 0.4, 0.7, 1.0, 1.3, 1.6, 1.9), np.linspace(-1, 1, 7)
    values: list[tuple[str, int, Any, Callable[..., Any]]] = [
        ("AutoContrast", op.AUTOCONTRAST, (0,), lambda image, _: timm.auto_contrast(image)),
        ("Equalize", op.EQUALIZE, (0,), lambda image, _: timm.equalize(image)),
        ("Invert", op.INVERT, (0,), lambda image, _: timm.invert(image)),
        ("Posterize, bits kept", op.POSTERIZE, bits, timm.posterize),
        ("Solarize, threshold", op.SOLARIZE, thresholds, timm.solarize),
        ("SolarizeAdd, amount", op.SOLARIZE_ADD, amounts, timm.solarize_add),
        ("Color, factor", op.COLOR, (0.0, *factors[1:]), timm.color),
        ("Contrast, factor", op.CONTRAST, factors, timm.contrast),
        ("Brightness, factor", op.BRIGHTNESS, factors, timm.brightness),
        ("Sharpness, factor", op.SHARPNESS, factors, timm.sharpness),
        ("GaussianBlur, pixels", op.BLUR, (0.1, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0), timm.gaussian_blur),
    ]
    moves: list[tuple[str, int, Any, Callable[..., Any]]] = [
        ("Rotate, degrees", op.ROTATE, 30 * reach, timm.rotate),
        ("ShearX", op.SHEAR_X, 0.3 * reach, timm.shear_x),
        ("ShearY", op.SHEAR_Y, 0.3 * reach, timm.shear_y),
        ("TranslateX, share of the width", op.TRANSLATE_X_REL, 0.45 * reach, timm.translate_x_rel),
        ("TranslateY, share of the height", op.TRANSLATE_Y_REL, 0.45 * reach, timm.translate_y_rel),
    ]
    found = [_of_policies(name, number, given, peer, fill, None) for name, number, given, peer in values]
    for resample in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC):
        found += [_of_policies(name, number, given, peer, fill, resample) for name, number, given, peer in moves]
    return found + _of_jitter()


def _of_policies(name, number, arguments, function, fill, resample) -> Shown:
    packed, moving = np.uint32(fill[0] | fill[1] << 8 | fill[2] << 16), {}
    if resample is not None:
        moving = {"fillcolor": fill, "resample": resample}
        name = f"{name}, {resample.name.lower()}"

    def ours(picture: np.ndarray, argument: float) -> np.ndarray:
        changed = picture.copy()
        cubic = resample == Image.Resampling.BICUBIC
        apply(changed, number, float(argument), cubic, packed, scratch_for(*picture.shape[:2]))
        return changed

    def peers(picture: np.ndarray, argument: float) -> np.ndarray:
        return np.asarray(function(Image.fromarray(picture), argument, **moving))

    return Shown(name, number, tuple(arguments), "Pillow", ours, peers)


def _of_jitter() -> list[Shown]:
    from torchvision.transforms import functional as F

    def turned(picture: np.ndarray, turn: float) -> np.ndarray:
        changed = picture.copy()
        turn_hue(changed.reshape(-1), turn)
        return changed

    def smoothed(picture: np.ndarray, sigma: float) -> np.ndarray:
        changed, scratch = picture.copy(), scratch_for(*picture.shape[:2])
        rows = changed.reshape(len(changed), -1)
        between = scratch.mixed.reshape(rows.shape)
        gaussian_smooth(rows, sigma, scratch.taps, scratch.wide, between, scratch.weighted)
        return changed

    def smoothed_by_torchvision(picture: np.ndarray, sigma: float) -> np.ndarray:
        around = min(
            23, 2 * min(picture.shape[:2]) - 1
        )  # torchvision cannot mirror a picture narrower than its reach
        tensor = torch.from_numpy(picture).permute(2, 0, 1)
        return F.gaussian_blur(tensor, [around, around], [sigma, sigma]).permute(1, 2, 0).numpy()

    return [
        Shown(
            "hue of colour jitter, turns",
            None,
            (-0.5, -0.3, -0.1, 0.0, 0.1, 0.3, 0.5),
            "Pillow",
            turned,
            lambda picture, turn: np.asarray(F.adjust_hue(Image.fromarray(picture), turn)),
        ),
        Shown(
            "gaussian_blur_prob, pixels",
            None,
            (0.1, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0),
            "torchvision",
            smoothed,
            smoothed_by_torchvision,
        ),
    ]


def compared(shown: Shown, picture: np.ndarray) -> tuple[list[np.ndarray], list[str]]:
    """Tiles and words of three rows: ours, the peer's, the difference times `AMPLIFIED`."""
    ours, peers, differences, words = [], [], [], []
    for argument in shown.arguments:
        mine = shown.ours(picture, argument)
        ours.append(_smaller(mine, np.mean))
        try:
            theirs = shown.peers(picture, argument)
        except ValueError:  # Pillow 13 keeps no fewer than one bit
            blank = np.full_like(ours[-1], 255)
            peers.append(blank)
            differences.append(blank)
            words.append(f"{shown.peer} refuses")
            continue
        apart = np.abs(mine.astype(int) - theirs)
        peers.append(_smaller(theirs, np.mean))
        differences.append(_smaller((apart * AMPLIFIED).clip(0, 255).astype(np.uint8), np.max))
        words.append(f"max {apart.max()}, mean {apart.mean():.1g}" if apart.any() else "identical")
    given = [f" {argument:.3g}" if len(shown.arguments) > 1 else "" for argument in shown.arguments]
    labels = [f"{whose}{argument}" for whose in ("ours", shown.peer) for argument in given]
    return [*ours, *peers, *differences], [*labels, *words]


def _smaller(picture: np.ndarray, merge: Callable[..., np.ndarray]) -> np.ndarray:
    """A picture of more than `LARGEST` pixels by whole blocks, each merged into one pixel; rests are cut off."""
    block = -(-max(picture.shape[:2]) // LARGEST)
    height, width = (size // block for size in picture.shape[:2])
    blocks = picture[: height * block, : width * block].reshape(height, block, width, block, 3)
    return merge(blocks, axis=(1, 3)).round().astype(np.uint8)
