"""When the loop logs, evaluates and saves, and the seconds in what it writes, by a clock that the test moves."""

import json
import math
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ROOT
from widemix.data.random import DROPOUT, key
from widemix.distributed.requests import Request
from widemix.engine import StepResult
from widemix.formats.manifest import Prepared
from widemix.recipe import load_recipe
from widemix.run.checkpoint import Checkpoint, Position, UnloggedSteps
from widemix.run.run_dir import ResumeState
from widemix.training import log_interval, loop
from widemix.training.faults import Diverged, GradientWatch
from widemix.training.log_interval import LogInterval
from widemix.training.loop import Loop, RunContext
from widemix.training.schedule import Schedule

STEP_S, WAIT_S, EVALUATION_S, SAVE_S = 1.0, 0.25, 100.0, 10.0
BATCH, EPOCH, LAST, EVERY = 64, 4, 12, 2  # samples of a step, and steps
WORLD = 3  # ranks, all of which have the same


class Run:
    """A loop of three epochs of four steps whose parts take the seconds above; the loss of a step is its number."""

    parts = 1  # micro-batches of a step

    def __init__(
        self,
        monkeypatch,
        tmp_path,
        *overrides,
        position=None,
        asked=None,
        rank=0,
        rollback=None,
        context=None,
        **known,
    ):
        self.now, self.lines, self.saved, self.evaluated, self.seeds = 0.0, [], [], [], []
        self.averaged, self.loaded, self.beats, self.rewound = [], [], [], []  # each by the step at which it was
        self.asked = asked or {}  # by the number of its poll, from 1
        self.polls = 0
        self.notes = []
        self.calls = []  # of what a run ends with, and of its log
        monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(log_interval, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(loop, "LogInterval", lambda *steps: LogInterval(*steps, began=self.now))
        monkeypatch.setattr(log_interval, "mean_over_ranks", lambda tensor: tensor)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: WORLD)
        fixed = [
            ("train.epochs", "3"),
            ("train.global_batch", f"{BATCH}"),
            ("log.every", f"{EVERY}"),
            ("eval.every_epochs", "1"),
        ]
        recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", [*fixed, *overrides])
        engine = SimpleNamespace(
            device=torch.device("cpu"),
            step=self._step,
            blocks=lambda: ["stem", "head"],
            weight_norm=lambda: 3.0,
            average_buffers=lambda: self.averaged.append((self.loop.step, len(self.evaluated), len(self.saved))),
            load=self.loaded.append,
            scalars=lambda: {"loss_scale": 2.0},
            local_shards=list,
        )
        parts = {
            "log": SimpleNamespace(
                **{kind: partial(self._log, kind) for kind in ("write", "report_event", "record")},
                note=self.notes.append,
                rewind=self.rewound.append,
                writer=None,
            ),
            "saver": SimpleNamespace(
                begin=self._save,
                failure=lambda: None,
                finish=lambda: None,
                finish_all_ranks=lambda: self.calls.append("the last save"),
            ),
            "rollback": rollback or SimpleNamespace(next_used=lambda step: step, next_skipped=lambda step: None),
            "watchdog": SimpleNamespace(beat=lambda: self.beats.append(self.loop.step)),
            "stop": SimpleNamespace(requested=False),
            "requests": SimpleNamespace(poll=self._poll, finish=lambda: self.calls.append("the last requests")),
            "peak_fraction": 0.001,
        }
        state = ResumeState(tmp_path, position and Checkpoint(tmp_path, position), **known)
        schedule = Schedule(EPOCH, LAST, lambda step: 0.5**step)
        self.recipe = recipe
        context = RunContext(**(parts | (context or {})))
        self.loop = Loop(recipe, engine, schedule, self._evaluate, context, state)
        self.result = self.loop.fit(SimpleNamespace(batches=self._batches))
        self.trained = [line for line in self.lines if line["split"] == "train"]

    def _step(self, batches, lr):
        assert lr == 0.5**self.loop.step
        assert len(batches) == self.parts
        self.seeds.append(torch.initial_seed())
        self.now += STEP_S
        norms = torch.tensor([1.0, 2.0]) if self.loop.engine.wants_block_norms else None
        return StepResult(torch.tensor(self.loop.step + 1.0), torch.tensor(2.0 * self.loop.step), norms)

    @contextmanager
    def _batches(self, epoch, first):
        def each():
            for step in range(EPOCH * epoch + first, EPOCH * (epoch + 1)):
                assert step == self.loop.data_step
                self.now += WAIT_S
                for part in range(self.parts):
                    yield SimpleNamespace(step=step, part=part, replaced=(1 + part) * (step == 5))

        yield each()

    def _log(self, kind, line):
        self.calls.append(kind)
        self.lines.append(line)

    def _evaluate(self):
        self.now += EVALUATION_S
        self.evaluated.append(self.loop.step)
        return {"top1": float(self.loop.step), "loss": 1.0}

    def _save(self, shards, position):
        self.now += SAVE_S
        self.saved.append(position)

    def _poll(self, own):
        self.polls += 1
        return self.asked.get(self.polls, Request.NONE)


