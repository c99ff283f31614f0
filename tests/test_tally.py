"""What takes long says how far it is."""

import itertools
import time
from types import SimpleNamespace

from tests.conftest import ROOT
from widemix.evaluation.assessment import assess_network
from widemix.evaluation.networks import of_recipe
from widemix.models.registry import build_model
from widemix.recipe import load_recipe
from widemix.tally import announce, track


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
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("data.path", str(digits)), ("model.depth", "1")])
    network = of_recipe("mixer", recipe, build_model(recipe.model, 8, 10))
    clock = itertools.count(step=10)  # each batch takes ten seconds
    monkeypatch.setattr("widemix.tally.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assess_network(network, batch=100)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"samples evaluated: {count} of 360" for count in (100, 200, 300, 360)]
