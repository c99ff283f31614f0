"""Policies: steps are sampled from timm's distributions and applied as timm applies them."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from timm.data import auto_augment, create_transform

from tests.data.augment.timms import FILL, MEAN, by_timm, compiled, compiled_steps, sampled
from widemix.data.augment import registry as op
from widemix.data.augment.batch import build_augmentation, run_mixture, run_policy, scratch_for
from widemix.data.augment.program import MIX, Program, compile_policy, mixed_chain, sample_chain_weights
from widemix.data.random import AUGMENT, key
from widemix.recipe.augment import AugmentSection
from widemix.recipe.policy import RandAugment, parse_policy


def stream_of(sample: int) -> np.uint64:
    return np.uint64(key(5, 1, sample, AUGMENT))


def after(image: np.ndarray, program: Program, stream: int) -> np.ndarray:
    """The image after the policy with the numbers of a stream."""
    ours, mixes = image.copy(), program.kind == MIX
    run, steps = (run_mixture, max(program.layers, 3)) if mixes else (run_policy, program.layers)
    run(ours, program, np.uint64(stream), scratch_for(*image.shape[:2]), np.empty((steps, 3)))
    return ours


@pytest.fixture
def image() -> np.ndarray:
    rows, columns = np.mgrid[0:48, 0:48]
    noise = np.random.RandomState(0).randint(0, 40, (48, 48, 3))
    return (np.stack([rows * 4, columns * 4, 200 - rows], axis=-1) + noise).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    "text",
    [
        "rand-m9-mstd0.5-inc1",
        "rand-m14-n4-mmax20-mstd3",
        "rand-tweights-n3",
        "rand-t3a",
        "original",
        "cifar10",
        "v0-mstd1",
        "3a",
    ],
)
def test_sampled_steps_are_applied_as_timm_applies_them(image, text):
    program, changed = compiled(text), 0
    for stream in range(60):
        ours = after(image, program, stream)
        assert np.array_equal(ours, by_timm(image, *sampled(program, stream, program.layers)))
        changed += not np.array_equal(ours, image)
    assert changed > 20


def test_histograms_are_of_the_pixels_at_their_place(image):
    """What other operations have changed in between is counted anew, and what values become is looked up before."""
    names = ("Equalize", "AutoContrast", "Color", "Contrast", "Rotate")
    program = compiled_steps(*names, magnitude=6, layers=6, interpolation="bilinear")
    image, followed = image[:20, :24].copy(), set()
    for stream in range(150):
        chain = sampled(program, stream, 6)
        assert np.array_equal(after(image, program, stream), by_timm(image, *chain)), chain
        followed |= {tuple(chain[at : at + 3, 0].astype(int).tolist()) for at in range(4)}
    assert {(op.EQUALIZE, other, op.EQUALIZE) for other in (op.COLOR, op.CONTRAST, op.ROTATE)} <= followed


def test_magnitudes_of_cifar10_are_the_authors():
    """The arguments by the formulas of the code that AutoAugment's authors released; translations by the paper's."""
    formulas = {
        op.CONTRAST: lambda m: 0.1 + 1.8 * m / 10,
        op.COLOR: lambda m: 0.1 + 1.8 * m / 10,
        op.BRIGHTNESS: lambda m: 0.1 + 1.8 * m / 10,
        op.SHARPNESS: lambda m: 0.1 + 1.8 * m / 10,
        op.POSTERIZE: lambda m: 4 - int(4 * m / 10),
        op.SOLARIZE: lambda m: 256 - int(256 * m / 10),
        op.ROTATE: lambda m: 30 * m / 10,
        op.SHEAR_Y: lambda m: 0.3 * m / 10,
        op.TRANSLATE_X_REL: lambda m: 150 / 331 * m / 10,  # up to 150 of 331 pixels
        op.TRANSLATE_Y_REL: lambda m: 150 / 331 * m / 10,
    }
    found = set()
    for policy in parse_policy("cifar10").policies:
        for step in policy:
            program = compile_policy(RandAugment((replace(step, prob=1.0),), 1, None), MEAN)
            [[number, argument, _]] = sampled(program, 0)
            if number in formulas:
                rel = 0.01 if number in (op.TRANSLATE_X_REL, op.TRANSLATE_Y_REL) else 1e-6
                assert abs(argument) == pytest.approx(formulas[number](step.magnitude), rel=rel), step
                found.add(number)
    assert found == set(formulas)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "random"])
def test_operations_interpolate_as_timms_loader_has_them_do(image, interpolation, system):
    """timm's own operations, as its training transform makes them; only signs and `random`'s choices are ours."""
    transform = create_transform(48, is_training=True, auto_augment="rand-m7-n1-p1", interpolation=interpolation)
    theirs = {operation.name: operation for step in transform.transforms for operation in getattr(step, "ops", ())}
    cubics = set()
    for name in ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"):
        program = compiled_steps(name, magnitude=7, interpolation=interpolation)
        for stream in range(8):
            [[_, argument, cubic]] = sampled(program, stream)
            system({"random.random": lambda negative=argument < 0: 0.9 if negative else 0.4})
            system({"random.choice": lambda ways, cubic=cubic: ways[int(cubic)]})
            assert np.array_equal(after(image, program, stream), theirs[name](Image.fromarray(image)))
            cubics.add(cubic)
    assert cubics == {"bilinear": {0}, "bicubic": {1}, "random": {0, 1}}[interpolation]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("text", ["augmix", "augmix-m5-w4-d2-mstd1", "augmix-b1", "augmix-a0.3-w2-b1"])
def test_mixtures_are_timms_with_the_same_numbers(image, text, system):
    program, hparams = compiled(text), {"translate_const": 100, "img_mean": FILL, "translate_pct": 0.3}
    theirs = auto_augment.augment_and_mix_transform(text, hparams)
    for stream in range(30):
        weights = np.empty(program.width, np.float32)
        weight = sample_chain_weights(program, np.uint64(stream), weights)
        chains = [mixed_chain(program, np.uint64(stream), k) for k in range(program.width)]
        numbers, depths = iter(chains), iter(chains)

        def choose(_, depth, replace, numbers=numbers):
            chain = sampled(program, next(numbers)[0], depth)
            return [lambda given, step=step: Image.fromarray(by_timm(np.asarray(given), step)) for step in chain]

        system({"numpy.random.dirichlet": lambda _, weights=weights: weights, "numpy.random.choice": choose})
        system({"numpy.random.beta": lambda *_, weight=weight: weight})
        system({"numpy.random.randint": lambda *_, depths=depths: next(depths)[1]})
        assert np.array_equal(after(image, program, stream), theirs(Image.fromarray(image)))


@pytest.mark.parametrize("text", ["augmix", "augmix-w2-d4-b1", "original"])
def test_each_image_has_the_policy_of_its_own_stream(text):
    images = np.random.RandomState(0).randint(0, 256, (5, 24, 32, 3)).astype(np.uint8)
    found, view_ids = images.copy(), np.array([3, 1, 90, 7, 200])
    program = compile_policy(parse_policy(text), MEAN, "bicubic")
    build_augmentation(AugmentSection(auto_augment=text), MEAN, "bicubic")(found, view_ids, 5, 1, threads=2)
    for image, result, view_id in zip(images, found, view_ids, strict=True):
        assert np.array_equal(result, after(image, program, stream_of(view_id))), view_id


@pytest.mark.parametrize("alpha", [0.3, 1.0, 2.5])
def test_shares_of_a_mixture_follow_dirichlet_and_beta(alpha):
    program = compiled(f"augmix-a{alpha}-w3")
    weights, parts = np.empty((20_000, 3), np.float32), np.empty(20_000, np.float32)
    for stream in range(len(parts)):
        parts[stream] = sample_chain_weights(program, stream_of(stream), weights[stream])
    assert np.allclose(weights.sum(1), 1, atol=1e-6)
    for k in range(3):
        assert stats.kstest(weights[:, k], stats.beta(alpha, 2 * alpha).cdf).pvalue > 1e-3
    assert stats.kstest(parts, stats.beta(alpha, alpha).cdf).pvalue > 1e-3
    depths = Counter(mixed_chain(program, stream_of(s), s % 3)[1] for s in range(30_000))
    assert stats.chisquare([depths[depth] for depth in (1, 2, 3)]).pvalue > 1e-3
    assert sum(depths.values()) == sum(depths[depth] for depth in (1, 2, 3))