@pytest.fixture
def run(monkeypatch, tmp_path):
    return lambda *overrides, **others: Run(monkeypatch, tmp_path, *overrides, **others)


def place(step: int, **others) -> Position:
    fixed = {"scalars": {}, "metrics": {}, "recipe": {}}
    return Position(step=step, data_step=step, seconds=1000.0, **fixed, **others)


def test_a_line_has_the_means_of_its_steps_and_their_speed_without_evaluations_and_saves(run):
    whole = run(("log.block_norms", "true"))
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


def test_norms_that_are_not_finite_are_left_out(monkeypatch, tmp_path):
    """As of a step that fp16 skips, the last one before a line: JSON has neither NaN nor Infinity."""

    class Overflows(Run):
        def _step(self, batches, lr):
            result = super()._step(batches, lr)
            norms = torch.tensor([math.inf, 2.0]) if self.loop.step == 3 else result.block_norms
            return StepResult(result.loss, result.grad_norm, norms)

    lines = Overflows(monkeypatch, tmp_path, ("log.block_norms", "true")).trained
    assert [line.get("grad_norm/stem") for line in lines] == [1.0, None, 1.0, 1.0, 1.0, 1.0]
    assert all(line["grad_norm/head"] == 2.0 for line in lines)
    json.dumps(lines, allow_nan=False)


def test_evaluations_and_saves_come_with_epochs_and_the_result_has_all_seconds(run):
    whole = run()
    assert whole.evaluated == [position.step for position in whole.saved] == [4, 8, 12]
    lines = [(line["step"], line["epoch"], line["top1"]) for line in whole.lines if line["split"] == "eval"]
    assert lines == [(4, 1.0, 4.0), (8, 2.0, 8.0), (12, 3.0, 12.0)]
    assert [position.metrics for position in whole.saved] == [{"top1": s, "loss": 1.0} for s in (4.0, 8.0, 12.0)]
    assert whole.now == 12 * (STEP_S + WAIT_S) + 3 * (EVALUATION_S + SAVE_S)
    assert whole.result == {"top1": 12.0, "loss": 1.0, "step": 12, "seconds": whole.now}
    assert [position.seconds for position in whole.saved] == [105.0, 220.0, 335.0]  # each before it is saved


def test_an_evaluation_that_is_not_finite_is_an_event_and_null_in_the_result(run, monkeypatch):
    monkeypatch.setattr(Run, "_evaluate", lambda self: {"top1": 0.0, "loss": math.nan})
    written: list[tuple] = []
    failing = run(context={"mistakes": Noted(written, "mistakes")})
    assert [step for *_, step in written] == [4, 8, 12]
    assert [line["split"] for line in failing.lines if line["step"] == 8] == ["train", "event"]
    event = {"step": 8, "split": "event", "event": "evaluation_failed", "loss": "nan"}
    assert event in failing.lines
    assert failing.saved[1].metrics == {"top1": 0.0}
    assert (failing.result["top1"], failing.result["loss"]) == (0.0, None)


