"""Policy strings have timm's meaning, and the error of a wrong one names its wrong part."""

import itertools
import math

import numpy as np
import pytest
from timm.data import auto_augment
from torchvision.transforms.autoaugment import AutoAugment as TorchvisionAutoAugment
from torchvision.transforms.autoaugment import AutoAugmentPolicy

from widemix.recipe import policy
from widemix.recipe.policy import AugMix, AutoAugment, Policy, RandAugment, Step, add_to_sets, parse_policy

RAND = [
    f"rand-{m}-{n}-{rest}-{inc}"
    for m, n, rest, inc in itertools.product(("m9", "m14"), ("n3", "mstd0.5"), ("mmax12", "p0.3"), ("inc1", "inc0"))
]
TEXTS = [
    *(
        "rand",
        "rand-m9-mstd0.5-inc1",
        "rand-mstd101",
        "rand-mstd100",
        "rand-m15-mmax20-mstd1.5-p1-n1-inc1",
        "rand-tweights-m5",
    ),
    *("rand-t3a-inc1", "rand-m7-t3aw-n3", *RAND),
    *("v0", "v0r", "original", "originalr", "3a", "original-mstd0.5", "3a-mstd2"),
    *("augmix", "augmix-m5-w4-d2", "augmix-mstd1-a0.5-b1", "augmix-d0"),
]


def timms(text: str):
    hparams = {"translate_const": 100, "img_mean": (1, 2, 3)}
    if text.startswith("rand"):
        return auto_augment.rand_augment_transform(text, hparams)
    if text.startswith("augmix"):
        return auto_augment.augment_and_mix_transform(text, hparams)
    return auto_augment.auto_augment_transform(text, hparams)


def steps_of(operations) -> tuple[Step, ...]:
    return tuple(Step(op.name, op.prob, op.magnitude, op.magnitude_std, op.magnitude_max or 10) for op in operations)


def expected(text: str) -> Policy:
    theirs = timms(text)
    if isinstance(theirs, auto_augment.RandAugment):
        weights = None if theirs.choice_weights is None else tuple(theirs.choice_weights)
        return RandAugment(steps_of(theirs.ops), theirs.num_layers, weights)
    if isinstance(theirs, auto_augment.AutoAugment):
        return AutoAugment(tuple(steps_of(chain) for chain in theirs.policy))
    return AugMix(steps_of(theirs.ops), theirs.width, max(theirs.depth, 0), theirs.alpha, theirs.blended)


@pytest.mark.parametrize("text", TEXTS)
def test_a_policy_is_timms(text):
    ours, theirs = parse_policy(text), expected(text)
    if isinstance(ours, RandAugment) and ours.weights:
        assert ours.steps == theirs.steps
        assert ours.layers == theirs.layers
        assert [weight / sum(ours.weights) for weight in ours.weights] == pytest.approx(theirs.weights)
    else:
        assert ours == theirs


def test_the_policy_of_cifar10_is_torchvisions():
    """Sub-policies in torchvision's order, with its probabilities and, of operations that have any, magnitudes."""
    policy = parse_policy("cifar10")
    theirs = TorchvisionAutoAugment(AutoAugmentPolicy.CIFAR10).policies
    assert len(policy.policies) == len(theirs) == 25
    for ours, expected in zip(policy.policies, theirs, strict=True):
        for step, (name, prob, magnitude) in zip(ours, expected, strict=True):
            assert step.name.removesuffix("Rel").removesuffix("Increasing") == name
            assert (step.prob, step.magnitude) == (prob, magnitude or 0)


@pytest.mark.parametrize("inc", ["", "-inc1"])
def test_the_weights_of_earlier_timm_are_known(inc):
    """`w0` is refused by today's timm. Up to 0.8 it meant these fractions, by place in either list of operations."""
    policy, plain = parse_policy(f"rand-m9-n3-mstd0.5-w0{inc}"), parse_policy(f"rand-m9-n3-mstd0.5{inc}")
    moves = {"Rotate": 0.3, "ShearX": 0.2, "ShearY": 0.2, "TranslateXRel": 0.1, "TranslateYRel": 0.1}
    fractions = moves | dict.fromkeys(("Color", "Sharpness", "AutoContrast"), 0.025)
    fractions |= dict.fromkeys(("Solarize", "SolarizeAdd", "Contrast", "Brightness", "Equalize"), 0.005)
    expected = {step: fractions.get(step.name.removesuffix("Increasing"), 0) for step in plain.steps}
    sampled = dict(zip(policy.steps, np.array(policy.weights) / sum(policy.weights), strict=True))
    assert policy.layers == 3
    assert sampled == pytest.approx({step: fraction for step, fraction in expected.items() if fraction})


def test_uniform_magnitudes_have_an_infinite_deviation():
    assert parse_policy("rand-mstd101").steps[0].std == math.inf
    assert parse_policy("augmix").steps[0].std == math.inf


def test_numbers_are_taken_up_to_the_ends_of_their_ranges():
    for text in ("m0-n1-p0-mmax1-mstd0", "m30-n100-p1-mmax1000-mstd1000", "n13-w0", "n14-t3aw"):
        assert parse_policy(f"rand-{text}")
    low, high = parse_policy("rand-m0-n1-p0-mmax1-mstd0"), parse_policy("rand-m30-n100-p1-mmax1000-mstd100")
    assert (low.layers, low.steps[0]) == (1, Step("AutoContrast", 0, 0, 0, 1))
    assert (high.layers, high.steps[0]) == (100, Step("AutoContrast", 1, 30, 100, 1000))
    for text in ("augmix-m0-w1-d0-a0.05-b0-mstd0", "augmix-m30-w16-d16-a1000-b1-mstd1000"):
        mix = parse_policy(text)
        numbers = [mix.steps[0].magnitude, mix.width, mix.depth, mix.alpha, int(mix.blended), mix.steps[0].std]
        options = zip(("m", "w", "d", "a", "b", "mstd"), numbers, strict=True)
        assert "-".join(["augmix", *(f"{name}{number:g}" for name, number in options)]) == text


def test_a_set_of_ones_own_has_a_name(monkeypatch):
    monkeypatch.setattr(policy, "OWN_SETS", {"old": ("Rotate",)})
    for names in (["new", ""], ["new", "a-b"], ["new", "3a"]):
        with pytest.raises(ValueError, match="operation set"):
            add_to_sets("Invert", names)
    assert policy.OWN_SETS == {"old": ("Rotate",)}
    add_to_sets("Invert", ["new", "old"])
    assert [step.name for step in parse_policy("rand-told").steps] == ["Rotate", "Invert"]
    assert [step.name for step in parse_policy("rand-m5-tnew").steps] == ["Invert"]
