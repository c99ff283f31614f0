"""Over 25,000 samples of a policy, operations, magnitudes, signs and pairs are as frequent as timm's."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from timm.data import auto_augment

from tests.data.augment.timms import FILL, MEAN, OPERATIONS, compiled, compiled_steps, sampled
from tests.data.plain_batches import stream_with, uniform
from widemix.data.augment import registry as op
from widemix.data.augment.program import MIX, compile_policy, mixed_chain, sample_argument
from widemix.data.random import AUGMENT, key
from widemix.recipe.policy import RandAugment, Step, parse_policy

SAMPLES = 25_000  # chains of steps
NUMBERS = {function.__name__: number for number, function in OPERATIONS.items()}
NUMBERS |= {"desaturate": op.COLOR, "gaussian_blur_rand": op.BLUR}
MOVES = {"Rotate": 0.3, "ShearX": 0.2, "ShearY": 0.2, "TranslateXRel": 0.1, "TranslateYRel": 0.1}
W0 = MOVES | {"ColorIncreasing": 0.025, "SharpnessIncreasing": 0.025, "AutoContrast": 0.025, "Equalize": 0.005}
W0 |= {f"{name}Increasing": 0.005 for name in ("Solarize", "Contrast", "Brightness")} | {"SolarizeAdd": 0.005}
Chain = tuple[tuple[int, float, bool], ...]  # operation, argument, cubic of each step that was not skipped


class Trace(tuple):
    """In place of an image: the operations so far."""

    def copy(self) -> "Trace":
        return self


def ours(text: str) -> list[Chain]:
    """The chains that `text` makes for as many samples; of AugMix, one chain of each."""
    program, found = compiled(text), []
    for sample in range(SAMPLES):
        stream, depth = np.uint64(key(5, 1, sample, AUGMENT)), program.layers
        if program.kind == MIX:
            stream, depth = mixed_chain(program, stream, sample % program.width)
        chain = sampled(program, stream, depth)
        found.append(
            tuple((int(n), argument, n >= op.ROTATE and bool(cubic)) for n, argument, cubic in chain if n != op.SKIP)
        )
    return found


def timms(text: str, system) -> list[Chain]:
    """timm's own policy, its operations and blends replaced by functions that record them."""
    hparams = {"translate_const": 100, "img_mean": FILL}
    random.seed(1)
    np.random.seed(1)
    if text.startswith("augmix"):
        policy = auto_augment.augment_and_mix_transform(f"{text}-b1", hparams | {"translate_pct": 0.3})
        steps, found = policy.ops, []
        system({"PIL.Image.blend": lambda image, other, fraction: found.append(other) or image})
    elif text.startswith("rand"):
        weights = W0 if "-w0" in text else None  # which timm no longer has: its own sampling, by the weights it had
        policy = auto_augment.rand_augment_transform(text.replace("-w0", ""), hparams, weights)
        steps = policy.ops
    else:
        policy = auto_augment.auto_augment_transform(text, hparams)
        steps = [step for chain in policy.policy for step in chain]
    for step in steps:
        step.aug_fn = noting(step.aug_fn.__name__)
    chains = [policy(Trace()) for _ in range(SAMPLES)]
    return found[:SAMPLES] if text.startswith("augmix") else chains


def noting(name: str):
    number = NUMBERS[name]

    def note(trace: Trace, *arguments, resample, **_) -> Trace:
        argument = float(arguments[0]) if arguments else 0.0
        if name == "desaturate":  # timm's level becomes a factor of `color`
            argument = 1.0 - argument
        elif name == "gaussian_blur_rand":
            argument = random.uniform(0.1, 2.0 * argument)
        cubic = number >= op.ROTATE and random.choice(resample) == Image.Resampling.BICUBIC
        return Trace((*trace, (number, argument, cubic)))

    return note


def differ(pairs: list[tuple[int, int]]) -> float:
    """The p-value of two samples' counts in the same bins (chi-squared); bins of too few go into one."""
    counts = np.array(pairs, np.float64).reshape(-1, 2)
    rare = counts.sum(1) < 20
    counts = np.concatenate([counts[~rare], counts[rare].sum(0, keepdims=True)])
    counts = counts[counts.sum(1) > 0]
    if len(counts) < 2:
        return 1.0
    ratio = np.sqrt(counts[:, 1].sum() / counts[:, 0].sum())
    squared = ((counts[:, 0] * ratio - counts[:, 1] / ratio) ** 2 / counts.sum(1)).sum()
    return stats.chi2.sf(squared, len(counts) - 1)


