"""The cost of mixup and CutMix relative to a training step of Mixer-B/16 on the same batch.

On a GPU if there is one (bf16, 256 images in groups of 32, wall-clock time), else on the CPU (fp32, 8 images, CPU
time of the process). A step is forward, backward and AdamW on soft targets, without data loading. timm's `Mixup` is
timed too, and all that is done with decoded images: normalising, erasing, mixup and rounding.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from widemix.bench.timing import Contestant, compute_clock, time_in_turns
from widemix.data.augment.erase import sample_erasing
from widemix.data.mixup import sample_mixture, soft_labels
from widemix.data.normalise_and_mix import by_triton, normalise_and_mix
from widemix.models.mixer.section import MixerSection
from widemix.models.registry import build_model
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD

VERSIONS = ("torch", "timm", "numpy")
SIDE, CLASSES, REPEATS = 224, 1000, 20
STEP = "a step of Mixer-B/16"
MIXER_B16 = MixerSection(kind="mixer", patch_size=16, channels=768, depth=12, token_hidden=384, channel_hidden=3072)
SETTINGS: dict[str, dict[str, Any]] = {
    "one mixture a group, mixup 0.8 and CutMix 1.0": {"mixup": 0.8, "cutmix": 1.0},
    "one mixture a pair": {"mixup": 0.8, "cutmix": 1.0, "mix_mode": "pair"},
    "one mixture an image": {"mixup": 0.8, "cutmix": 1.0, "mix_mode": "elem"},
    "CutMix alone, by boxes of 0.2 to 0.8": {"cutmix_minmax": (0.2, 0.8)},
}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `widemix bench mixup`."""
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    device, size, group = (torch.device("cuda"), 256, 32) if gpu else (torch.device("cpu"), 8, 8)
    images = torch.randn(size, 3, SIDE, SIDE, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (size,), device=device)
    contestants = {STEP: repeat(train_step(images, labels), 1)}
    contestants |= {name: repeat(mix, REPEATS) for name, mix in mixups(images, labels, group).items()}
    return rows_of(contestants, arguments.rounds, device, size)


def mixups(images: torch.Tensor, labels: torch.Tensor, group: int) -> dict[str, Callable[[int], Any]]:
    """Return the calls that are timed besides a step, by name: each call mixes the images anew.

    images: [B, 3, H, W]. labels: [B].
    """
    found = {"timm's Mixup, one mixture a batch": _timm(images, labels)}
    for name, options in SETTINGS.items():
        section = AugmentSection(mix_group=group, smoothing=0.1, **options)
        found[name] = _mix_groups(images, labels, section)
    ways = {"one after the other": normalise_and_mix}
    if images.device.type == "cuda" and (kernel := by_triton()):
        ways["in one kernel"] = kernel
    for name, way in ways.items():
        found[f"normalised, erased, mixed and rounded {name}"] = last_steps(images, group, way)
    return found


def rows_of(
    contestants: Mapping[str, Contestant], rounds: int, device: torch.device, size: int
) -> list[dict[str, Any]]:
    """Time contestants in turns; the first is a step, of which each row is a fraction. size: images of a call."""
    seconds = time_in_turns(contestants, rounds, partial(compute_clock, device))
    return [_row(name, own, next(iter(seconds.values())), size) for name, own in seconds.items()]


def _row(name: str, seconds: list[float], steps: list[float], size: int) -> dict[str, Any]:
    fraction = statistics.median(a / b for a, b in zip(seconds, steps, strict=True))
    return {
        "name": name,
        "images_per_s": round(size / statistics.median(seconds), 1),
        "ratio": round(1 / fraction, 2),
        "percent_of_step": round(100 * fraction, 3),
    }


def repeat(action: Callable[[int], object], repeats: int) -> Contestant:
    """Return a contestant whose units are calls, each with its own number."""

    def call(number: int) -> int:
        for k in range(repeats):
            action(number * repeats + k)
        return repeats

    return call


def train_step(
    images: torch.Tensor, labels: torch.Tensor, section: MixerSection = MIXER_B16
) -> Callable[[int], torch.Tensor]:
    """A step of a network on the images; each call returns its loss."""
    model = build_model(section, images.shape[-1], CLASSES).to(images.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    targets = soft_labels(labels, CLASSES, 0.1)
    half = images.device.type == "cuda"

    def train(number: int) -> torch.Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
            loss = torch.nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train


def _mix_groups(images: torch.Tensor, labels: torch.Tensor, section: AugmentSection) -> Callable[[int], object]:
    batch = images.clone()

    def mix(number: int) -> torch.Tensor:
        mixture = sample_mixture(len(batch), batch.shape[-1], section, 0, number, 0)
        mixture.mix(batch)
        return mixture.mix_targets(soft_labels(labels, CLASSES, 0.1))

    return mix


def last_steps(images: torch.Tensor, group: int, way: Callable[..., object]) -> Callable[[int], object]:
    """The last steps of the training loader on decoded images of this shape."""
    gpu, count, side = images.device.type == "cuda", len(images), images.shape[-1]
    batch = torch.randint(256, (count, side, side, 3), dtype=torch.uint8, pin_memory=gpu)
    mean, std = (255 * torch.tensor(of, device=images.device)[:, None, None] for of in (IMAGENET_MEAN, IMAGENET_STD))
    section = AugmentSection(re_prob=0.25, mix_group=group, mixup=0.8, cutmix=1.0)
    dtype = torch.bfloat16 if gpu else torch.float32

    def run(number: int) -> object:
        erasing = sample_erasing(np.arange(count), side, section, 0, number)
        return way(batch, mean, std, dtype, erasing, sample_mixture(count, side, section, 0, number, 0))

    return run


def _timm(images: torch.Tensor, labels: torch.Tensor) -> Callable[[int], object]:
    from timm.data import Mixup

    np.random.seed(0)
    batch, mixup = images.clone(), Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=CLASSES)
    return lambda number: mixup(batch, labels)
