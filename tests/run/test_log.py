"""What a run writes and prints beside its numbers, and that rank 0 alone does so."""

import json
import time
from types import SimpleNamespace

import pytest

from tests.run.test_checkpoint import position, state
from widemix.recipe.log import LogSection
from widemix.run import checkpoint
from widemix.run import log as run_log
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.log import RunLog
from widemix.run.run_dir import ResumeState

LINES = [
    {"step": step, "split": split, "epoch": 1.0, "loss": 2.0, "images_per_s": 1.0, "data_wait": 0.0}
    for step, split in ((1, "train"), (2, "train"), (2, "eval"), (3, "train"))
]
EVENT = {"step": 3, "split": "event", "event": "save_failed", "reason": "the disk is full"}


class Sent:
    """A tracker."""

    def __init__(self, unsent: str | None = None):
        self.lines, self.failed, self.unsent = [], [], unsent

    def add_line(self, line):
        self.lines.append(line)

    def close(self, failed):
        self.failed.append(failed)
        return self.unsent


def opened(folder, start=None, rank=0, tensorboard=False, **options) -> RunLog:
    topology = SimpleNamespace(is_main=rank == 0)
    return RunLog(LogSection(tensorboard=tensorboard), start or ResumeState(folder), 9, topology, **options)


def written(folder) -> list[dict]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_and_events_have_their_time_and_only_what_does_not_end_the_run_is_a_warning(tmp_path, capsys):
    began = time.time()
    with opened(tmp_path) as log:
        log.write(LINES[0])
        log.report_event(EVENT)
        assert "warning: no checkpoint was saved at step 3: the disk is full; training" in capsys.readouterr().err
        log.record(EVENT | {"event": "diverged"})
        assert capsys.readouterr().err == ""
    found = written(tmp_path)
    assert [{**line, "time": 0} for line in found] == [
        {**line, "time": 0} for line in (LINES[0], EVENT, EVENT | {"event": "diverged"})
    ]
    assert all(began - 0.1 <= line["time"] <= time.time() + 0.1 for line in found)
    assert not list(tmp_path.glob("events*"))


def test_another_rank_writes_and_prints_nothing(tmp_path, capsys):
    with opened(tmp_path, rank=1, tensorboard=True) as log:
        assert log.writer is None
        log.write(LINES[0])
        log.report_event(EVENT)
        log.record(EVENT)
        log.rewind(0)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_curves_are_written_where_they_are_asked_for(tmp_path):
    with opened(tmp_path, tensorboard=True) as log:
        log.write(LINES[0])
    assert list(tmp_path.glob("events*"))


@pytest.mark.parametrize("due", [False, True])
def test_a_start_says_how_many_lines_it_takes_back_and_an_evaluation_that_it_repeats_is_one(tmp_path, capsys, due):
    checkpoint.save(tmp_path, state(), position(2, data_step=9, evaluation_due=due), RetentionPolicy(1))
    start = ResumeState(tmp_path, checkpoint.newest(tmp_path))
    for verbosity in (0, -1):
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
        opened(tmp_path, start, verbosity=verbosity).__exit__(None, None, None)
        said = capsys.readouterr().err
        assert (f"{'2 lines' if due else '1 line'} of metrics.jsonl from beyond step 2" in said) is (verbosity == 0)
        assert written(tmp_path) == LINES[: 2 if due else 3]


def test_a_rollback_takes_back_the_lines_beyond_its_step(tmp_path):
    with opened(tmp_path) as log:
        for line in LINES:
            log.write(line)
        log.rewind(1)
    assert [line["step"] for line in written(tmp_path)] == [1]


def test_trackers_get_every_line_and_are_told_how_the_run_ended(tmp_path, capsys):
    done, second, failed = Sent(), Sent(), Sent("log.mlflow: the last lines were not sent")
    with opened(tmp_path, trackers=[done, second]) as log:
        log.write(LINES[0])

    def fail():
        with opened(tmp_path, trackers=[failed]) as log:
            log.report_event(EVENT)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert [line["step"] for line in (*done.lines, *failed.lines)] == [1, 3]
    assert (done.failed, failed.failed) == ([False], [True])
    assert (second.lines, second.failed) == (done.lines, [False])
    assert "warning: log.mlflow: the last lines were not sent" in capsys.readouterr().err


def test_a_line_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    with opened(tmp_path) as log:
        log.writer.write = lambda line: "metrics.jsonl: cannot be written to (No space left on device)"
        log.write(LINES[0])
    assert "warning: metrics.jsonl: cannot be written to (No space left on device); its" in capsys.readouterr().err


def test_the_screen_is_told_where_the_run_starts_where_it_ends_and_where_it_goes_back_to(tmp_path, monkeypatch):
    calls: list[tuple] = []

    class Screen:
        def __init__(self, *words):
            calls.append(words)

        def __getattr__(self, name):
            return lambda *words: calls.append((name, *words))

    monkeypatch.setattr(run_log, "Progress", Screen)
    checkpoint.save(tmp_path, state(), position(2, data_step=5), RetentionPolicy(1))
    resumed = ResumeState(tmp_path, checkpoint.newest(tmp_path))
    for options in ({"start": resumed, "verbosity": 1}, {"quiet": True}, {"rank": 1}):
        with opened(tmp_path, **options) as log:
            log.rewind(1)
        assert calls == [
            (options.get("start") is not None, 2 if "start" in options else 0, 9, options.get("verbosity", 0)),
            ("rewind", 1),
            ("close",),
        ]
        calls.clear()


def test_a_run_that_is_interrupted_has_failed_and_its_lines_have_milliseconds(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log.time, "time", lambda: 1234.56789)
    sent = Sent()

    def interrupt():
        with opened(tmp_path, trackers=[sent]) as log:
            log.write(LINES[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert sent.failed == [True]
    assert written(tmp_path) == sent.lines == [LINES[0] | {"time": 1234.568}]


def test_recipe_and_environment_are_given_to_the_curves(tmp_path):
    given: list[tuple] = []
    with opened(tmp_path) as log:
        log.writer.add_description = lambda *words: given.append(words)
        log.add_description("recipe", {"host": "here"})
    assert given == [("recipe", {"host": "here"})]
    with opened(tmp_path, rank=1) as log:
        log.add_description("recipe", {})