ASPECTS = {
    "which operations meet": lambda chain: [tuple((number, argument < 0) for number, argument, _ in chain)],
    # Few bins, so that the smallest bias shows.
    "which signs": lambda chain: [
        argument < (0 if number >= op.ROTATE else 1) for number, argument, _ in chain if number >= op.BRIGHTNESS
    ],
    "which interpolations": lambda chain: [cubic for number, _, cubic in chain if number >= op.ROTATE],
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "text",
    [
        "rand-m9-mstd0.5-inc1",
        "rand-m8-n3-p0.3-mstd101",
        "rand-m15-n1-mmax20-mstd2-p1-inc1",
        "rand-tweights-mstd1",
        "rand-m7-n3-w0-p0.7-inc1",
        "rand-t3a-n1-p0.8",
        "original",
        "originalr-mstd0.5",
        "v0",
        "v0r-mstd1",
        "3a-mstd2",
        "augmix",
        "augmix-m5-d2-mstd1",
    ],
)
def test_samples_are_as_frequent_as_timms(text, system):
    mine, theirs = ours(text), timms(text, system)
    assert len(mine) == len(theirs) == SAMPLES

    for aspect, kinds in ASPECTS.items():
        a, b = (Counter(kind for chain in chains for kind in kinds(chain)) for chains in (mine, theirs))
        assert differ([(a[kind], b[kind]) for kind in a | b]) > 1e-3, aspect

    bins: list[tuple[int, int]] = []
    a, b = (np.array([step for chain in chains for step in chain]) for chains in (mine, theirs))
    for kind in {tuple(row) for row in np.unique(np.concatenate([a, b])[:, [0, 2]], axis=0)}:
        mine_of_kind, theirs_of_kind = (samples[(samples[:, [0, 2]] == kind).all(1), 1] for samples in (a, b))
        edges = np.append(
            np.unique(np.quantile(np.concatenate([mine_of_kind, theirs_of_kind]), np.linspace(0, 1, 9)[:-1])), np.inf
        )
        bins += zip(np.histogram(mine_of_kind, edges)[0], np.histogram(theirs_of_kind, edges)[0], strict=True)
    assert len(bins) >= 3
    assert differ(bins) > 1e-3


@pytest.mark.parametrize("sample", [0.4, 0.6])
def test_arguments_of_every_operation_and_magnitude_are_timms(sample, system):
    """Also of magnitudes above 10, which `mmax` allows. Signs and the blur's radius follow from a sample."""
    system({"random.random": lambda: 1 - sample})  # timm negates by the upper half
    stream = stream_with(sample, 4)  # the counter of signs; that of the blur's radius is 6
    names = [name for operation in op.OPERATIONS for name in operation.magnitude_maps]
    for name, magnitude in itertools.product(names, (0, 0.9, 3.7, 10, 12.5, 30)):
        to_argument = auto_augment.LEVEL_TO_ARG[name]
        expected = to_argument(magnitude, {})[0] if to_argument else 0.0
        if name == "Desaturate":
            expected = 1.0 - expected
        elif name == "GaussianBlurRand":
            expected = 0.1 + (2.0 * expected - 0.1) * uniform(stream, 6)
        [row] = compiled_steps(name).table
        found = sample_argument(row, magnitude / 10, np.uint64(stream), 0)
        assert found == pytest.approx(expected), (name, magnitude)


def test_which_operations_meet_is_as_timms_without_replacement():
    """Ordered pairs of a weighted sample, against the formula: p_i p_j / (1 - p_i)."""
    policy = parse_policy("rand-t3aw-p1-n2")
    program = compile_policy(policy, MEAN)
    program.table[:, 0] = np.arange(len(policy.steps))  # tell steps apart by their place
    chains = [sampled(program, key(5, 1, sample, AUGMENT), 2)[:, 0].astype(int) for sample in range(SAMPLES)]
    pairs = Counter(map(tuple, chains))
    p = np.array(policy.weights) / sum(policy.weights)
    expected = p[:, None] * p[None, :] / (1 - p[:, None])
    np.fill_diagonal(expected, 0)
    assert expected.sum() == pytest.approx(1)
    seen = np.array([[pairs[i, j] for j in range(len(p))] for i in range(len(p))])
    assert seen.trace() == 0
    kept = expected > 0
    assert stats.chisquare(seen[kept], SAMPLES * expected[kept]).pvalue > 1e-3


def test_the_largest_number_of_a_stream_samples_nothing_without_weight():
    """0.1 + 0.2 + 0.3 is above 0.6, and what is left of it after all three is not below 0."""
    names = ("Rotate", "Invert", "Equalize", "Solarize")
    policy = RandAugment(tuple(Step(name, 1.0, 9) for name in names), 1, (0.1, 0.2, 0.3, 0.0))
    [[number, *_]] = sampled(compile_policy(policy, MEAN), stream_with(1 - 2**-53, 0))
    assert number == op.EQUALIZE
