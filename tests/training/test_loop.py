"""When the loop logs, evaluates and saves, and the seconds in what it writes, by a clock that the test moves."""

import json
import math
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from tests.conftest import ROOT
from tests.run.saved import ALONE, state
from widemix.data.batches import Batch
from widemix.data.grid import training_grid
from widemix.data.random import DROPOUT, key
from widemix.distributed.requests import Request
from widemix.engine import StepResult
from widemix.formats.manifest import Prepared
from widemix.recipe import load_recipe
from widemix.run import checkpoint
from widemix.run.checkpoint import Checkpoint, Position, RetentionPolicy, UnloggedSteps
from widemix.run.resume import ResumeState
from widemix.run.run_dir import Run
from widemix.training.faults import Diverged, GradientWatch, Rollback
from widemix.training.loop import Loop
from widemix.training.schedule import LogInterval, Schedule

STEP_S, WAIT_S, EVALUATION_S, SAVE_S = 1.0, 0.25, 100.0, 10.0
BATCH, EPOCH, LAST, EVERY = 64, 4, 12, 2  # samples of a step, and steps
WORLD = 3  # ranks, all of which have the same
EVALUATE, SAVE, STOP = Request.EVALUATE, Request.SAVE, Request.STOP
RARELY, NO_SKIPS, ONE_SKIP = {"log.every": 100}, {"faults.max_skipped_steps": 0}, {"faults.max_skipped_steps": 1}
MINUTES = {"eval.every_minutes": 5, "train.save_minutes": 5}


class Watched:
    """A loop of three epochs of four steps whose parts take the seconds above; the loss of a step is its number.

    failing: data steps whose losses are not finite, which their gradients do not show; norms: others of gradients, by
    the step; asked: requests by the number of their poll, from 1; ranges: data steps that are skipped.
    """

    def __init__(
        self, system, tmp_path, keys=(), position=None, asked=(), rank=0, ranges=(), rollbacks=0, failing=(),
        norms=(), block_norms=(), parts=1, draws=False, metrics=None, context=None, recipe="digits/mixer",
        epoch=EPOCH, **known,
    ):  # fmt: skip
        self.now, self.lines, self.saved, self.evaluated, self.seeds = 0.0, [], [], [], []
        self.averaged, self.loaded, self.beats, self.rewound = [], [], [], []  # each by the step at which it was
        self.asked, self.polls = dict(asked), 0
        self.notes, self.stepped = [], 0
        self.calls = []  # of what a run ends with, and of its log
        self.failing, self.norms, self.block_norms = failing, dict(norms), dict(block_norms)
        self.parts, self.draws, self.metrics = parts, draws, metrics or {}
        clock = lambda: self.now  # noqa: E731
        system({"time.perf_counter": clock, "time.monotonic": clock})
        ranks = {"get_rank": lambda: rank, "get_world_size": lambda: WORLD}
        ranks |= {"all_reduce": lambda tensor: tensor.mul_(WORLD), "broadcast_object_list": lambda *_, **__: None}
        system({f"torch.distributed.{name}": answer for name, answer in ranks.items()})
        fixed = {"train.epochs": 3, "train.global_batch": BATCH, "log.every": EVERY, "eval.every_epochs": 1}
        overrides = [(name, str(value)) for name, value in (fixed | dict(keys)).items()]
        self.recipe = load_recipe(ROOT / f"recipes/{recipe}.yaml", overrides)
        engine = SimpleNamespace(
            device=torch.device("cpu"),
            step=self._step,
            blocks=lambda: ["stem", "head"],
            weight_norm=lambda: 3.0,
            average_buffers=lambda: self.averaged.append((self.loop.step, len(self.evaluated), len(self.saved))),
            load=lambda weights: self.loaded.append(weights.model["fc.bias"].tolist()[0]),
            scalars=lambda: {"loss_scale": 2.0},
            local_shards=list,
        )
        log = {kind: partial(self._log, kind) for kind in ("write", "report_event", "record")}
        saver = {"failure": lambda: None, "finish": lambda: None}
        parts = {
            "log": SimpleNamespace(**log, note=self.notes.append, rewind=self.rewound.append, writer=None),
            "saver": SimpleNamespace(
                **saver, begin=self._save, finish_all_ranks=lambda: self.calls.append("the last save")
            ),
            "rollback": Rollback(tmp_path, ALONE, len(ranges) + rollbacks, ranges),
            "watchdog": SimpleNamespace(beat=lambda: self.beats.append(self.loop.step)),
            "requests": SimpleNamespace(poll=self._poll, finish=lambda: self.calls.append("the last requests")),
            "peak_fraction": 0.001,
        }
        resume = ResumeState(tmp_path, position and Checkpoint(tmp_path, position), **known)
        self.epoch = epoch
        schedule = Schedule(epoch, LAST, lambda step: 0.5**step)
        parts |= context or {}
        stop = parts.pop("stop", SimpleNamespace(requested=False))
        begun = Run(self.recipe, ALONE, resume, HashStore(), stop)
        self.loop = Loop(begun, engine, schedule, self._evaluate, **parts)
        self.result = self.loop.fit(SimpleNamespace(batches=self._batches))
        self.trained = [line for line in self.lines if line["split"] == "train"]

    def _step(self, batches, lr):
        assert lr == 0.5**self.loop.step
        assert len(batches) == self.parts
        self.seeds.append(torch.initial_seed())
        self.now += STEP_S
        self.stepped += 1
        if self.draws:
            torch.rand(1)
        step, fails = self.loop.step, self.loop.data_step in self.failing
        blocks = torch.tensor(self.block_norms.get(step, [1.0, 2.0])) if self.loop.engine.wants_block_norms else None
        norm = torch.tensor(self.norms.get(step, 2.0 * step))
        return StepResult(torch.tensor(math.nan if fails else step + 1.0), norm, blocks)

    @contextmanager
    def _batches(self, epoch, first):
        def each():
            for step in range(self.epoch * epoch + first, self.epoch * (epoch + 1)):
                assert step == self.loop.data_step
                self.now += WAIT_S
                for part in range(self.parts):
                    images = torch.full((8, 3, 8, 8), step + part / 10)
                    yield Batch(images, torch.eye(10)[:8], np.arange(8), replaced=(1 + part) * (step == 5))

        yield each()

    def _log(self, kind, line):
        self.calls.append(kind)
        self.lines.append(line)

    def _evaluate(self):
        self.now += EVALUATION_S
        self.evaluated.append(self.loop.step)
        return {"top1": float(self.loop.step), "loss": 1.0} | self.metrics

    def _save(self, shards, position):
        self.now += SAVE_S
        self.saved.append(position)

    def _poll(self, own):
        self.polls += 1
        return own | self.asked.get(self.polls, Request.NONE)

    def events(self, kind: str) -> list[dict]:
        return [line for line in self.lines if line.get("event") == kind]


