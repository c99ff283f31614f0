"""What steps that fail, or stand out, lead to."""

import json
import math

import pytest

from pipeline.recipe.faults import FaultsSection
from pipeline.training.faults import Diverged, HealthMonitor, Look

NAN, INF = math.nan, math.inf


def looks(*losses, norms=None, first=1) -> list[Look]:
    """Steps in a row, whose data comes ten places later in the order."""
    norms = norms or [1.0] * len(losses)
    return [
        Look(first + i, first + 9 + i, loss, norm) for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]


def health(fp16=False, **section) -> HealthMonitor:
    return HealthMonitor(FaultsSection(**section), fp16)


def test_failed_steps_are_told_and_allowed_so_many_in_a_row():
    events = health(max_skipped_steps=2).look(looks(1, NAN, 1, NAN, INF, 1))
    assert [(event["event"], event["step"], event["loss"]) for event in events] == [
        ("skipped", 2, "nan"),
        ("skipped", 4, "nan"),
        ("skipped", 5, "inf"),
    ]
    assert "NaN" not in json.dumps(events)


@pytest.mark.parametrize("cut", range(1, 6))
def test_one_more_names_the_data_wherever_the_looks_are_cut(cut):
    watched, steps = health(max_skipped_steps=2), looks(1, NAN, NAN, NAN, NAN)

    def look():
        watched.look(steps[:cut])
        watched.look(steps[cut:])

    with pytest.raises(Diverged, match="the loss is nan at step 2") as raised:
        look()
    assert raised.value.first == 11
    assert raised.value.stop == (14 if cut == 4 else 15)
    watched.forget()
    assert not watched.failing
    watched.look(looks(NAN, NAN, 1))


def test_nothing_is_to_be_saved_in_the_midst_of_failed_steps():
    watched = health(max_skipped_steps=2)
    watched.look(looks(1, NAN))
    assert watched.failing
    watched.check()
    with pytest.raises(Diverged):
        watched.check(allowed=0)  # nor a run to end there
    watched.look(looks(1, first=3))
    assert not watched.failing


def test_a_gradient_fails_a_step_but_not_where_half_precision_looks_for_its_scale():
    steps = looks(1, 1, norms=[INF, 1])
    assert [event["grad_norm"] for event in health().look(steps)] == ["inf"]
    assert health(fp16=True).look(steps) == []
    with pytest.raises(Diverged, match="the gradient norm is inf at step 1"):
        health(max_skipped_steps=0).look(steps)


def test_half_precision_that_finds_no_scale_fails():
    watched = health(fp16=True, max_skipped_steps=2)
    assert watched.look(looks(*[1] * 41, norms=[*[INF] * 20, 1.0, *[INF] * 20])) == []
    events = watched.look(looks(1, 1, norms=[INF, INF], first=42))
    assert [event["step"] for event in events] == [42, 43]
    with pytest.raises(Diverged, match="the gradient norm is inf at step 42"):
        watched.look(looks(1, norms=[INF], first=44))


def test_a_spike_is_flagged_once_there_is_something_to_hold_it_against():
    calm = [1.0 + 0.1 * (-1) ** i for i in range(30)]  # mean 1, deviation 0.1
    (event,) = health(loss_spike_std=6).look(looks(5.0, *calm, 1.55, 2.2, 1.0)[1:])
    assert (event["event"], event["step"], event["loss"]) == ("spike", 33, 2.2)
    assert event["expected"] == pytest.approx((30 + 1.55) / 31)
    assert health(loss_spike_std=None).look(looks(*calm, 100.0)) == []
    assert health().look(looks(*calm[:10], 100.0)) == []
