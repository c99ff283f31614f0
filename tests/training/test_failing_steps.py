"""What failed steps and loss spikes lead to."""

import json
import math

import pytest
import torch

from tests.run.saved import ALONE, position, state
from widemix.distributed.topology import Topology
from widemix.recipe.sections import FaultsSection
from widemix.run import checkpoint
from widemix.run.records import describe_event
from widemix.training.faults import Diverged, GradientWatch, HealthMonitor, Rollback, StepMetrics

NAN, INF = math.nan, math.inf


def steps_of(*losses, norms=None, first=1) -> list[StepMetrics]:
    """Steps in a row, whose data steps are nine greater."""
    norms = norms or [1.0] * len(losses)
    return [
        StepMetrics(first + i, first + 9 + i, loss, norm)
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]


def health(fp16=False, **section) -> HealthMonitor:
    return HealthMonitor(FaultsSection(**section), fp16)


def test_an_event_that_no_run_has_is_none():
    with pytest.raises(ValueError, match=r"no such event: .*lunch"):
        describe_event({"event": "lunch", "step": 3})


@pytest.mark.parametrize(
    ("event", "keys", "said"),
    [
        ("step_skipped", {"loss": "nan", "grad_norm": 2}, "step 3 was skipped: its loss is nan, its gradient norm 2"),
        ("loss_spike", {"loss": 9, "expected": 2}, "the loss of step 3 is 9, far above the mean of 2 before it"),
        ("save_failed", {"reason": "it is full"}, "no checkpoint was saved at step 3: it is full"),
        ("evaluation_failed", {"loss": "nan", "top1": "inf"}, "the evaluation at step 3 failed: loss nan, top1 inf"),
        ("rollback", {"from": 9, "skipped_ranges": [5, 8], "reason": "the loss is nan"},
         "rolled back from step 9 to step 3, skipping data steps 5 to 7: the loss is nan"),
        ("stopped", {}, "the run was asked to stop, and ended after step 3"),
        ("diverged", {"reason": "the loss is nan"}, "the run diverged at step 3: the loss is nan"),
    ],
)  # fmt: skip
def test_an_event_is_said_with_its_figures(event, keys, said):
    assert describe_event({"step": 3, "split": "event", "event": event, **keys}) == said


CALM = [1.0 + 0.1 * (-1) ** i for i in range(100)]  # mean 1, deviation 0.1
TWO, SPIKES = {"max_skipped_steps": 2}, {"loss_spike_std": 6}
SEARCH = [INF] * 20  # overflows, in which fp16 looks for its loss scale


@pytest.mark.parametrize(
    ("keys", "fp16", "losses", "norms", "skipped", "spikes"),
    [
        (TWO, False, [1, NAN, 1, NAN, INF, 1], None, [2, 4, 5], {}),
        ({}, False, [1, 1], [INF, 1], [1], {}),
        ({}, True, [1, 1], [INF, 1], [], {}),
        (TWO, True, [1] * 43, [*SEARCH, 1.0, *SEARCH, INF, INF], [42, 43], {}),
        ({}, True, [*[1] * 10, NAN, *[1] * 10], [INF] * 21, [11, 21], {}),  # an overflow too
        (SPIKES, False, [*CALM[:30], 1.55, 2.2, 1.0], None, [], {32: (30 + 1.55) / 31}),
        ({"loss_spike_std": None}, False, [*CALM[:30], 100.0], None, [], {}),
        (SPIKES, False, [*CALM[:30], 0.1], None, [], {}),  # a fall
        (SPIKES, False, [*CALM[:30], *[5.0] * 50], None, [], {31: 1.0}),  # from then on it is what is expected
        (SPIKES, False, [*CALM[:19], 100.0], None, [], {}),
        (SPIKES, False, [*CALM[:20], 1.61], None, [], {21: 1.0}),
        (SPIKES, False, [*CALM[:20], 1.59], None, [], {}),
        (SPIKES, False, [*[7.0] * 30, *CALM, 3.0], None, [], {131: 1.0}),  # of the last hundred
    ],
)
def test_failed_steps_and_spikes_are_events(keys, fp16, losses, norms, skipped, spikes):
    """However the checks are divided."""
    steps = steps_of(*losses, norms=norms)
    for size in (1, 7, len(steps)):
        monitor, events = health(fp16, **keys), []
        for first in range(0, len(steps), size):
            part = steps[first : first + size]
            events += monitor.check_steps(part)
            assert monitor.failing == (part[-1].step in skipped)  # no checkpoint is saved then
        assert [event["step"] for event in events if event["event"] == "step_skipped"] == skipped
        told = {event["step"]: event["expected"] for event in events if event["event"] == "loss_spike"}
        assert told == pytest.approx(spikes)
        json.dumps(events, allow_nan=False)
        by_step = {step.step: (str(step.loss), str(step.grad_norm)) for step in steps}
        found = {event["step"]: (str(event["loss"]), str(event.get("grad_norm", "1.0"))) for event in events}
        assert found.items() <= by_step.items()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("keys", "fp16", "losses", "norms", "said", "first", "least"),
    [
        (TWO, False, [1, NAN, NAN, NAN, NAN], None, "the loss is nan at step 2", 11, 14),
        (TWO, False, [1, NAN, NAN, NAN, 1], None, "the loss is nan at step 2", 11, 14),  # a good one mends nothing
        ({"max_skipped_steps": 0}, False, [1, 1], [INF, 1], "the gradient norm is inf at step 1", 10, 11),
        ({"max_skipped_steps": 1}, False, [1, NAN], [INF, 1], "the gradient norm is inf at step 1", 10, 12),
        (TWO, True, [1] * 44, [*SEARCH, 1.0, *SEARCH, INF, INF, INF], "norm is inf at step 42", 51, 54),
    ],
)
def test_too_many_failed_steps_name_their_data(keys, fp16, losses, norms, said, first, least, size):
    monitor, steps = health(fp16, **keys), steps_of(*losses, norms=norms)

    def check():
        for at in range(0, len(steps), size):
            monitor.check_steps(steps[at : at + size])

    with pytest.raises(Diverged, match=said) as raised:
        check()
    assert raised.value.first == first
    # Those of the same call fail with them.
    failing = [step.data_step for step in steps if step.data_step >= first and not math.isfinite(step.loss)]
    assert least <= raised.value.stop <= max([least, *(step + 1 for step in failing)])
    assert size > 1 or raised.value.stop == least
    monitor.reset()
    assert not monitor.failing
    monitor.check_steps(steps_of(*[NAN] * keys["max_skipped_steps"], 1))


