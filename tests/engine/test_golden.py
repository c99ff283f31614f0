"""Golden losses: the digits recipes on every engine and one or two ranks, against one plain PyTorch loop.

Measured over 20 steps (relative, the most of any step): float32 2.3e-7, bf16 5.1e-4 from the plain loop in float32.
"""

import functools
import math

import pytest
import torch

from tests.engine.ranks import (
    GOLDEN,
    GOLDEN_STEPS,
    REDUCED,
    STATEFUL,
    Setting,
    changed_by_forward_passes,
    golden,
    sampled_and_normed,
)

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
pytestmark = pytest.mark.filterwarnings("ignore")  # DeepSpeed's own imports warn


@pytest.fixture(scope="module")
def one_rank(alone, digits):
    return golden(digits)


@pytest.fixture(scope="module")
def expected(alone, digits):
    @functools.cache
    def curve(recipe: str) -> list[float]:
        return Setting(recipe, digits).plain(steps=GOLDEN_STEPS)[0]

    return curve


@pytest.mark.parametrize("case", GOLDEN, ids="-".join)
@pytest.mark.parametrize("world", [1, 2])
def test_any_ranks_have_the_losses_of_the_plain_loop(one_rank, ranks, expected, case, world):
    recipe, _, precision = case
    found = one_rank if world == 1 else ranks(2, "golden")
    assert found[case] == pytest.approx(expected(recipe), rel=TOLERANCE[precision])


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_fp16_skips_a_step_too_large_on_one_rank(ranks, engine):
    found = ranks(2, "overflowing")[engine]
    scales = [scalars["loss_scale"] for scalars, _ in found["states"]]
    assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert [scalars["loss_scale_steps"] for scalars, _ in found["states"]] == [1, 2, 0, 1]
    before, bad, after = (weights for _, weights in found["states"][1:])
    assert all(torch.equal(bad[name], before[name]) for name in before)
    assert not torch.equal(after["head.weight"], bad["head.weight"])
    assert math.isfinite(found["losses"][3])


@pytest.fixture(scope="module")
def sampled_on_one(alone, digits):
    return sampled_and_normed(digits)


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed 1", "deepspeed 3", "ddp whole"])
def test_two_ranks_sample_and_normalise_what_one_does(ranks, sampled_on_one, engine):
    """Stochastic depth belongs to the samples, and batch norms take the micro-batch of all ranks."""
    one, two = sampled_on_one[engine if engine == "ddp whole" else "ddp"], ranks(2, "sampled_and_normed")[engine]
    assert two["losses"] == pytest.approx(one["losses"], rel=2e-5)
    assert two["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], rel=2e-5)
    # Five steps from the start an image's classes are near a tie: one in 360 may change sides.
    assert two["metrics"] == pytest.approx(one["metrics"], abs=100 / 360 + 1e-3)
    assert sampled_on_one[engine]["losses"] == pytest.approx(one["losses"], rel=2e-5)
    assert sampled_on_one["ddp whole"]["losses"] != pytest.approx(sampled_on_one["ddp"]["losses"], rel=5e-5)


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed 1", "deepspeed 3"])
def test_the_norm_of_the_weights_is_that_of_those_saved(ranks, sampled_on_one, engine):
    for found in (sampled_on_one[engine], ranks(2, "sampled_and_normed")[engine]):
        weights = [v for name, v in found["model"].items() if not name.endswith(BUFFERS)]
        assert found["norm"] == pytest.approx(math.sqrt(sum(w.double().square().sum().item() for w in weights)))


def test_running_statistics_of_each_rank_are_averaged(ranks):
    found = ranks(2, "changed_by_forward_passes")["batch norm"]
    for name in found["before"][0]:
        before, after = ([rank[name] for rank in found[when]] for when in ("before", "after"))
        if not before[0].is_floating_point():
            continue
        assert not torch.equal(before[0], before[1])
        saved = [] if name.startswith("ema ") else [found["saved"][name]]
        for of_rank in (*after, *saved):
            torch.testing.assert_close(of_rank, (before[0] + before[1]) / 2)


@pytest.mark.parametrize("layer", STATEFUL)
def test_what_a_forward_pass_changes_is_one_ranks_on_all(ranks, changed_on_one, layer):
    """EvoNorm's statistics are of each rank's samples, so that only its ranks agree."""
    (one,), two = changed_on_one[layer]["after"], ranks(2, "changed_by_forward_passes")[layer]["after"]
    for name, value in two[1].items():
        assert torch.equal(two[0][name], value)
    assert any(value.any() for value in one.values())
    for name, value in one.items():
        if layer != "evo norm":
            torch.testing.assert_close(two[0][name], value, rtol=1e-3, atol=1e-4)


def test_counts_that_differ_between_ranks_are_refused(ranks, changed_on_one):
    assert "layer.uses is another number on each rank" in ranks(2, "changed_by_forward_passes")["count"]
    assert "count" not in changed_on_one


@pytest.fixture(scope="module")
def changed_on_one(alone, digits):
    return changed_by_forward_passes(digits)


@pytest.mark.parametrize(("accumulated", "dtype"), [(1, "fp32"), (4, "fp32"), (1, "bf16")])
@pytest.mark.parametrize("engine", REDUCED)
def test_bf16_gradients_are_summed_in_the_recipes_precision(ranks, engine, accumulated, dtype):
    """Over ranks and micro-batches: numbers that bf16 would lose."""
    expected = 1.0 if dtype == "bf16" else 1 + (2 * accumulated - 1) * 2**-8
    assert ranks(2, "summed")[engine, accumulated, dtype] == expected
