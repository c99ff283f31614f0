"""What a run writes and prints beside its numbers, and that rank 0 alone does so."""

import json
import math
import os
import re
import select
from pathlib import Path

import pytest

from tests.run.saved import ALONE, position, run_of, state
from tests.shims import disk_of
from widemix.run import checkpoint
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.log import Progress, RunLog
from widemix.run.records import EVALUATIONS, record_evaluation
from widemix.run.resume import ResumeState

FIGURES = {"epoch": 1.0, "loss": 2.0, "images_per_s": 1.0, "data_wait": 0.0, "top1": 3.0}
LINES = [
    {"step": step, "split": split, **FIGURES}
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


def opened(start, topology=ALONE, verbosity=0, tensorboard="false", last=9, **options) -> RunLog:
    return RunLog(run_of(start, topology, verbosity, log__tensorboard=tensorboard), last, **options)


def written(folder) -> list[dict]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_have_their_time_and_events_are_warnings(tmp_path, capsys, system):
    """But one that ends the run, which an error says."""
    system({"time.time": lambda: 1234.56789})
    with opened(tmp_path) as log:
        log.write(LINES[0])
        log.report_event(EVENT)
        assert "warning: no checkpoint was saved at step 3: the disk is full; training" in capsys.readouterr().err
        log.record(EVENT | {"event": "diverged"})
        assert capsys.readouterr().err == ""
    assert written(tmp_path) == [
        line | {"time": 1234.568} for line in (LINES[0], EVENT, EVENT | {"event": "diverged"})
    ]
    assert not list(tmp_path.glob("events*"))


def test_a_quiet_run_writes_and_prints_nothing(tmp_path, capsys):
    with opened(tmp_path, quiet=True) as log:
        log.write(LINES[0])
        log.report_event(EVENT)
    assert capsys.readouterr().err == ""
    assert len(written(tmp_path)) == 2


def test_curves_with_their_description_are_written_where_asked_for(tmp_path):
    with opened(ResumeState(tmp_path, environment={"host": "here"}), tensorboard="true") as log:
        log.add_description()
        log.write(LINES[0])
    (path,) = tmp_path.glob("events*")
    assert all(text in path.read_bytes() for text in (b"recipe/text_summary", b'"host": "here"', b"loss/train"))


@pytest.mark.parametrize("due", [False, True])
def test_a_start_says_how_many_lines_it_takes_back(tmp_path, capsys, due):
    """An evaluation that it repeats is one."""
    checkpoint.save(tmp_path, state(), position(2, data_step=9, evaluation_due=due), RetentionPolicy(1))
    start = ResumeState(tmp_path, checkpoint.newest(tmp_path))
    for verbosity in (0, -1):
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
        with opened(start, verbosity=verbosity) as log:
            said = capsys.readouterr().err
            assert written(tmp_path) == LINES[: 2 if due else 3]
            log.note("a note")
            log.write(LINES[0] | {"step": 3})
            log.rewind(1)
        assert (f"{'2 lines' if due else '1 line'} of metrics.jsonl from beyond step 2" in said) is (verbosity == 0)
        assert ("a note" in capsys.readouterr().err) is (verbosity == 0)
        assert written(tmp_path) == LINES[:1]


def test_trackers_get_every_line_and_how_the_run_ended(tmp_path, capsys):
    done, second, failed = Sent(), Sent(), Sent("log.mlflow: the last lines were not sent")

    def run(trackers, line, error=None):
        with opened(tmp_path, trackers=trackers) as log:
            log.write(line) if line["split"] == "train" else log.report_event(line)
            if error:
                raise error

    run([done, second], LINES[0])
    assert done.lines == written(tmp_path)
    for error in (ValueError("no"), KeyboardInterrupt("no")):
        with pytest.raises(type(error), match="no"):
            run([failed], EVENT, error)
    assert [line["step"] for line in (*done.lines, *failed.lines)] == [1, 3, 3]
    assert (done.failed, failed.failed) == ([False], [True, True])
    assert (second.lines, second.failed) == (done.lines, [False])
    assert "warning: log.mlflow: the last lines were not sent; metrics.jsonl has them" in capsys.readouterr().err


def test_a_line_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    with opened(tmp_path) as log, disk_of(0):
        log.write(LINES[0])
    assert "metrics.jsonl: cannot be written to (File too large); its lines are kept" in capsys.readouterr().err


@pytest.mark.parametrize(("verbosity", "said"), [(-1, []), (0, [1, 9]), (1, [1, 2, 3, 9])])
def test_quiet_leaves_the_warnings_and_verbose_says_every_line(capsys, verbosity, said):
    progress = Progress(True, first_step=0, last_step=9, verbosity=verbosity)
    for step in (1, 2, 3, 9):
        progress.show(LINES[0] | {"step": step})
    progress.show(LINES[2])
    progress.print("warning: it is late")
    found = capsys.readouterr().err
    assert [step for step in range(1, 10) if f"step {step}/9" in found] == said
    assert ("eval loss" in found) == (verbosity >= 0)
    assert "warning: it is late" in found


def test_a_line_says_each_of_its_metrics(capsys):
    progress = Progress(True, first_step=0, last_step=80, verbosity=1)
    train = {"split": "train", "epoch": 2.25, "loss": 1.5, "images_per_s": 1234.0, "data_wait": 0.25, "step": 20}
    progress.show(train)
    assert "epoch 2.25  step 20/80  loss 1.5000  1,234 images/s  data wait 25 %" in capsys.readouterr().err
    progress.show({"split": "eval", "step": 22, "loss": 0.75, "top1": 62.5, "top5": 87.25, "ema_loss": 0.5})
    assert capsys.readouterr().err.strip() == "step 22  eval loss 0.7500  top-1 62.50 %  top-5 87.25 %"
    Progress(False, first_step=0, last_step=80, verbosity=1).show(train)
    assert capsys.readouterr().err == ""


def read_all(terminal: int) -> str:
    said = b""
    while select.select([terminal], [], [], 0.05)[0]:
        said += os.read(terminal, 10_000)
    return said.decode().strip()


@pytest.mark.parametrize("verbosity", [0, 1])
def test_the_time_left_is_by_the_steps_since_the_start(tmp_path, monkeypatch, system, verbosity):
    """Of a run that begins at step 40, and goes back to step 20; beside a bar with the last accuracy at the end."""
    own, theirs = os.openpty()
    now, texts = [100.0], []
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "250")
    with open(theirs, "w") as terminal:
        system({"time.perf_counter": lambda: now[0], "sys.stderr": terminal})
        checkpoint.save(tmp_path, state(), position(40), RetentionPolicy(1))
        start = ResumeState(tmp_path, checkpoint.newest(tmp_path))
        log = opened(start, last=100, verbosity=verbosity)
        for step, seconds in ((50, 10), (60, 10), (30, 10), (100, 70)):
            now[0] += seconds
            log.write(LINES[0] | {"step": step})
            texts.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", read_all(own)).rpartition("\r")[2].strip())
            if step == 50:
                log.write(LINES[2] | {"top1": 62.5, "top5": 87.5, "step": 50})
                assert "top-1 62.50 %" in read_all(own)
            if step == 60:
                log.rewind(20)
        log.__exit__(None, None, None)
    os.close(own)
    left = [re.search(r"(-?\d:\d\d:\d\d) left", text)[1] for text in texts]
    assert left == ["0:00:50", "0:00:40", "0:01:10", "0:00:00"]
    assert [f"{time} left  epoch 1.00" in text for time, text in zip(left, texts, strict=True)] == [not verbosity] * 4
    assert [text.endswith(f"{time} left") for time, text in zip(left, texts, strict=True)] == [verbosity == 1] * 4
    assert ["62.5" in text for text in texts] == [False, *[verbosity == 0] * 3]
    assert not any("87.5" in text for text in texts)


@pytest.fixture
def of_a_run(tmp_path) -> Path:
    """The folder of a checkpoint in a run folder."""
    folder = tmp_path / "run/checkpoints/00000007"
    folder.mkdir(parents=True)
    (tmp_path / "run/recipe.yaml").touch()
    return folder


def test_evaluations_are_lines_of_the_run(of_a_run, monkeypatch):
    monkeypatch.chdir(of_a_run)
    lines = [{"top1": 50.0, "step": 7}, {"loss": math.inf, "r2": -math.inf, "top1": 0.0, "ema": False, "step": 0}]
    assert record_evaluation(of_a_run, lines[0]) is None
    assert record_evaluation(Path(), lines[1]) is None
    text = (of_a_run.parents[1] / EVALUATIONS).read_text()
    assert [json.loads(line) for line in text.splitlines()] == [lines[0], lines[1] | {"loss": None, "r2": None}]


def test_evaluations_outside_a_run_are_not_written(of_a_run):
    (of_a_run.parents[1] / "recipe.yaml").unlink()
    assert record_evaluation(of_a_run, {"top1": 50.0}) is None
    assert not (of_a_run.parents[1] / EVALUATIONS).exists()