def test_a_resumed_run_has_the_seconds_before_and_the_speed_of_its_own_steps(run):
    """Step 3 was trained before, and is in the line of step 4."""
    unlogged = UnloggedSteps(losses=[9.0], grad_norms=[8.0], replaced=3)
    resumed = run(position=place(3, unlogged=unlogged))
    first, second, *_ = resumed.trained
    assert (first["step"], first["loss"], first["grad_norm"]) == (4, (9 + 4) / 2, (8 + 6) / 2)
    assert first["replaced"] == 3
    for line in (first, second):
        assert line["images_per_s"] == pytest.approx(BATCH / (STEP_S + WAIT_S))
        assert line["data_wait"] == pytest.approx(WAIT_S / (STEP_S + WAIT_S))
    assert resumed.result["seconds"] == 1000 + resumed.now
    assert resumed.saved[0].seconds == 1000 + STEP_S + WAIT_S + EVALUATION_S


def test_a_save_keeps_the_steps_that_no_line_has_yet(run):
    saving = run(("train.save_every_steps", "3"))
    assert [line["loss"] for line in saving.trained] == [1.5, 3.5, 5.5, 7.5, 9.5, 11.5]  # no step is counted twice
    assert [line.get("replaced") for line in saving.trained] == [None, None, WORLD, None, None, None]
    saved = saving.saved
    assert [(each.step, each.unlogged.losses) for each in saved] == [(3, [3]), (6, []), (9, [9]), (12, [])]
    assert [each.unlogged.grad_norms for each in saved] == [[4], [], [16], []]
    # Each once, before what is evaluated and saved at its step.
    assert saving.averaged == [(3, 0, 0), (4, 0, 1), (6, 1, 1), (8, 1, 2), (9, 2, 2), (12, 2, 3)]
    assert saving.beats == list(range(1, LAST + 1))


def test_a_save_keeps_recipe_and_data_and_both_counts_of_steps(run):
    prepared, data = Prepared(max_size=77), {"train.beton": "1"}
    whole = run(data=data, prepared=prepared)
    for each in whole.saved:
        assert (each.data, each.prepared, each.recipe) == (data, prepared, whole.recipe.model_dump(mode="json"))
        assert each.scalars == {"loss_scale": 2.0}
        assert each.step == each.data_step


def test_a_run_that_was_killed_before_its_result_only_evaluates(run):
    resumed = run(position=place(LAST))
    assert (resumed.evaluated, resumed.saved, resumed.beats) == ([LAST], [], [])
    assert resumed.result == {"top1": 12.0, "loss": 1.0, "step": 12, "seconds": 1000 + EVALUATION_S}


class Draws(Run):
    """A network with dropout."""

    def _step(self, batches, lr):
        torch.rand(1)
        return super()._step(batches, lr)


@pytest.mark.parametrize(
    ("kind", "before", "told"),
    [(Run, [2], []), (Draws, [], [""]), (Draws, [2, WORLD], [""]), (Draws, [2], ["its last start had 2 ranks"])],
)
def test_each_start_says_once_that_random_numbers_depend_on_ranks(monkeypatch, tmp_path, kind, before, told):
    (tmp_path / "starts.jsonl").write_text("".join(f'{{"step": 1, "ranks": {ranks}}}\n' for ranks in before))
    notes = kind(monkeypatch, tmp_path).notes
    assert len(notes) == len(told)
    for note, end in zip(notes, told, strict=True):
        assert "the network draws random numbers" in note
        assert note.endswith(end or "by more than rounding")


class Fails(Run):
    """The losses of some data steps are not finite, which their gradients do not show."""

    failing: Sequence[int] = ()

    def _step(self, batches, lr):
        result, fails = super()._step(batches, lr), self.loop.data_step in self.failing
        return StepResult(torch.tensor(math.nan) if fails else result.loss, result.grad_norm, result.block_norms)


