"""Images of several kinds, and timm's and Pillow's operations, which those of this room are held against."""

import numpy as np
from PIL import Image
from timm.data import auto_augment

from widemix.data.augment import registry as op
from widemix.data.augment.batch import scratch_for
from widemix.data.augment.operations import apply
from widemix.data.augment.program import Program, compile_policy, sample_chain
from widemix.recipe.policy import RandAugment, Step, parse_policy

MEAN, FILL, PACKED = (0.485, 0.456, 0.406), (124, 116, 104), np.uint32(124 | 116 << 8 | 104 << 16)
OPERATIONS = {
    op.AUTOCONTRAST: auto_augment.auto_contrast,
    op.EQUALIZE: auto_augment.equalize,
    op.INVERT: auto_augment.invert,
    op.POSTERIZE: auto_augment.posterize,
    op.SOLARIZE: auto_augment.solarize,
    op.SOLARIZE_ADD: auto_augment.solarize_add,
    op.COLOR: auto_augment.color,
    op.CONTRAST: auto_augment.contrast,
    op.BRIGHTNESS: auto_augment.brightness,
    op.SHARPNESS: auto_augment.sharpness,
    op.BLUR: auto_augment.gaussian_blur,
    op.ROTATE: auto_augment.rotate,
    op.SHEAR_X: auto_augment.shear_x,
    op.SHEAR_Y: auto_augment.shear_y,
    op.TRANSLATE_X: auto_augment.translate_x_abs,
    op.TRANSLATE_Y: auto_augment.translate_y_abs,
    op.TRANSLATE_X_REL: auto_augment.translate_x_rel,
    op.TRANSLATE_Y_REL: auto_augment.translate_y_rel,
}
WITHOUT_ARGUMENT = op.AUTOCONTRAST, op.EQUALIZE, op.INVERT
WHOLE = op.POSTERIZE, op.SOLARIZE, op.SOLARIZE_ADD  # their arguments are whole numbers


def images_of(height: int, width: int) -> list[np.ndarray]:
    """Smooth, noisy, flat and extreme ones: uint8 [height, width, 3] each."""
    numbers = np.random.RandomState(height * 1000 + width)
    coarse = numbers.randint(0, 256, (6, 6, 3)).astype(np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    photo = (smooth + numbers.randint(-8, 9, smooth.shape)).clip(0, 255)
    rows, columns = np.mgrid[0:height, 0:width]
    channel = photo.copy()
    channel[:, :, height % 3] = 60 + channel[:, :, height % 3] // 3
    found = [
        photo,
        photo // 3 + 70,  # of little contrast
        numbers.randint(0, 256, photo.shape),
        channel,  # of little contrast in one channel
        np.full_like(photo, 77),
        np.zeros_like(photo),
        numbers.randint(0, 2, photo.shape) * 255,
        np.stack([columns % 256, rows % 256, np.full_like(rows, 40)], axis=-1),
    ]
    return [image.astype(np.uint8) for image in found]


def applied(image: np.ndarray, operation: int, argument: float, cubic: bool = False) -> np.ndarray:
    """The image after one of our operations."""
    ours = image.copy()
    apply(ours, operation, float(argument), cubic, PACKED, scratch_for(*image.shape[:2]))
    return ours


def by_timm(image: np.ndarray, *chain: tuple[float, float, float] | np.ndarray) -> np.ndarray:
    """The image after steps of (operation, argument, cubic); 0 bits, which Pillow 13 refuses, are black."""
    found = Image.fromarray(image)
    for number, argument, cubic in chain:
        if number == op.SKIP:
            continue
        if number == op.POSTERIZE and argument <= 0:
            found = Image.new("RGB", found.size)
            continue
        given = [] if number in WITHOUT_ARGUMENT else [int(argument) if number in WHOLE else float(argument)]
        resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
        found = OPERATIONS[int(number)](found, *given, fillcolor=FILL, resample=resample)
    return np.asarray(found)


def compiled(text: str) -> Program:
    return compile_policy(parse_policy(text), MEAN)


def compiled_steps(*names: str, magnitude: float = 9, layers: int = 1, interpolation: str = "random") -> Program:
    """A policy of operations that are always applied."""
    steps = tuple(Step(name, 1.0, magnitude) for name in names)
    return compile_policy(RandAugment(steps, layers, None), MEAN, interpolation)


def sampled(program: Program, stream: int, depth: int = 1) -> np.ndarray:
    chain = np.empty((depth, 3))
    sample_chain(program, np.uint64(stream), chain)
    return chain
