"""evaluations.jsonl: a line for each evaluation of a run's checkpoint, and why there is none."""

import json
import math
from pathlib import Path

from widemix.run.evaluations import NAME, record_evaluation


def test_lines_are_appended_to_the_run_and_only_to_a_run(tmp_path):
    checkpoint = tmp_path / "run/checkpoints/00000007"
    checkpoint.mkdir(parents=True)
    assert record_evaluation(checkpoint, {"top1": 50.0}) is None  # there is no run
    assert not (tmp_path / "run" / NAME).exists()
    (tmp_path / "run/recipe.yaml").touch()
    assert record_evaluation(checkpoint, {"top1": 50.0, "step": 7}) is None
    assert record_evaluation(checkpoint, {"top1": math.nan, "split": "test"}) is None
    lines = [json.loads(line) for line in (tmp_path / "run" / NAME).read_text().splitlines()]
    assert lines == [{"top1": 50.0, "step": 7}, {"top1": None, "split": "test"}]


def test_the_run_of_a_checkpoint_is_found_from_within_it_and_figures_that_are_0_stay(tmp_path, monkeypatch):
    checkpoint = tmp_path / "run/checkpoints/00000007"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run/recipe.yaml").touch()
    monkeypatch.chdir(checkpoint)
    assert (
        record_evaluation(Path(), {"loss": math.inf, "r2": -math.inf, "top1": 0.0, "ema": False, "step": 0}) is None
    )
    assert json.loads((tmp_path / "run" / NAME).read_text()) == {
        "loss": None, "r2": None, "top1": 0.0, "ema": False, "step": 0
    }  # fmt: skip


def test_what_cannot_be_written_is_said(tmp_path):
    checkpoint = tmp_path / "run/checkpoints/00000007"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run/recipe.yaml").touch()
    (tmp_path / "run" / NAME).mkdir()
    said = record_evaluation(checkpoint, {"top1": 50.0})
    assert said == f"{tmp_path / 'run' / NAME}: cannot be written to (Is a directory)"
