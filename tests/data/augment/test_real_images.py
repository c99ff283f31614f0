"""Every operation by timm's name, from magnitude to pixels, gives timm's and Pillow's pixels on photographs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import auto_augment
from torchvision.transforms import functional as F

from widemix.data.augment import registry as op
from widemix.data.augment.hue import turn_hue
from widemix.data.augment.operations import apply
from widemix.data.augment.program import compile_policy
from widemix.data.augment.sampling import sample_chain
from widemix.data.augment.scratch import scratch_for
from widemix.data.augment.smooth import gaussian_smooth
from widemix.recipe.policy import AugMix, AutoAugment, RandAugment, Step, parse_policy

MEAN, FILL, PACKED = (0.485, 0.456, 0.406), (124, 116, 104), np.uint32(124 | 116 << 8 | 104 << 16)
SAMPLE = Path(__file__).parents[4] / "shared" / "data" / "imagenet-sample"
TEXTS = ("rand", "rand-inc1", "rand-tweights", "rand-t3aw", "v0", "v0r", "original", "originalr", "3a", "augmix")


def names() -> list[str]:
    """Of all operations that any policy has."""
    found = set()
    for text in TEXTS:
        match parse_policy(text):
            case RandAugment(steps=steps) | AugMix(steps=steps):
                found |= {step.name for step in steps}
            case AutoAugment(policies):
                found |= {step.name for chain in policies for step in chain}
    return sorted(found)


def ways(name: str, magnitude: float) -> list[tuple[float, float, float]]:
    """Every (operation, argument, cubic) that ours samples: both signs, both interpolations."""
    program = compile_policy(RandAugment((Step(name, 1.0, magnitude),), 1, None), MEAN)
    found, chain = set(), np.empty((1, 3))
    for stream in range(32):
        sample_chain(program, np.uint64(stream), chain)
        number, argument, cubic = map(float, chain[0])
        found.add((number, argument, cubic if number >= op.ROTATE else 0.0))
    return sorted(found)[:8]  # GaussianBlurRand has a radius of its own for each stream


def timms(
    image: Image.Image, name: str, magnitude: float, way: tuple[float, float, float], monkeypatch
) -> np.ndarray:
    """timm's own AugmentOp, which asks `random` for sign, interpolation and, in GaussianBlurRand, the radius."""
    number, argument, cubic = way
    negative = argument < (0 if number >= op.ROTATE else 1)
    monkeypatch.setattr(auto_augment.random, "random", lambda: 0.99 if negative else 0.01)
    monkeypatch.setattr(auto_augment.random, "choice", lambda methods: methods[int(cubic)])
    monkeypatch.setattr(auto_augment.random, "uniform", lambda low, high: argument)
    hparams = {"translate_const": 100, "translate_pct": 0.45, "img_mean": FILL}
    return np.asarray(auto_augment.AugmentOp(name, 1.0, magnitude, hparams)(image))


def hold(image: Image.Image, magnitudes: np.ndarray, monkeypatch) -> None:
    pixels = np.array(image)
    scratch = scratch_for(*pixels.shape[:2])
    for name in names():
        for magnitude in map(float, magnitudes):
            for way in ways(name, magnitude):
                ours = pixels.copy()
                apply(ours, int(way[0]), way[1], bool(way[2]), PACKED, scratch)
                if way[:2] == (op.POSTERIZE, 0):  # Pillow 13 refuses to keep no bits
                    assert not ours.any()
                    continue
                assert np.array_equal(ours, timms(image, name, magnitude, way, monkeypatch)), (name, magnitude, way)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("size", [(640, 427), (224, 224), (131, 97)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("which", [0, 1], ids=["china", "flower"])
def test_photographs_of_scikit_learn(which, size, monkeypatch):
    image = Image.fromarray(load_sample_images().images[which])
    steps = 5 if size[0] == 640 else 11
    hold(image.resize(size, Image.Resampling.BICUBIC), np.linspace(0, 10, steps), monkeypatch)


@pytest.mark.one_in(5)
@pytest.mark.skipif(not SAMPLE.is_dir(), reason="the ImageNet sample is not in shared/")
@pytest.mark.parametrize("which", range(12))
def test_jpegs_of_imagenet(which, monkeypatch):
    """The eight odd ones (gray, tall, wide, tiny, large) and four of the others, as they are."""
    files = [*sorted(SAMPLE.glob("edge/*/*.JPEG")), *sorted(SAMPLE.glob("train/*/*.JPEG"))[::25]]
    with Image.open(files[which]) as image:
        steps = 1 if image.width * image.height > 300_000 else 5
        hold(image.convert("RGB"), np.linspace(8.7, 0, steps), monkeypatch)


@pytest.mark.parametrize("which", [0, 1], ids=["china", "flower"])
def test_hue_and_the_true_gaussian_on_photographs(which):
    image = load_sample_images().images[which].copy()
    for turn in np.linspace(-0.5, 0.5, 11):
        turned = image.copy()
        turn_hue(turned.reshape(-1), turn)
        assert np.array_equal(turned, np.asarray(F.adjust_hue(Image.fromarray(image), turn))), turn
    scratch, tensor = scratch_for(*image.shape[:2]), torch.from_numpy(image).permute(2, 0, 1)
    for sigma in (0.1, 0.8, 2.0):
        rows = image.copy().reshape(len(image), -1)
        between = scratch.mixed.reshape(rows.shape)
        gaussian_smooth(rows, sigma, scratch.taps, scratch.wide, between, scratch.weighted)
        expected = F.gaussian_blur(tensor, [23, 23], [sigma, sigma]).permute(1, 2, 0).numpy()
        apart = np.abs(rows.reshape(expected.shape).astype(int) - expected)
        assert apart.max() <= 1
        assert apart.mean() < 1e-4
