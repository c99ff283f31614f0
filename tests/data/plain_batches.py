"""Training batches made one image at a time by timm, torchvision and Pillow, from the documented random numbers.

Nothing of the project's code is used: timm's modules sample from our numbers instead of Python's `random`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image, ImageOps
from scipy.special import ndtri
from timm.data import Mixup, auto_augment, random_erasing, transforms
from torchvision.transforms import functional as F

ORDER, CROP, FLIP, AUGMENT, ERASE, MIX, NETWORK, COLOR_JITTER, PAGE, WINDOW, INTERPOLATION = range(11)
CHOICE, PROB, RADIUS, ANGLE, SIGN, CUBIC = range(6)  # counters of a policy's step, which has eight
WORD = 2**64 - 1
QUANTILES = ndtri((np.arange(4096) + 0.5) / 4096)
NOISE = (QUANTILES / QUANTILES.std()).astype(np.float32)
ADJUST = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def scramble(word: int) -> int:
    """The finaliser of SplitMix64."""
    word = (word + 0x9E3779B97F4A7C15) & WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31


def unscramble(word: int) -> int:
    """The word that `scramble` makes this one of."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        word = (word ^ word >> shift ^ word >> 2 * shift) * pow(factor, -1, 2**64) & WORD
    return (word - 0x9E3779B97F4A7C15) & WORD


def stream_with(number: float, counter: int) -> int:
    """A stream whose `counter`-th uniform number is this one, in [0, 1)."""
    return (unscramble(int(number * 2**53) << 11) - counter) & WORD


def stream_of(*words: int) -> int:
    return functools.reduce(lambda word, other: scramble(word ^ other), words, 0)


def uniform(stream: int, counter: int) -> float:
    return (scramble((stream + counter) & WORD) >> 11) / 2**53


class Numbers:
    """In place of Python's `random`: the numbers of a stream, at counters that follow from the calls so far.

    `real` and `whole` give the counter of the next call of each kind, from how many of both kinds there were.
    """

    def __init__(self, stream: int, real: Callable[[int, int], int], whole: Callable[[int, int], int]):
        self.stream, self.real, self.whole = stream, real, whole
        self.reals, self.wholes, self.at = 0, 0, 0

    def random(self) -> float:
        self.at = self.real(self.reals, self.wholes)
        self.reals += 1
        return uniform(self.stream, self.at)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def randint(self, low: int, high: int) -> int:
        self.at = self.whole(self.reals, self.wholes)
        self.wholes += 1
        return low + int((high - low + 1) * uniform(self.stream, self.at))