@pytest.fixture
def run(system, tmp_path):
    return lambda keys=(), **others: Watched(system, tmp_path, keys, **others)


def place(step: int, ahead: int = 0, **others) -> Position:
    fixed = {"scalars": {}, "metrics": {}, "recipe": {}}
    return Position(step=step, data_step=step + ahead, seconds=1000.0, **fixed, **others)


def ended(match: str, run, keys, **options) -> Diverged:
    with pytest.raises(Diverged, match=match) as raised:
        run(keys, **options)
    return raised.value


@pytest.mark.parametrize(
    ("keys", "options", "evaluated", "saved"),
    [
        ({}, {}, [4, 8, 12], [4, 8, 12]),
        ({"eval.every_epochs": 2}, {}, [8, 12], [4, 8, 12]),
        ({"train.save_every_steps": 3}, {}, [4, 8, 12], [3, 6, 9, 12]),
        ({"train.save_every_steps": 5, "train.save_minutes": 5}, {"asked": {6: SAVE}}, [4, 8, 12], [5, 6, 10, 12]),
        ({"eval.every_epochs": 2, "eval.every_minutes": 5}, {"asked": {2: EVALUATE}}, [8, 12], [4, 8, 12]),
        ({"eval.every_epochs": 2, "eval.every_minutes": 5}, {"asked": {2: SAVE}}, [12], [4, 8, 12]),
        ({"train.save_every_steps": 5, "train.keep_best": "top1"}, {}, [4, 8, 12], [4, 5, 8, 10, 12]),
        ({}, {"position": place(LAST)}, [12], []),  # it was killed before its result
        ({}, {"position": place(4, evaluation_due=True)}, [4, 8, 12], [4, 8, 12]),
        # The clock asks once: for an evaluation at the end of an epoch, not at that of the next.
        (MINUTES, {"asked": {2: EVALUATE}}, [4, 12], [12]),
        (MINUTES, {"asked": {6: SAVE}}, [12], [6, 12]),
        ({"eval.every_minutes": 0.05}, {}, [4, 8, 12], [4, 8, 12]),  # which count from each evaluation
        ({"eval.every_minutes": 1}, {}, [12], [4, 8, 12]),
        ({"eval.every_minutes": 0.05}, {"position": place(4, evaluation_due=True)}, [4, 8, 12], [4, 8, 12]),
        ({}, {"asked": {3: STOP}}, [], [3]),
        ({}, {"asked": {4: STOP}}, [], [4]),
        # Steps are counted without the data that are skipped; an epoch ends also where its last ones are.
        ({"eval.every_epochs": 2, "train.save_every_steps": 5}, {"position": place(3, 2)}, [6, 12], [5, 10, 12]),
        ({}, {"position": place(4), "ranges": [(4, 6)]}, [6, 10, 12], [6, 10, 12]),
        ({}, {"ranges": [(3, 6)]}, [3, 5, 9, 12], [3, 5, 9, 12]),
        # No step is saved unless its loss was finite, but the last.
        ({"train.save_every_steps": 3, **RARELY}, {"failing": (2, 4)}, [4, 8, 12], [6, 9, 12]),
        ({"train.save_every_steps": 3, **RARELY}, {"failing": (9, 10, 11)}, [4, 8, 12], [3, 6, 9, 12]),
        ({"train.save_minutes": 5, **RARELY}, {"failing": (4,), "asked": {5: SAVE}}, [4, 8, 12], [6, 12]),
        ({}, {"failing": (LAST - 1,), "asked": {LAST: STOP}}, [4, 8], [4, 8, 12]),
    ],
)
def test_a_run_evaluates_and_saves_at_its_steps(run, keys, options, evaluated, saved):
    whole = run(keys, **options)
    assert whole.evaluated == evaluated
    assert [position.step for position in whole.saved] == saved
    stopped = STOP in dict(options.get("asked", {})).values()
    assert (whole.result is None) == stopped
    ahead = sum(stop - first for first, stop in options.get("ranges", ())) or 2 * (saved == [5, 10, 12])
    assert whole.loop.data_step == whole.loop.step + ahead
    for position in whole.saved:
        done = position.step in evaluated
        assert position.metrics == ({"top1": float(position.step), "loss": 1.0} if done else {})
        assert position.evaluation_due is (stopped and position.step in (4, LAST) and not done)
    if stopped:
        assert whole.lines[-1] == {"step": whole.loop.step, "split": "event", "event": "stopped"}
        assert not whole.loop.health.failing
    else:
        last = {"top1": 12.0, "loss": 1.0, "step": 12}
        assert whole.result == last | {"seconds": whole.now + 1000.0 * ("position" in options)}


