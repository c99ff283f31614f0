"""Mixing's share of a training step: mixup and CutMix of a batch against Mixer-B/16's step on it.

On a GPU where there is one (bf16, 256 pictures in groups of 32, elapsed time), else on the CPU (fp32, 8 pictures, CPU
time of the process). A step is forward, backward and AdamW on soft targets, without data; timm's own `Mixup` is timed
beside ours.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pipeline.data.mixing import mix_groups, soft_labels
from pipeline.models.registry import build_model
from pipeline.recipe.augment import AugmentSection
from pipeline.recipe.model import MixerSection

VERSIONS = ("torch", "timm", "numpy")
SIDE, CLASSES, REPEATS = 224, 1000, 20
STEP = "a step of Mixer-B/16"
SETTINGS: dict[str, dict[str, Any]] = {
    "one draw a group, mixup 0.8 and CutMix 1.0": {"mixup": 0.8, "cutmix": 1.0},
    "one draw a pair": {"mixup": 0.8, "cutmix": 1.0, "mix_mode": "pair"},
    "one draw a picture": {"mixup": 0.8, "cutmix": 1.0, "mix_mode": "elem"},
    "CutMix alone, by boxes of 0.2 to 0.8": {"cutmix_minmax": (0.2, 0.8)},
}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    device, size, group = (torch.device("cuda"), 256, 32) if gpu else (torch.device("cpu"), 8, 8)
    images = torch.randn(size, 3, SIDE, SIDE, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (size,), device=device)
    works = {STEP: (_step(images, labels), 1), "timm's Mixup, one draw a batch": (_timms(images, labels), REPEATS)}
    for name, options in SETTINGS.items():
        works[name] = _ours(images, labels, AugmentSection(mix_group=group, smoothing=0.1, **options)), REPEATS
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(arguments.rounds + 1):  # the first is not counted
        for name, (work, repeats) in works.items():
            seconds[name].append(_seconds(work, turn, repeats, device))
    return [_row(name, found[1:], seconds[STEP][1:], size) for name, found in seconds.items()]


def _row(name: str, seconds: list[float], steps: list[float], size: int) -> dict[str, Any]:
    share = statistics.median(a / b for a, b in zip(seconds, steps, strict=True))
    return {
        "name": name,
        "images_per_s": round(size / statistics.median(seconds), 1),
        "ratio": round(1 / share, 2),
        "percent_of_step": round(100 * share, 3),
    }


def _seconds(work: Callable[[int], Any], turn: int, repeats: int, device: torch.device) -> float:
    """Of one call, over several."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    started = clock()
    for k in range(repeats):
        work(turn * repeats + k)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - started) / repeats


def _step(images: torch.Tensor, labels: torch.Tensor) -> Callable[[int], Any]:
    section = MixerSection(
        kind="mixer", patch_size=16, tokens=196, channels=768, depth=12, token_hidden=384, channel_hidden=3072
    )
    model = build_model(section, SIDE, CLASSES).to(images.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    targets = soft_labels(labels, CLASSES, 0.1)
    half = images.device.type == "cuda"

    def work(turn: int) -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
            loss = torch.nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return work


def _ours(images: torch.Tensor, labels: torch.Tensor, section: AugmentSection) -> Callable[[int], Any]:
    pictures = images.clone()
    return lambda turn: mix_groups(pictures, soft_labels(labels, CLASSES, 0.1), section, 0, turn, 0)


def _timms(images: torch.Tensor, labels: torch.Tensor) -> Callable[[int], Any]:
    from timm.data import Mixup

    np.random.seed(0)
    pictures, mixup = images.clone(), Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=CLASSES)
    return lambda turn: mixup(pictures, labels)