def crop_numbers(stream: int) -> Any:
    """Of an attempt: area, aspect, top, left."""
    return Numbers(
        stream,
        real=lambda reals, _: 4 * (reals // 2) + reals % 2,
        whole=lambda reals, wholes: 4 * (reals // 2 - 1) + 2 + wholes,
    )


def erasing_numbers(stream: int) -> Any:
    """One after the other."""
    return Numbers(stream, *[lambda reals, wholes: reals + wholes] * 2)


def plain_batch(images: Sequence[tuple[Image.Image, int]], recipe: Any, epoch: int, step: int) -> tuple:
    """Inputs, targets, samples and keys of one step, over all ranks, from all decoded images and their labels.

    The recipe has the sections data, augment and train.
    """
    data, augment, train = recipe.data, recipe.augment, recipe.train
    numbers = train.seed, max(1, augment.aug_repeats), epoch, step
    samples, view_ids = views_of_step(len(images), train.global_batch, *numbers)
    inputs = torch.stack(
        [
            plain_image(images[sample][0], data, augment, train.seed, epoch, view_id)
            for sample, view_id in zip(samples, view_ids, strict=True)
        ]
    )
    labels = torch.tensor([images[sample][1] for sample in samples])
    first_group = epoch * (len(images) // train.global_batch) + step
    inputs, targets = mixed(inputs, labels, augment, data.num_classes, (train.seed, first_group))
    keys = [stream_of(train.seed, epoch, view_id, NETWORK) for view_id in view_ids]
    return inputs.to(DTYPES[train.precision]), targets, samples, np.array(keys, np.uint64).view(np.int64)


def views_of_step(
    count: int, batch: int, seed: int, repeats: int, epoch: int, step: int
) -> tuple[list[int], list[int]]:
    """Samples and view ids of a step of the random order: a slice of the epoch's permutation, sorted by view."""
    stream, first = stream_of(seed, epoch, count, ORDER), step * batch
    positions = sorted(range(first, min(first + batch, count)), key=lambda position: position % repeats)
    samples = [permuted(position // repeats, count, stream) for position in positions]
    return samples, [sample + count * (at % repeats) for sample, at in zip(samples, positions, strict=True)]


def paged_views_of_step(
    offset: list[int],
    size: list[int],
    batch: int,
    seed: int,
    window: int,
    repeats: int,
    page: int,
    epoch: int,
    step: int,
) -> list[int]:
    """View ids of a step of the paged order; window and page in bytes.

    Pages in random order, from a random sample on; lanes of it, of which windows are permuted; a run from each lane.
    """
    count, mean, lanes = len(offset), sum(size) / len(size), math.gcd(batch, 64)
    page, run = max(1, round(page / mean)), batch // lanes
    length = math.ceil(count // batch * run / repeats)
    windows = max(1, math.ceil(length / max(1, int(window / mean / lanes))))
    window = max(1, math.ceil(length / windows))
    in_file = sorted(range(count), key=offset.__getitem__)
    begin = int(uniform(stream_of(seed, epoch, 0, PAGE), 0) * count)
    view_ids = []
    for lane in range(lanes):
        for at in sorted(range(step * run, (step + 1) * run), key=lambda at: at % repeats):
            number, place = divmod(at // repeats, window)
            stream = stream_of(seed, epoch, lane << 32 | number, WINDOW)
            place = permuted(place, min(window, length - number * window), stream) + number * window + lane * length
            which, within = divmod(place, page)
            if which < count // page:
                which = permuted(which, count // page, stream_of(seed, epoch, 1, PAGE))
            view_ids.append(in_file[(begin + which * page + within) % count] + count * (at % repeats))
    return view_ids


def permuted(place: int, count: int, stream: int) -> int:
    """The element at `place` of a permutation: a Feistel network of eight rounds, repeated until it is in range."""
    bits = max(2, (count - 1).bit_length())
    low, high = bits // 2, bits - bits // 2
    word = place
    while True:
        left, right = word >> low, word & (1 << low) - 1
        for number in range(8):
            salt = scramble((stream + number) & WORD)
            if number % 2:
                right ^= scramble(salt ^ left) & (1 << low) - 1
            else:
                left ^= scramble(salt ^ right) & (1 << high) - 1
        word = left << low | right
        if word < count:
            return word


def plain_image(image: Image.Image, data: Any, augment: Any, seed: int, epoch: int, view_id: int) -> torch.Tensor:
    """Crop, flip, policy, colour jitter, normalise, erase: float32 [3, side, side]."""
    stream = functools.partial(stream_of, seed, epoch, view_id)
    image = cropped(image, data, augment, stream)
    if uniform(stream(FLIP), 0) < augment.hflip:
        image = ImageOps.mirror(image)
    if augment.auto_augment:
        image = after_policy(image, augment.auto_augment, data, stream(AUGMENT))
    image = jittered(image, augment, stream(COLOR_JITTER))
    values = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float()
    mean, std = (255 * torch.tensor(channels)[:, None, None] for channels in (data.mean, data.std))
    return erased((values - mean) / std, augment, stream(ERASE))


def cropped(image: Image.Image, data: Any, augment: Any, stream: Callable[[int], int]) -> Image.Image:
    side = data.image_size
    if augment.crop == "padded":
        wide = ImageOps.expand(image, augment.padding)
        top = int(uniform(stream(CROP), 0) * (wide.height - side + 1))
        left = int(uniform(stream(CROP), 1) * (wide.width - side + 1))
        return wide.crop((left, top, left + side, top + side))
    numbers = crop_numbers(stream(CROP))
    numbers.choice = lambda kernels: kernels[uniform(stream(INTERPOLATION), 0) < 0.5]  # bilinear, bicubic
    crop = transforms.RandomResizedCropAndInterpolation(side, augment.scale, augment.ratio, data.interpolation)
    with patch.object(transforms, "random", numbers):
        return crop(image)


def resized_box(image: Image.Image, box: np.ndarray, bicubic: bool, side: int) -> np.ndarray:
    """A box (top, left, height, width, flip) of an image by Pillow: uint8 [side, side, 3]."""
    top, left, height, width, flip = box.tolist()
    kernel = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    pixels = np.asarray(image.crop((left, top, left + width, top + height)).resize((side, side), kernel))
    return pixels[:, ::-1] if flip else pixels


def after_policy(image: Image.Image, text: str, data: Any, stream: int) -> Image.Image:
    """timm's RandAugment, with the settings that its training transform passes; step k has counters from 8 k on."""
    settings = {"translate_const": 100, "img_mean": tuple(round(255 * channel) for channel in data.mean)}
    if data.interpolation != "random":
        settings["interpolation"] = transforms.str_to_pil_interp(data.interpolation)
    policy = auto_augment.rand_augment_transform(text, settings)

    def chosen(operations, layers, **_):
        return [
            functools.partial(step, operations[int(uniform(stream, 8 * k) * len(operations))], k)
            for k in range(layers)
        ]

    def step(operation, k, given):
        sample = lambda number: uniform(stream, 8 * k + number)  # noqa: E731
        normal = math.sqrt(-2 * math.log(1 - sample(RADIUS))) * math.cos(2 * math.pi * sample(ANGLE))
        asked = iter((sample(PROB), 1 - sample(SIGN)))  # whether to apply it, then (the upper half) whether to negate
        numbers = SimpleNamespace(
            random=lambda: next(asked),
            gauss=lambda centre, std: centre + std * normal,
            choice=lambda kernels: kernels[sample(CUBIC) < 0.5],
        )
        with patch.object(auto_augment, "random", numbers):
            return operation(given)

    with patch.object(np.random, "choice", chosen):
        return policy(image)


def jittered(image: Image.Image, augment: Any, stream: int) -> Image.Image:
    """torchvision's ColorJitter in a sampled order, and grayscale."""
    if any(augment.color_jitter) and uniform(stream, 0) < augment.color_jitter_prob:
        for part in sorted(range(4), key=lambda part: uniform(stream, 8 + part)):
            strength, centre = augment.color_jitter[part], float(part != 3)
            low = max(0.0, centre - strength) if centre else -strength
            factor = low + (centre + strength - low) * uniform(stream, 4 + part)
            image = ADJUST[part](image, factor) if strength else image
    return F.rgb_to_grayscale(image, 3) if uniform(stream, 1) < augment.grayscale_prob else image


def erased(image: torch.Tensor, augment: Any, stream: int) -> torch.Tensor:
    """timm's random erasing; each box has a stream of noise, keyed by the counter of its top."""
    numbers = erasing_numbers(stream)

    def noise(per_pixel, colour, shape, **_):
        channels, height, width = shape if per_pixel else (shape[0], 1, 1)
        if not (per_pixel or colour):
            return torch.zeros(channels, 1, 1)
        box = scramble((stream + 2**20 + numbers.at - 1) & WORD)
        values = np.empty((height, width * channels), np.float32)
        for y, i in itertools.product(range(height), range(width * channels)):
            values[y, i] = NOISE[scramble((box + 2**14 * y + i // 4) & WORD) >> 16 * (i % 4) & 4095]
        return torch.from_numpy(values).view(height, width, channels).permute(2, 0, 1)

    timms = random_erasing.RandomErasing(
        augment.re_prob, mode=augment.re_mode, max_count=augment.re_count, device="cpu"
    )
    with patch.object(random_erasing, "random", numbers), patch.object(random_erasing, "_get_pixels", noise):
        return timms(image) if augment.re_prob else image


def mixed(inputs: torch.Tensor, labels: torch.Tensor, augment: Any, classes: int, words: tuple[int, int]) -> tuple:
    """timm's Mixup of each group, seeded by (seed, step over all epochs, group); or smoothed labels alone."""
    off = augment.mixup == augment.cutmix == 0 and augment.cutmix_minmax is None
    timms = Mixup(
        1.0 if off else augment.mixup,
        augment.cutmix,
        augment.cutmix_minmax,
        prob=0.0 if off else augment.mixup_prob,
        switch_prob=augment.mixup_switch_prob,
        mode=augment.mix_mode,
        label_smoothing=augment.smoothing,
        num_classes=classes,
    )
    groups = []
    for number, (group, own) in enumerate(
        zip(inputs.split(augment.mix_group), labels.split(augment.mix_group), strict=True)
    ):
        np.random.seed(stream_of(*words, number, MIX) & 0xFFFFFFFF)
        groups.append(timms(group, own))
    return tuple(torch.cat(parts) for parts in zip(*groups, strict=True))