def test_a_line_has_means_and_speed_of_its_steps(run):
    """Without evaluations and saves; the epoch has four decimals."""
    whole = run({"log.block_norms": "true"})
    assert [line["step"] for line in whole.trained] == [2, 4, 6, 8, 10, 12]
    for line in whole.trained:
        last = line["step"]
        assert line["loss"] == (last - 1 + last) / 2
        assert line["grad_norm"] == 2 * (last - 2 + last - 1) / 2
        assert (line["lr"], line["epoch"]) == (0.5 ** (last - 1), last / EPOCH)
        assert line["images_per_s"] == pytest.approx(BATCH / (STEP_S + WAIT_S))
        assert line["mfu"] == pytest.approx(0.001 * line["images_per_s"])
        assert line["data_wait"] == pytest.approx(WAIT_S / (STEP_S + WAIT_S))
        assert line.get("replaced") == (WORLD if last == 6 else None)
        assert (line["grad_norm/stem"], line["grad_norm/head"], line["weight_norm"]) == (1, 2, 3)
    assert whole.now == 12 * (STEP_S + WAIT_S) + 3 * (EVALUATION_S + SAVE_S)
    assert [position.seconds for position in whole.saved] == [105.0, 220.0, 335.0]  # each before it is saved
    lines = [(line["step"], line["epoch"], line["top1"]) for line in whole.lines if line["split"] == "eval"]
    assert lines == [(4, 1.0, 4.0), (8, 2.0, 8.0), (12, 3.0, 12.0)]
    assert whole.beats == list(range(1, LAST + 1))
    assert [line["epoch"] for line in run(epoch=3).trained[:2]] == [0.6667, 1.3333]


