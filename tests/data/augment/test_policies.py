"""Policies: what is drawn follows timm's law, and what was drawn is done as timm does it."""

import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from timm.data import auto_augment

from pipeline.data.augment import operations as op
from pipeline.data.augment.draw import SKIP, draw_chain, draw_shares, mixed_chain
from pipeline.data.augment.program import compile_policy
from pipeline.data.augment.run import run_policy
from pipeline.data.augment.scratch import scratch_for
from pipeline.data.random import AUGMENT, key
from pipeline.recipe.policy import parse_policy

MEAN = (0.485, 0.456, 0.406)
FILL = (124, 116, 104)
DRAWS = 100_000
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
    op.TRANSLATE_X_REL: auto_augment.translate_x_rel,
    op.TRANSLATE_Y_REL: auto_augment.translate_y_rel,
}


def stream_of(sample: int) -> np.uint64:
    return np.uint64(key(5, 1, sample, AUGMENT))


def compiled(text: str):
    return compile_policy(parse_policy(text), MEAN)


def timms(text: str):
    hparams = {"translate_const": 100, "img_mean": FILL}
    if text.startswith("rand"):
        return auto_augment.rand_augment_transform(text, hparams)
    if text.startswith("augmix"):
        return auto_augment.augment_and_mix_transform(text, hparams | {"translate_pct": 0.3})
    return auto_augment.auto_augment_transform(text, hparams)


def drawn(program, stream: int, depth: int) -> np.ndarray:
    chain = np.empty((depth, 3))
    draw_chain(program, np.uint64(stream), chain)
    return chain


def in_timms_hands(image: Image.Image, chain: np.ndarray) -> Image.Image:
    """The drawn steps done by timm and Pillow; 0 bits, which Pillow 13 refuses, are black."""
    for number, argument, cubic in chain:
        if number == SKIP:
            continue
        if number == op.POSTERIZE and argument <= 0:
            image = Image.new("RGB", image.size)
            continue
        whole = number in (op.POSTERIZE, op.SOLARIZE, op.SOLARIZE_ADD)
        given = () if number <= op.INVERT else (int(argument) if whole else float(argument),)
        resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
        image = OPERATIONS[int(number)](image, *given, fillcolor=FILL, resample=resample)
    return image


@pytest.fixture
def picture() -> np.ndarray:
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
        "v0-mstd1",
        "3a",
    ],
)
def test_what_was_drawn_is_done_as_timm_does_it(picture, text):
    program = compiled(text)
    changed = 0
    for stream in range(60):
        ours = picture.copy()
        run_policy(ours, program, np.uint64(stream), scratch_for(48, 48), np.empty((max(program.layers, 3), 3)))
        expected = in_timms_hands(Image.fromarray(picture), drawn(program, stream, program.layers))
        assert np.array_equal(ours, np.asarray(expected))
        changed += not np.array_equal(ours, picture)
    assert changed > 20


@pytest.mark.parametrize("text", ["augmix", "augmix-m5-w4-d2-mstd1", "augmix-b1", "augmix-a0.3-w2-b1"])
def test_mixtures_are_timms_with_the_same_numbers(picture, text, monkeypatch):
    """timm's own AugMix, its draws replaced by ours."""
    program, theirs = compiled(text), timms(text)
    for stream in range(30):
        shares = np.empty(program.width, np.float32)
        share = draw_shares(program, np.uint64(stream), shares)
        chains = [mixed_chain(program, np.uint64(stream), k) for k in range(program.width)]
        numbers, depths = iter(chains), iter(chains)
        monkeypatch.setattr(np.random, "dirichlet", lambda _, shares=shares: shares)
        monkeypatch.setattr(np.random, "beta", lambda *_, share=share: share)
        monkeypatch.setattr(np.random, "randint", lambda *_, depths=depths: next(depths)[1])

        def choose(_, depth, replace, numbers=numbers):
            chain = drawn(program, next(numbers)[0], depth)
            return [lambda image, step=step: in_timms_hands(image, step[None]) for step in chain]

        monkeypatch.setattr(np.random, "choice", choose)
        expected = np.asarray(theirs(Image.fromarray(picture)))
        ours = picture.copy()
        run_policy(ours, program, np.uint64(stream), scratch_for(48, 48), np.empty((max(program.layers, 3), 3)))
        assert np.array_equal(ours, expected)