def test_no_step_is_saved_unless_its_loss_was_finite_but_the_last(monkeypatch, tmp_path):
    class NoWay(SimpleNamespace):
        def exclude(self, diverged):
            raise Diverged(f"{diverged}; no way", diverged.first, diverged.stop)

    rollback = NoWay(next_used=lambda step: step, next_skipped=lambda step: None)
    often = ("train.save_every_steps", "3"), ("log.every", "100")
    monkeypatch.setattr(Fails, "failing", (2, 4))
    failing = Fails(monkeypatch, tmp_path, *often)
    assert [each.step for each in failing.saved] == [6, 9, 12]
    skipped = [line["step"] for line in failing.lines if line.get("event") == "step_skipped"]
    assert skipped == [3, 5]
    (line,) = failing.trained
    assert line["loss"] == (sum(range(1, 13)) - 3 - 5) / 10
    monkeypatch.setattr(Fails, "failing", (9, 10, 11))
    ended = Fails(monkeypatch, tmp_path, *often, rollback=rollback)
    assert ([each.step for each in ended.saved], ended.result["step"]) == ([3, 6, 9, 12], 12)
    lines = []
    monkeypatch.setattr(Fails, "_evaluate", lambda self: lines.append(self.lines) or {"loss": 1.0})
    with pytest.raises(Diverged, match="the loss is nan at step 10; no way"):
        Fails(monkeypatch, tmp_path, *often, ("faults.max_skipped_steps", "2"), rollback=rollback)
    event = {"step": 12, "split": "event", "event": "diverged", "reason": "the loss is nan at step 10; no way"}
    assert lines[0][-1] == event
    monkeypatch.setattr(Fails, "failing", (9, 10))
    ahead = place(3).model_copy(update={"data_step": 5})
    with pytest.raises(Diverged) as raised:
        Fails(monkeypatch, tmp_path, *often, ("faults.max_skipped_steps", "1"), rollback=rollback, position=ahead)
    assert (raised.value.first, raised.value.stop) == (9, 11)


@pytest.mark.parametrize(
    ("data_step", "saved"),
    [(3, [(4, 4), (4, 4), (6, 8), (10, 12), (12, 14)]), (5, [(4, 4), (4, 8), (8, 12), (12, 16)])],
)
def test_a_rollback_goes_on_from_the_checkpoint_without_the_data_of_the_failed_steps(
    monkeypatch, tmp_path, data_step, saved
):
    """Data steps 5 and 6 fail, as the line of step 8 finds; the checkpoint has a step that no line has yet."""
    skipped, excluded, asked = [], [], []

    def next_used(step):
        return next((stop for first, stop in skipped if first <= step < stop), step)

    def exclude(diverged):
        assert not excluded
        excluded.append((diverged.first, diverged.stop))
        skipped.append(excluded[-1])
        origin = place(3, unlogged=UnloggedSteps(losses=[3.0], grad_norms=[4.0]))
        origin = origin.model_copy(update={"data_step": data_step})
        return SimpleNamespace(position=origin, load=lambda verify: f"state, verified again: {verify}")

    def next_skipped(step):
        asked.append(step)
        assert len(asked) < 20
        return min((first for first, _ in skipped if first >= step), default=None)

    rollback = SimpleNamespace(next_used=next_used, exclude=exclude, next_skipped=next_skipped)
    resets: list[GradientWatch] = []
    monkeypatch.setattr(GradientWatch, "reset", lambda self: resets.append(self))
    monkeypatch.setattr(Fails, "failing", (5, 6))
    failing = Fails(monkeypatch, tmp_path, ("faults.max_skipped_steps", "1"), rollback=rollback)
    assert excluded == [(5, 7)]
    assert failing.loaded == ["state, verified again: False"]
    assert failing.rewound == [3]
    assert resets == [failing.loop._watch]
    (event,) = (line for line in failing.lines if line.get("event") == "rollback")
    assert event == {
        "step": 3, "split": "event", "event": "rollback", "from": 8, "skipped_ranges": [5, 7],
        "reason": "the loss is nan at step 6",
    }  # fmt: skip
    again = failing.lines[failing.lines.index(event) + 1 :]
    losses = [(line["step"], line["loss"]) for line in again if line["split"] == "train"]
    assert losses == [(4, 3.5), (6, 5.5), (8, 7.5), (10, 9.5), (12, 11.5)]
    assert [(each.step, each.data_step) for each in failing.saved] == saved
    assert failing.result["step"] == 12