def test_data_that_is_skipped_between_failed_steps_is_theirs():
    apart = [StepMetrics(1, 7, 1.0, INF), StepMetrics(2, 12, NAN, 1.0)]
    with pytest.raises(Diverged, match="the gradient norm is inf at step 1") as raised:
        health(max_skipped_steps=1).check_steps(apart)
    assert (raised.value.first, raised.value.stop) == (7, 13)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("saved", "first", "origin", "left"),
    [
        ([4, 8], 13, 8, [4, 8]),
        ([4, 8], 11, 4, [4]),  # its very next steps failed: it may be part of the failure
        ([8], 11, 8, [8]),  # there is no other
        ([], 3, None, []),
    ],
)
def test_a_rollback_resumes_before_the_failure(tmp_path, saved, first, origin, left):
    """The data steps are three greater than the steps, as two rollbacks have left them."""
    for step in saved:
        saved_at = position(step, data_step=step + 3)
        checkpoint.save(tmp_path, state(1.0), saved_at, checkpoint.RetentionPolicy(9))
    rollback = Rollback(tmp_path, ALONE, 3, [(2, 4), (0, 1)])
    diverged = Diverged("the loss is nan", first, first + 2)
    if origin is None:
        with pytest.raises(Diverged, match="and there is no checkpoint before it") as raised:
            rollback.exclude(diverged)
        assert (raised.value.first, raised.value.stop) == (first, first + 2)
        return
    assert rollback.exclude(diverged).position.step == origin
    assert [int(path.name) for path in checkpoint.complete_checkpoints(tmp_path)] == left
    assert rollback.skipped_ranges == [(2, 4), (0, 1), (first, first + 2)]
    assert json.loads((tmp_path / "skipped_ranges.json").read_text()) == [[2, 4], [0, 1], [first, first + 2]]
    with pytest.raises(Diverged, match=r"faults\.max_rollbacks 3 allows no further rollback"):
        rollback.exclude(diverged)


def test_skipped_ranges_are_stepped_over(tmp_path):
    rollback = Rollback(tmp_path, ALONE, 5, [(10, 12), (6, 9), (4, 6)])
    assert [rollback.next_used(step) for step in range(14)] == [0, 1, 2, 3, 9, 9, 9, 9, 9, 9, 12, 12, 12, 13]
    assert [rollback.next_skipped(step) for step in (0, 4, 5, 9, 11)] == [4, 4, 6, 10, None]


def test_on_a_cpu_the_watch_tells_of_the_own_step():
    watch = GradientWatch(torch.device("cpu"))
    norms = (1.0, INF, 1e30, NAN, 0.0)
    assert [watch.failed(torch.tensor(norm)) for norm in norms] == [False, True, False, True, False]
    watch.reset()
    assert not watch.failed(torch.tensor(1.0))


def test_after_a_rollback_nothing_of_before_counts():
    monitor = health(fp16=True, loss_spike_std=6)
    monitor.check_steps(steps_of(*[1.0 + 0.1 * (-1) ** i for i in range(30)]))
    monitor.check_steps(steps_of(*[1.0] * 20, norms=[INF] * 20))
    monitor.reset()
    assert monitor.check_steps(steps_of(100.0, *[1.0] * 19, norms=[INF] * 20)) == []


def test_another_rank_skips_what_rank_0_has_written(tmp_path, system):
    def answer(shared, **_):
        shared[0] = "the checkpoint"

    system({"torch.distributed.broadcast_object_list": answer})
    rollback = Rollback(tmp_path, Topology(1, 2, 1, 2, torch.device("cpu")), 2, [])
    assert rollback.exclude(Diverged("the loss is nan", 3, 5)) == "the checkpoint"
    assert [rollback.next_used(step) for step in (2, 3, 4, 5)] == [2, 5, 5, 5]
    assert list(tmp_path.iterdir()) == []


def test_on_a_gpu_the_watch_tells_of_two_steps_before(system):
    events = []

    class Event:
        def __init__(self):
            self.calls = []
            events.append(self.calls)

        def record(self):
            self.calls.append("record")

        def synchronize(self):
            self.calls.append("synchronize")

    system({"torch.cuda.Event": Event})
    watch = GradientWatch(torch.device("cuda"))
    assert [watch.failed(torch.tensor(norm)) for norm in (INF, 1.0, 1.0, NAN)] == [False, False, True, False]
    assert events == [["record", "synchronize"]] * 2 + [["record"]] * 2
    watch.reset()
    assert [watch.failed(torch.tensor(norm)) for norm in (1.0, 1.0, 1.0)] == [False] * 3
