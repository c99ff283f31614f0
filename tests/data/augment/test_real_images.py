"""Every operation by timm's name, from magnitude to pixels, gives timm's and Pillow's pixels on photographs."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import auto_augment

from tests.data.augment.timms import FILL, applied, compiled_steps, sampled
from widemix.data.augment import registry as op
from widemix.recipe.policy import AugMix, AutoAugment, RandAugment, parse_policy

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
    program = compiled_steps(name, magnitude=magnitude)
    steps = (map(float, sampled(program, stream)[0]) for stream in range(32))
    found = {(number, argument, cubic if number >= op.ROTATE else 0.0) for number, argument, cubic in steps}
    return sorted(found)[:8]  # GaussianBlurRand has a radius of its own for each stream


@pytest.fixture
def assert_timms(system):
    """Ours are those of timm's AugmentOp, which asks `random` for sign, interpolation and the blur's radius."""

    def check(image: Image.Image, magnitudes: np.ndarray) -> None:
        hparams = {"translate_const": 100, "translate_pct": 0.45, "img_mean": FILL}
        for name, magnitude in itertools.product(names(), map(float, magnitudes)):
            for number, argument, cubic in ways(name, magnitude):
                ours = applied(np.array(image), int(number), argument, bool(cubic))
                if (number, argument) == (op.POSTERIZE, 0):  # Pillow 13 refuses to keep no bits
                    assert not ours.any()
                    continue
                negative = argument < (0 if number >= op.ROTATE else 1)
                system({"random.random": lambda of=negative: 0.99 if of else 0.01})
                system({"random.choice": lambda methods, cubic=cubic: methods[int(cubic)]})
                system({"random.uniform": lambda low, high, of=argument: of})
                theirs = np.asarray(auto_augment.AugmentOp(name, 1.0, magnitude, hparams)(image))
                assert np.array_equal(ours, theirs), (name, magnitude, argument)

    return check


@pytest.mark.one_in(5)
@pytest.mark.parametrize("size", [(640, 427), (224, 224), (131, 97)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("which", [0, 1], ids=["china", "flower"])
def test_photographs_of_scikit_learn(which, size, assert_timms):
    image = Image.fromarray(load_sample_images().images[which])
    steps = 5 if size[0] == 640 else 11
    assert_timms(image.resize(size, Image.Resampling.BICUBIC), np.linspace(0, 10, steps))


@pytest.mark.one_in(5)
@pytest.mark.skipif(not SAMPLE.is_dir(), reason="the ImageNet sample is not in shared/")
@pytest.mark.parametrize("which", range(12))
def test_jpegs_of_imagenet(which, assert_timms):
    """The eight odd ones (gray, tall, wide, tiny, large) and four of the others, as they are."""
    files = [*sorted(SAMPLE.glob("edge/*/*.JPEG")), *sorted(SAMPLE.glob("train/*/*.JPEG"))[::25]]
    with Image.open(files[which]) as image:
        steps = 1 if image.width * image.height > 300_000 else 5
        assert_timms(image.convert("RGB"), np.linspace(8.7, 0, steps))