def test_a_run_that_was_stopped_before_its_evaluation_begins_with_it_and_no_line_counts_it(run):
    resumed = run(position=place(4, evaluation_due=True))
    assert resumed.evaluated == [4, 8, 12]
    assert resumed.saved[0].step == 4
    assert resumed.saved[0].metrics == {"top1": 4.0, "loss": 1.0}
    assert not resumed.saved[0].evaluation_due
    assert resumed.trained[0]["images_per_s"] == pytest.approx(BATCH / (STEP_S + WAIT_S))


def test_a_stop_saves_at_once_and_leaves_the_evaluation_to_the_next_start(run):
    stopped = run(asked={4: Request.STOP})
    assert stopped.result is None
    assert stopped.lines[-1] == {"step": 4, "split": "event", "event": "stopped"}
    assert stopped.evaluated == []
    assert [(each.step, each.evaluation_due) for each in stopped.saved] == [(4, True)]
    early = run(asked={3: Request.STOP})
    assert [(each.step, each.evaluation_due) for each in early.saved] == [(3, False)]


def test_the_clock_asks_for_one_evaluation_and_for_one_save(run):
    timed = run(("eval.every_minutes", "5"), ("train.save_minutes", "5"), asked={2: Request.EVALUATE})
    assert timed.evaluated == [4, 12]  # at the end of the epoch, not at that of the next
    assert [each.step for each in timed.saved] == [12]
    timed = run(("eval.every_minutes", "5"), ("train.save_minutes", "5"), asked={6: Request.SAVE})
    assert timed.evaluated == [12]
    assert [each.step for each in timed.saved] == [6, 12]


def test_the_best_is_kept_only_if_each_evaluation_is_saved(run):
    options = ("train.save_every_steps", "5"), ("train.keep_best", "top1")
    saved = run(*options).saved
    assert [each.step for each in saved] == [4, 5, 8, 10, 12]
    assert [each.metrics.get("top1") for each in saved] == [4, None, 8, None, 12]


def test_dropout_has_a_seed_of_its_own_in_each_step_of_each_rank_whatever_came_before(run):
    first, other = run(), run(rank=1)
    resumed = run(position=place(5))
    assert first.seeds == [int(key(0, step, 0, DROPOUT)) for step in range(LAST)]
    assert other.seeds == [int(key(0, step, 1, DROPOUT)) for step in range(LAST)]
    assert len({*first.seeds, *other.seeds}) == 2 * LAST
    assert resumed.seeds == first.seeds[5:]
    assert not {*run(("train.seed", "1")).seeds} & {*first.seeds}


def test_means_are_of_the_steps_and_the_norms_that_are_finite(monkeypatch):
    kinds = set()
    monkeypatch.setattr(log_interval, "mean_over_ranks", lambda tensor: kinds.add(tensor.dtype) or tensor)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
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
    failed = LogInterval(began=0.0)
    failed.pending.append((1, 1, StepResult(torch.tensor(math.nan), torch.tensor(math.nan)), 0))
    failed.collect()
    assert failed.summary(64) is None
    resumed = LogInterval(UnloggedSteps(losses=[9.0], grad_norms=[8.0]), began=0.0)
    resumed.pending.append((1, 1, StepResult(torch.tensor(math.nan), torch.tensor(math.nan)), 0))
    resumed.collect()
    line = resumed.summary(64)  # of the step before this start
    assert (line["loss"], line["grad_norm"], line["images_per_s"]) == (9.0, 8.0, 0.0)


def no_way(diverged: Diverged):
    """Find no checkpoint to go back to."""
    raise diverged


NO_WAY = SimpleNamespace(next_used=lambda step: step, next_skipped=lambda step: None, exclude=no_way)


class Noted:
    """A part of a run whose calls are noted, with their words."""

    def __init__(self, calls, name):
        self._calls, self._name = calls, name

    def __getattr__(self, method):
        return lambda *words: self._calls.append((self._name, method, *words))