def test_norms_that_are_not_finite_are_left_out(run):
    """As of a step that fp16 skips, the last one before a line: JSON has neither NaN nor Infinity."""
    lines = run({"log.block_norms": "true"}, block_norms={3: [math.inf, 2.0]}).trained
    assert [line.get("grad_norm/stem") for line in lines] == [1.0, None, 1.0, 1.0, 1.0, 1.0]
    assert all(line["grad_norm/head"] == 2.0 for line in lines)
    json.dumps(lines, allow_nan=False)


def test_an_evaluation_that_is_not_finite_is_an_event(run):
    written: list[tuple] = []
    failing = run(context={"mistakes": Noted(written, "mistakes")}, metrics={"top1": 0.0, "loss": math.nan})
    assert [step for *_, step in written] == [4, 8, 12]
    assert [line["split"] for line in failing.lines if line["step"] == 8] == ["train", "event"]
    event = {"step": 8, "split": "event", "event": "evaluation_failed", "loss": "nan"}
    assert event in failing.lines
    assert failing.saved[1].metrics == {"top1": 0.0}
    assert (failing.result["top1"], failing.result["loss"]) == (0.0, None)


@pytest.mark.parametrize("due", [False, True])
def test_a_resumed_run_has_the_speed_of_its_own_steps(run, due):
    """Step 3 was trained before, and is in the line of step 4; no line counts an evaluation at the start."""
    unlogged = UnloggedSteps(losses=[9.0], grad_norms=[8.0], replaced=3)
    resumed = run(position=place(4, evaluation_due=True) if due else place(3, unlogged=unlogged))
    first, second, *_ = resumed.trained
    if not due:
        assert (first["step"], first["loss"], first["grad_norm"]) == (4, (9 + 4) / 2, (8 + 6) / 2)
        assert first["replaced"] == 3
        assert resumed.saved[0].seconds == 1000 + STEP_S + WAIT_S + EVALUATION_S
    for line in (first, second):
        assert line["images_per_s"] == pytest.approx(BATCH / (STEP_S + WAIT_S))
        assert line["data_wait"] == pytest.approx(WAIT_S / (STEP_S + WAIT_S))


def test_a_save_keeps_the_steps_that_no_line_has_yet(run):
    saving = run({"train.save_every_steps": 3})
    assert [line["loss"] for line in saving.trained] == [1.5, 3.5, 5.5, 7.5, 9.5, 11.5]  # no step is counted twice
    assert [line.get("replaced") for line in saving.trained] == [None, None, WORLD, None, None, None]
    unlogged = [(each.step, each.unlogged.losses, each.unlogged.grad_norms) for each in saving.saved]
    assert unlogged == [(3, [3], [4]), (6, [], []), (9, [9], [16]), (12, [], [])]
    # Each once, before what is evaluated and saved at its step.
    assert saving.averaged == [(3, 0, 0), (4, 0, 1), (6, 1, 1), (8, 1, 2), (9, 2, 2), (12, 2, 3)]


def test_a_save_keeps_recipe_and_data(run):
    prepared, data = Prepared(max_size=77), {"train.beton": "1"}
    whole = run(data=data, prepared=prepared)
    for each in whole.saved:
        assert (each.data, each.prepared, each.recipe) == (data, prepared, whole.recipe.model_dump(mode="json"))
        assert each.scalars == {"loss_scale": 2.0}


@pytest.mark.parametrize(
    ("draws", "before", "told"),
    [(False, [2], []), (True, [], [""]), (True, [2, WORLD], [""]), (True, [2], ["its last start had 2 ranks"])],
)
def test_a_start_says_once_that_random_numbers_depend_on_ranks(run, tmp_path, draws, before, told):
    (tmp_path / "starts.jsonl").write_text("".join(f'{{"step": 1, "ranks": {ranks}}}\n' for ranks in before))
    notes = run(draws=draws).notes
    assert len(notes) == len(told)
    for note, end in zip(notes, told, strict=True):
        assert "the network draws random numbers" in note
        assert note.endswith(end or "by more than rounding")


def test_dropout_has_a_seed_for_each_step_and_rank(run):
    """Whatever came before."""
    first, other = run(), run(rank=1)
    assert first.seeds == [int(key(0, step, 0, DROPOUT)) for step in range(LAST)]
    assert other.seeds == [int(key(0, step, 1, DROPOUT)) for step in range(LAST)]
    assert len({*first.seeds, *other.seeds}) == 2 * LAST
    assert run(position=place(5, 2)).seeds == first.seeds[5:]
    assert not {*run({"train.seed": 1}).seeds} & {*first.seeds}


OFTEN = {"train.save_every_steps": 3, **RARELY}