def timms_draws(text: str) -> list[tuple]:
    """(place, operation, argument, cubic) of every step that timm does to DRAWS pictures."""
    found: list[tuple] = []
    theirs = timms(text)
    steps = [step for chain in theirs.policy for step in chain] if hasattr(theirs, "policy") else theirs.ops
    numbers = {function: number for number, function in OPERATIONS.items()}
    for step in steps:
        if step.aug_fn is auto_augment.gaussian_blur_rand:
            step.aug_fn = lambda _, factor, **kw: found.append((op.BLUR, random.uniform(0.1, 2.0 * factor), False))
            continue
        # timm's level of `desaturate` becomes a factor of `color`
        turned = step.aug_fn is auto_augment.desaturate
        number = op.COLOR if turned else numbers[step.aug_fn]

        def record(_, *arguments, number=number, turned=turned, resample, **kw):
            argument = float(arguments[0]) if arguments else 0.0
            cubic = number >= op.ROTATE and random.choice(resample) == Image.Resampling.BICUBIC
            found.append((number, 1.0 - argument if turned else argument, cubic))

        step.aug_fn = record
    random.seed(1)
    np.random.seed(1)
    for _ in range(DRAWS):
        theirs(None)
    return found


@pytest.mark.parametrize(
    "text", ["rand-m9-mstd0.5-inc1", "rand-m8-n3-p0.3-mstd101", "rand-tweights-mstd1", "original-mstd0.5", "3a"]
)
def test_operations_magnitudes_and_signs_are_as_frequent_as_timms(text):
    """Chi-squared of two samples, over operation x interpolation x argument in bins."""
    program = compiled(text)
    ours = np.concatenate(
        [drawn(program, stream_of(sample), program.layers) for sample in range(DRAWS)], dtype=np.float64
    )
    ours = ours[ours[:, 0] != SKIP]
    ours[ours[:, 0] < op.ROTATE, 2] = 0
    theirs = np.array(timms_draws(text), np.float64)
    bins: list[tuple[int, int]] = []
    for kind in {tuple(row) for row in np.concatenate([ours[:, [0, 2]], theirs[:, [0, 2]]])}:
        a, b = (draws[(draws[:, [0, 2]] == kind).all(1), 1] for draws in (ours, theirs))
        edges = np.unique(np.quantile(np.concatenate([a, b]), np.linspace(0, 1, 9)))
        edges[-1] = np.inf
        bins += zip(np.histogram(a, edges)[0], np.histogram(b, edges)[0], strict=True)
    counts = np.array([pair for pair in bins if sum(pair) > 20], np.float64)
    squared = ((counts[:, 0] - counts[:, 1]) ** 2 / counts.sum(1)).sum()
    assert len(counts) >= 3
    assert squared < stats.chi2.ppf(0.999, len(counts))


def test_which_operations_meet_is_as_timms_without_replacement():
    """Ordered pairs of a weighted draw, against the law: p_i p_j / (1 - p_i)."""
    policy = parse_policy("rand-t3aw-p1-n2")
    program = compiled("rand-t3aw-p1-n2")
    program.table[:, 0] = np.arange(len(policy.steps))  # tell steps apart by their place
    pairs = Counter(tuple(drawn(program, stream_of(s), 2)[:, 0].astype(int)) for s in range(DRAWS))
    p = np.array(policy.weights) / sum(policy.weights)
    law = p[:, None] * p[None, :] / (1 - p[:, None])
    np.fill_diagonal(law, 0)
    assert law.sum() == pytest.approx(1)
    seen = np.array([[pairs[i, j] for j in range(len(p))] for i in range(len(p))])
    assert seen.trace() == 0
    kept = law > 0
    assert stats.chisquare(seen[kept], DRAWS * law[kept]).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.3, 1.0, 2.5])
def test_shares_of_a_mixture_follow_dirichlet_and_beta(alpha):
    program = compiled(f"augmix-a{alpha}-w3")
    shares, parts = np.empty((20_000, 3), np.float32), np.empty(20_000, np.float32)
    for stream in range(len(parts)):
        parts[stream] = draw_shares(program, stream_of(stream), shares[stream])
    assert np.allclose(shares.sum(1), 1, atol=1e-6)
    for k in range(3):
        assert stats.kstest(shares[:, k], stats.beta(alpha, 2 * alpha).cdf).pvalue > 1e-3
    assert stats.kstest(parts, stats.beta(alpha, alpha).cdf).pvalue > 1e-3
    depths = Counter(mixed_chain(program, stream_of(s), s % 3)[1] for s in range(30_000))
    assert stats.chisquare([depths[depth] for depth in (1, 2, 3)]).pvalue > 1e-3
    assert sum(depths.values()) == sum(depths[depth] for depth in (1, 2, 3))