def test_steps_are_counted_without_those_of_the_data_that_were_skipped(run):
    """Two were before this start: step 3 is the data's step 5, and its epoch 1 ends after step 6."""
    calls: list = []
    parts = {name: Noted(calls, name) for name in ("profiler", "start", "mistakes")}
    ahead = place(3).model_copy(update={"data_step": 5})
    keys = ("eval.every_epochs", "2"), ("train.save_every_steps", "5")
    whole = run(*keys, position=ahead, context=parts)
    expected = []
    for step in range(3, LAST):
        expected += [("profiler", "before", step), ("start", "got_batch"), ("start", "stepped", step + 1)]
        expected += [("mistakes", "write", step + 1)] if step + 1 in (6, LAST) else []
    assert calls == expected
    assert whole.evaluated == [6, LAST]
    assert [(each.step, each.data_step) for each in whole.saved] == [(5, 7), (10, 12), (LAST, LAST + 2)]
    assert [(line["step"], line["epoch"]) for line in whole.trained] == [(n, n / EPOCH) for n in (4, 6, 8, 10, 12)]
    assert whole.seeds == [int(key(0, step, 0, DROPOUT)) for step in range(3, LAST)]


def test_the_epoch_of_a_line_has_four_decimals(run):
    whole = run()
    whole.loop.schedule = Schedule(7, LAST, lambda step: 1.0)
    for whole.loop.step in (1, 2):
        whole.loop._write({})
    assert [line["epoch"] for line in whole.lines[-2:]] == [0.1429, 0.2857]


def test_a_start_within_a_range_that_is_skipped_goes_on_behind_it(run):
    skips = SimpleNamespace(next_used=lambda step: 6 if step in (4, 5) else step, next_skipped=lambda step: None)
    resumed = run(position=place(4), rollback=skips)
    assert [(each.step, each.data_step) for each in resumed.saved] == [(6, 8), (10, 12), (12, 14)]


def test_the_first_batch_is_shown_once_by_its_first_part_and_only_where_images_are_asked_for(monkeypatch, tmp_path):
    class TwoParts(Run):
        parts = 2

    shown: list = []
    monkeypatch.setattr(loop, "training_grid", lambda batch, images, data: (batch.step, batch.part, images, data))
    writer = SimpleNamespace(add_image=lambda name, image, step: shown.append((name, *image, step)))
    skips = SimpleNamespace(next_used=lambda step: max(step, 2), next_skipped=lambda step: None)

    def show(images, **others):
        log = SimpleNamespace(writer=writer, write=lambda line: lines.append(line))
        lines: list = []
        keys = ("log.images", images), ("train.grad_accum_steps", "2")
        recipe = TwoParts(monkeypatch, tmp_path, *keys, context={"log": log}, **others).recipe
        replaced = [line["replaced"] for line in lines if "replaced" in line]
        assert replaced == [3 * WORLD]
        found = [(*image[:4], image[4] is recipe.data, image[5]) for image in shown]
        shown.clear()
        return found

    assert show("7") == [("first_batch", 0, 0, 7, True, 1)]
    assert show("7", rollback=skips) == [("first_batch", 2, 0, 7, True, 1)]  # whose first data are skipped
    assert show("0") == show("7", position=place(4)) == []
    monkeypatch.setattr(loop, "DataSection", int)  # as of texts
    assert show("7") == []


def test_a_run_is_said_to_have_stopped_once_all_is_saved_and_by_no_warning(run):
    asks = SimpleNamespace(poll=lambda own: own, finish=lambda: None)
    stopped = run(context={"stop": SimpleNamespace(requested=True), "requests": asks})
    assert (stopped.result, [each.step for each in stopped.saved]) == (None, [1])
    assert stopped.calls == ["the last save", "record"]
    assert run(asked={3: Request.STOP}).calls[-3:] == ["the last requests", "the last save", "record"]
    assert run().calls[-3:] == ["write", "the last requests", "the last save"]


