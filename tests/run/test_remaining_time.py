"""The lines that a run prints."""

import itertools
import time
from types import SimpleNamespace

from widemix.run.progress import Progress, announce, track

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


def test_what_takes_long_says_how_far_it_is(capsys, monkeypatch):
    now = iter(range(0, 1000, 3))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    assert list(track("abcd", "letters")) == list("abcd")
    assert capsys.readouterr().err.splitlines() == ["letters: 1 of 4", "letters: 3 of 4", "letters: 4 of 4"]
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    assert list(track("abcd", "letters")) == list("abcd")
    assert capsys.readouterr().err == ""


def test_a_block_is_announced_once_it_takes_long(capsys):
    with announce("a short block", after=60.0):
        pass
    assert capsys.readouterr().err == ""
    said, deadline = "", time.monotonic() + 300
    with announce("a long block", after=0.0):
        while not said.endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said == "a long block\n"


def test_an_evaluation_says_how_far_it_is(digits, tmp_path, monkeypatch, capsys):
    from tests.conftest import ROOT
    from widemix.evaluation.assessment import assess_network
    from widemix.evaluation.networks import of_recipe
    from widemix.models.registry import build_model
    from widemix.recipe import load_recipe

    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits)), ("model.depth", "1")])
    network = of_recipe("mixer", recipe, build_model(recipe.model, 8, 10))
    clock = itertools.count(step=10)  # each batch takes ten seconds
    monkeypatch.setattr("widemix.run.progress.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assess_network(network, batch=100)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"samples evaluated: {count} of 360" for count in (100, 200, 300, 360)]
