"""The lines that a run prints."""

import pytest

from widemix.run import progress
from widemix.run.progress import Progress

LINE = {"split": "train", "loss": 1.0, "epoch": 1.0, "images_per_s": 100.0, "data_wait": 0.0}


def test_the_remaining_time_is_counted_from_where_a_rollback_leads(capsys):
    """Also to before the step at which this process began."""
    progress, line = Progress(True, first_step=40, last_step=100), {"split": "train", "loss": 1.0, "epoch": 1.0}
    line |= {"images_per_s": 100.0, "data_wait": 0.0}
    progress.rewind(20)
    progress.show(line | {"step": 40})
    progress.show(line | {"step": 100})
    said = capsys.readouterr().err
    assert "step 100/100" in said
    assert "-" not in said


def test_the_remaining_time_is_by_the_steps_since_the_start(capsys, monkeypatch):
    """Of the 40 steps before it this process has made none: ten take ten seconds, and fifty are left."""
    now = [100.0]
    monkeypatch.setattr("widemix.run.progress.time.perf_counter", lambda: now[0])
    progress = Progress(True, first_step=40, last_step=100, verbosity=1)
    now[0] += 10
    progress.show(LINE | {"step": 50})
    assert "0:00:50 left" in capsys.readouterr().err


def test_quiet_leaves_the_warnings_and_verbose_says_every_line(capsys):
    for verbosity, steps in ((-1, []), (0, [1, 9]), (1, [1, 2, 3, 9])):
        progress = Progress(True, first_step=0, last_step=9, verbosity=verbosity)
        for step in (1, 2, 3, 9):
            progress.show(LINE | {"step": step})
        progress.show({"split": "eval", "step": 9, "loss": 1.0, "top1": 2.0, "top5": 3.0})
        progress.print("warning: it is late")
        said = capsys.readouterr().err
        assert [step for step in range(1, 10) if f"step {step}/9" in said] == steps
        assert ("eval loss" in said) == (verbosity >= 0)
        assert "warning: it is late" in said


def test_a_line_says_each_of_its_figures(capsys):
    progress = Progress(True, first_step=0, last_step=80, verbosity=1)
    figures = {"epoch": 2.25, "loss": 1.5, "images_per_s": 1234.0, "data_wait": 0.25, "step": 20}
    progress.show({"split": "train", **figures})
    assert "epoch 2.25  step 20/80  loss 1.5000  1,234 images/s  data wait 25 %" in capsys.readouterr().err
    progress.show({"split": "eval", "step": 22, "loss": 0.75, "top1": 62.5, "top5": 87.25, "ema_loss": 0.5})
    assert capsys.readouterr().err.strip() == "step 22  eval loss 0.7500  top-1 62.50 %  top-5 87.25 %"
    Progress(False, first_step=0, last_step=80, verbosity=1).show({"split": "train", **figures})
    assert capsys.readouterr().err == ""


class Screen:
    """A terminal's, or a file's."""

    def __init__(self, *words, **options):
        self.made, self.shown, self.printed = (*words, options), [], []
        self.has_bar = options["bar"]
        self.print = self.printed.append

    def show(self, *words, **options):
        self.shown.append((*words, options))


@pytest.mark.parametrize("verbosity", [0, 1])
def test_a_bar_has_the_last_accuracy_at_the_end_and_the_time_that_is_left_in_front(monkeypatch, verbosity):
    """Of a run that begins at step 40, and goes back to step 20."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress, "Display", Screen)
    shown = progress.Progress(True, first_step=40, last_step=100, verbosity=verbosity)
    screen = shown._display
    assert screen.made == (100, 40, "starting", {"enabled": True, "bar": verbosity == 0})
    now[0] += 10
    shown.show(LINE | {"step": 50})
    shown.show({"split": "eval", "step": 50, "loss": 1.0, "top1": 62.5, "top5": 87.5})
    shown.show(LINE | {"step": 50})
    shown.rewind(20)
    now[0] += 10
    shown.show(LINE | {"step": 30})
    shown.show(LINE | {"step": 100})
    assert [(step, options) for step, _, options in screen.shown] == [
        (step, {"at_once": verbosity > 0 or step == 100}) for step in (50, 50, 30, 100)
    ]
    before, after, back, last = (text for _, text, _ in screen.shown)
    for text, left in ((before, "0:00:50"), (after, "0:00:50"), (back, "0:01:10"), (last, "0:00:00")):
        assert text.startswith(f"{left} left  epoch 1.00" if verbosity == 0 else "epoch 1.00")
        assert text.endswith(f"  {left} left") == (verbosity > 0)
    assert ["62.5" in text for text in (before, after, back)] == [False, verbosity == 0, verbosity == 0]
    assert "87.5" not in after