def test_each_save_that_failed_is_an_event_wherever_it_is_told(run, monkeypatch, tmp_path):
    def failed(found):
        return [(each["step"], each["reason"]) for each in found.lines if each.get("event") == "save_failed"]

    calls: list = []

    def saver(**answers):
        others = dict.fromkeys(("begin", "failure", "finish", "finish_all_ranks"), lambda *_: None)
        return {"saver": SimpleNamespace(**(others | answers))}

    assert failed(run(context=saver(begin=lambda shards, position: f"before {position.step}"))) == [
        (4, "before 4"),
        (8, "before 8"),
        (12, "before 12"),
    ]
    told = saver(failure=lambda: calls.append(0) or ("it is full" if len(calls) == 3 else None))
    assert failed(run(context=told)) == [(3, "it is full")]

    monkeypatch.setattr(Fails, "failing", (5,))
    ends: list = []
    monkeypatch.setattr(Run, "_log", lambda self, kind, line: ends.append((kind, line.get("event"))))
    keys = ("faults.max_skipped_steps", "0")
    with pytest.raises(Diverged):
        Fails(monkeypatch, tmp_path, keys, rollback=NO_WAY, context=saver(finish=lambda: "it is full"))
    assert ends[-2:] == [("report_event", "save_failed"), ("record", "diverged")]


def test_only_in_fp16_a_gradient_that_is_not_finite_is_usual(run, monkeypatch):
    step = Run._step

    def overflows(self, batches, lr):
        result = step(self, batches, lr)
        return StepResult(result.loss, torch.tensor(math.inf), None) if self.loop.step == 2 else result

    monkeypatch.setattr(Run, "_step", overflows)
    for precision, skipped in (("fp32", [3]), ("bf16", [3]), ("fp16", [])):
        whole = run(("train.precision", precision), ("log.every", "100"))
        assert [line["step"] for line in whole.lines if line.get("event") == "step_skipped"] == skipped


def test_a_gradient_that_is_not_finite_is_found_at_its_own_step(monkeypatch, tmp_path):
    class Ends(Fails):
        def _step(self, batches, lr):
            result = super()._step(batches, lr)
            steps.append(self.loop.step + 1)
            return StepResult(result.loss, torch.tensor(math.inf), None) if self.loop.step == 1 else result

    steps: list[int] = []
    keys = ("log.every", "100"), ("faults.max_skipped_steps", "0")
    with pytest.raises(Diverged, match="the gradient norm is inf at step 2"):
        Ends(monkeypatch, tmp_path, *keys, rollback=NO_WAY)
    assert steps == [1, 2]


def test_a_save_that_was_asked_for_at_a_failed_step_is_made_after_the_next(monkeypatch, tmp_path):
    monkeypatch.setattr(Fails, "failing", (4,))
    keys = ("train.save_minutes", "5"), ("log.every", "100")
    assert [each.step for each in Fails(monkeypatch, tmp_path, *keys, asked={5: Request.SAVE}).saved] == [6, LAST]


def test_the_minutes_to_the_next_evaluation_count_from_each(run, monkeypatch):
    noted: list[int] = []
    monkeypatch.setattr(loop.Cadence, "evaluated", lambda self: noted.append(0))
    assert len(run().evaluated) == len(noted) == 3
    run(position=place(LAST, evaluation_due=True))
    assert len(noted) == 4


def test_an_epoch_ends_also_where_its_last_steps_are_skipped_with_the_next_ones_first(run):
    rollback = SimpleNamespace(
        next_used=lambda step: 6 if 3 <= step < 6 else step, next_skipped=lambda step: 3 if step <= 3 else None
    )
    whole = run(rollback=rollback)
    assert whole.evaluated == [3, 5, 9, 12]
    assert [(each.step, each.data_step) for each in whole.saved] == [(3, 6), (5, 8), (9, 12), (12, 15)]


def test_a_last_step_that_failed_is_saved_though_the_run_is_asked_to_stop(monkeypatch, tmp_path):
    monkeypatch.setattr(Fails, "failing", (LAST - 1,))
    stopped = Fails(monkeypatch, tmp_path, rollback=NO_WAY, asked={LAST: Request.STOP})
    assert (stopped.saved[-1].step, stopped.loop.health.failing) == (LAST, False)
    with pytest.raises(Diverged, match="the loss is nan at step 12"):
        Fails(monkeypatch, tmp_path, ("faults.max_skipped_steps", "0"), rollback=NO_WAY, asked={LAST: Request.STOP})
