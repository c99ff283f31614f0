"""The search of a key's best value: resumed without losing a trial, and equal to the best of all that was tried."""

import csv
import json
import math
import statistics

import pytest

pytest.importorskip("optuna", reason="needs Optuna: pip install 'widemix[search]'")

from pipeline.cli.commands import Exit
from pipeline.errors import InputError, RunError
from pipeline.recipe import dump_recipe
from pipeline.studies.search import Range, as_csv, best, search
from pipeline.studies.study import read_study, study_cells
from tests.conftest import ROOT

STUDY = """
title: t
source: s
claim: c
seeds: [0, 1]
cells:
- label: Normal
  recipes: {Digits: ROOT/recipes/digits/s_mixer.yaml}
  axes: {model.channels: [8, 16]}
figure: {x: width}
"""
SPAN = Range("optim.lr", 1e-4, 1.0, log=True)


@pytest.fixture
def cells(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace("ROOT", str(ROOT)))
    (tmp_path / "search").mkdir()
    return study_cells(path, read_study(path))


class Trainer:
    """Ends runs at once: the top-1 has its peak at a rate of 0.01 for 8 channels and 0.1 for 16."""

    def __init__(self, folder, stop_at=None):
        self.folder, self.stop_at, self.tried = folder, stop_at, []

    def __call__(self, cells):
        values = [dict(cell.varied) for cell in cells]
        self.tried.append((values[0]["model.channels"], float(values[0]["optim.lr"])))
        assert [each["train.seed"] for each in values] == ["0", "1"]
        if len(self.tried) == self.stop_at:
            return Exit.REQUEUE
        for cell in cells:
            recipe = cell.recipe
            if recipe.optim.lr > 0.5:
                raise RunError("the loss is not finite")
            peak = {8: 0.01, 16: 0.1}[recipe.model.channels]
            run = self.folder / cell.name
            run.mkdir(exist_ok=True)
            (run / "recipe.yaml").write_text(dump_recipe(recipe))
            top1 = 90 - 10 * abs(math.log10(recipe.optim.lr / peak)) + recipe.train.seed
            (run / "done.json").write_text(json.dumps({"top1": top1}))
        return Exit.DONE


def test_the_best_of_all_trials_near_the_peak_of_each_point(cells, tmp_path):
    trainer = Trainer(tmp_path)
    trials = search(cells, SPAN, 20, tmp_path, trainer)
    assert len(trials) == len(trainer.tried) == 40
    found = best(trials)
    for (point, trial), peak in zip(found.items(), (0.01, 0.1), strict=True):
        own = [each for each in trials if each.point == point]
        assert trial.mean == max(each.mean for each in own if math.isfinite(each.mean))
        assert trial.mean == pytest.approx(90.5 - 10 * abs(math.log10(trial.value / peak)))
        assert trial.std == pytest.approx(statistics.stdev([0, 1]))
        assert 0.6 < trial.value / peak < 1.6
    rows = list(csv.DictReader(as_csv(trials, SPAN).splitlines()))
    assert [float(row["optim.lr"]) for row in rows] == [trial.value for trial in trials]
    failed = [row for row in rows if float(row["optim.lr"]) > 0.5]
    assert failed
    assert all(row["top1"] == "" for row in failed)


def test_a_stopped_search_takes_up_the_trial_that_it_was_at(cells, tmp_path):
    first = Trainer(tmp_path, stop_at=4)
    assert search(cells, SPAN, 5, tmp_path, first) is None
    second = Trainer(tmp_path)
    trials = search(cells, SPAN, 5, tmp_path, second)
    assert second.tried[0] == first.tried[-1]
    assert len(trials) == 10
    assert [trial.value for trial in trials] == [value for _, value in (*first.tried[:-1], *second.tried)]
    again = Trainer(tmp_path)
    assert search(cells, SPAN, 5, tmp_path, again) == trials
    assert again.tried == []


@pytest.mark.parametrize(
    ("key", "low", "high", "message"),
    [
        ("optim.lr", 1.0, 0.1, "the first must be smaller"),
        ("optim.lr", 0.0, 0.1, "must be above 0"),
        ("model.channels", 8.0, 16.0, "the study varies it"),
        ("optim.rate", 0.1, 0.2, "optim.rate"),
        ("train.seed", 1.0, 2.0, "the study varies it"),
    ],
)
def test_what_cannot_be_searched(cells, tmp_path, key, low, high, message):
    with pytest.raises(InputError, match=message):
        search(cells, Range(key, low, high, log=True), 2, tmp_path, Trainer(tmp_path))