def test_steps_that_failed_are_in_no_mean(run):
    failing = run(OFTEN, failing=(2, 4))
    assert [line["step"] for line in failing.events("step_skipped")] == [3, 5]
    (line,) = failing.trained
    assert line["loss"] == (sum(range(1, 13)) - 3 - 5) / 10


def test_too_many_failed_steps_end_a_run(run):
    no_way = "the loss is nan at step 10; .*allows no further rollback"
    raised = ended(no_way, run, {**OFTEN, "faults.max_skipped_steps": 2}, failing=(9, 10, 11))
    assert (raised.first, raised.stop) == (9, 12)
    raised = ended("nan at step 8", run, {**OFTEN, **ONE_SKIP}, failing=(9, 10), position=place(3, 2))
    assert (raised.first, raised.stop) == (9, 11)
    ended("the loss is nan at step 12", run, NO_SKIPS, failing=(LAST - 1,), asked={LAST: STOP})


@pytest.mark.parametrize(
    ("ahead", "saved"),
    [(0, [(4, 4), (4, 4), (6, 8), (10, 12), (12, 14)]), (2, [(4, 4), (4, 8), (8, 12), (12, 16)])],
)
def test_a_rollback_goes_on_without_the_data_that_failed(run, tmp_path, monkeypatch, ahead, saved):
    """Data steps 5 and 6 fail, as the line of step 8 finds; the checkpoint has a step that no line has yet."""
    origin = place(3, ahead, unlogged=UnloggedSteps(losses=[3.0], grad_norms=[4.0]))
    checkpoint.save(tmp_path, state(7.0), origin, RetentionPolicy(1))
    resets: list[GradientWatch] = []  # which on a GPU has steps that are still to be looked at
    monkeypatch.setattr(GradientWatch, "reset", lambda watch: resets.append(watch))
    failing = run(ONE_SKIP, failing=(5, 6), rollbacks=1)
    assert len(resets) == 1
    assert (failing.loaded, failing.rewound) == ([7.0], [3])
    (event,) = failing.events("rollback")
    assert event == {
        "step": 3, "split": "event", "event": "rollback", "from": 8, "skipped_ranges": [5, 7],
        "reason": "the loss is nan at step 6",
    }  # fmt: skip
    again = failing.lines[failing.lines.index(event) + 1 :]
    losses = [(line["step"], line["loss"]) for line in again if line["split"] == "train"]
    assert losses == [(4, 3.5), (6, 5.5), (8, 7.5), (10, 9.5), (12, 11.5)]
    assert [(each.step, each.data_step) for each in failing.saved] == saved
    assert failing.result["step"] == 12


def test_means_are_of_steps_and_norms_that_are_finite(system):
    kinds = set()
    ranks = {"all_reduce": lambda tensor: kinds.add(tensor.dtype) or tensor.mul_(2), "get_world_size": lambda: 2}
    system({f"torch.distributed.{name}": answer for name, answer in ranks.items()})
    interval = LogInterval(began=0.0)
    rows = [(1.0, 6.0), (math.nan, 1.0), (10.0, math.inf), (7.0, 2.0)]
    for step, (loss, norm) in enumerate(rows, start=5):
        result = StepResult(torch.tensor(loss), torch.tensor(norm), torch.tensor([1.0, step]))
        interval.pending.append((step, step + 10, result, step % 2))
    metrics = interval.collect()
    assert interval.block_norms == [1.0, 8.0]  # of the last
    assert kinds == {torch.float64}
    assert [(each.step, each.data_step) for each in metrics] == [(5, 15), (6, 16), (7, 17), (8, 18)]
    assert [(each.loss, each.grad_norm) for each in (metrics[0], metrics[3])] == [rows[0], rows[3]]
    line = interval.summary(64)
    assert (line["loss"], line["grad_norm"], line["replaced"]) == (6.0, 4.0, 4)
    for interval in (LogInterval(began=0.0), LogInterval(UnloggedSteps(losses=[9.0], grad_norms=[8.0]), began=0.0)):
        before = bool(interval.steps.losses)
        interval.pending.append((1, 1, StepResult(torch.tensor(math.nan), torch.tensor(math.nan)), 0))
        interval.collect()
        line = interval.summary(64)
        assert (line is not None) == before
    assert (line["loss"], line["grad_norm"], line["images_per_s"]) == (9.0, 8.0, 0.0)  # of the step before this start


class Noted:
    """A part of a run whose calls are noted, with their words."""

    def __init__(self, calls, name):
        self._calls, self._name = calls, name

    def __getattr__(self, method):
        return lambda *words: self._calls.append((self._name, method, *words))


def test_profiler_start_and_mistakes_are_told_of_each_step(run):
    """By the steps of the network: step 3 is the data's step 5, and its epoch 1 ends after step 6."""
    calls: list = []
    parts = {name: Noted(calls, name.partition("_")[0]) for name in ("profiler", "start_record", "mistakes")}
    whole = run({"eval.every_epochs": 2}, position=place(3, 2), context=parts)
    expected = []
    for step in range(3, LAST):
        expected += [("profiler", "before", step), ("start", "got_batch"), ("start", "stepped", step + 1)]
        expected += [("mistakes", "write", step + 1)] if step + 1 in (6, LAST) else []
    assert calls == expected
    assert [(line["step"], line["epoch"]) for line in whole.trained] == [(n, n / EPOCH) for n in (4, 6, 8, 10, 12)]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, 0),
        ({"ranges": [(0, 2)]}, 2),  # whose first data are skipped
        ({"keys": {"log.images": 0}}, None),
        ({"position": place(4)}, None),
        ({"recipe": "mnli/mixer"}, None),
    ],
)
def test_the_first_batch_is_shown_once_where_asked_for(run, digits, options, shown):
    """By its first part."""
    images, lines = [], []
    writer = SimpleNamespace(add_image=lambda name, image, step: images.append((name, image, step)))
    log = SimpleNamespace(writer=writer, write=lines.append, note=None)
    keys = {"log.images": 7, "train.grad_accum_steps": 2, "data.path": digits}
    whole = run(keys | options.pop("keys", {}), parts=2, context={"log": log}, **options)
    assert [line["replaced"] for line in lines if "replaced" in line] == [3 * WORLD]
    assert len(images) == (shown is not None)
    for name, image, step in images:
        first = Batch(torch.full((8, 3, 8, 8), float(shown)), torch.eye(10)[:8], np.arange(8))
        assert (name, step) == ("first_batch", 1)
        assert np.array_equal(image, training_grid(first, 7, whole.recipe.data))


def test_a_run_has_stopped_once_all_is_saved(run):
    asks = SimpleNamespace(poll=lambda own: own, finish=lambda: None)
    stopped = run(context={"stop": SimpleNamespace(requested=True), "requests": asks})
    assert (stopped.result, [each.step for each in stopped.saved]) == (None, [1])
    assert stopped.calls == ["the last save", "record"]
    assert run(asked={3: STOP}).calls[-3:] == ["the last requests", "the last save", "record"]
    assert run().calls[-3:] == ["write", "the last requests", "the last save"]


def test_each_save_that_failed_is_an_event(run):
    def saver(**answers):
        others = dict.fromkeys(("begin", "failure", "finish", "finish_all_ranks"), lambda *_: None)
        return {"saver": SimpleNamespace(**(others | answers))}

    def failed(found):
        return [(each["step"], each["reason"]) for each in found.events("save_failed")]

    begin, calls = saver(begin=lambda shards, position: f"before {position.step}"), []
    assert failed(run(context=begin)) == [(step, f"before {step}") for step in (4, 8, 12)]
    told = saver(failure=lambda: calls.append(0) or ("it is full" if len(calls) == 3 else None))
    assert failed(run(context=told)) == [(3, "it is full")]
    ends: list = []
    log = SimpleNamespace(
        write=lambda line: None, report_event=lambda line: ends.append(("told", line["event"])), writer=None,
        record=lambda line: ends.append((line["event"], line["step"], line["reason"].partition(";")[0])),
    )  # fmt: skip
    ended("nan", run, NO_SKIPS, failing=(5,), context=saver(finish=lambda: "it is full") | {"log": log})
    assert ends == [("told", "save_failed"), ("diverged", 6, "the loss is nan at step 6")]


@pytest.mark.parametrize(("precision", "skipped"), [("fp32", [3]), ("bf16", [3]), ("fp16", [])])
def test_only_in_fp16_an_infinite_gradient_is_usual(run, precision, skipped):
    whole = run({"train.precision": precision, **RARELY}, norms={2: math.inf})
    assert [line["step"] for line in whole.events("step_skipped")] == skipped


def test_an_infinite_gradient_is_found_at_its_own_step(run, capsys):
    steps: list = []
    start = {"start_record": Noted(steps, "start")}
    ended("the gradient norm is inf at step 2", run, NO_SKIPS | RARELY, norms={1: math.inf}, context=start)
    assert [step for _, _, *words in steps for step in words] == [1, 2]
