"""`widemix bench loop`: the steps of real runs beside bare ones, of a recipe's network or of a time in its place."""

import json
import statistics
from pathlib import Path

import pytest

from widemix.run.records import read_lines

WORDS = "bench loop digits/mixer --rounds 2 --lines 1 --log.every 3 --train.profile 1:2 --data.workers 1"


@pytest.mark.parametrize(
    ("options", "least"), [((), 0), (("--step-ms", "30"), 30), (("--step-ms", "2", "--launch-ms", "20"), 20)]
)
def test_rows_are_those_of_the_runs_that_are_kept(options, least, digits: Path, tmp_path, widemix):
    """Of all steps but the first three; with a time in place of the network they take that."""
    outputs = ("--to", tmp_path / "runs", "--json", tmp_path / "rows.json")
    assert widemix(*WORDS.split(), "--data.path", digits, *outputs, *options)[0] == 0
    bare, whole = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (bare["name"], whole["name"]) == ("bare step", "loader and loop")
    runs = sorted((tmp_path / "runs").iterdir())
    lines = [read_lines(run / "metrics.jsonl") for run in runs]
    assert [[line["step"] for line in of_run] for of_run in lines] == [[3, 6], [3, 6]]
    assert [len([*run.glob("profile/*.json.gz")]) for run in runs] == [1, 1]
    steps, waits = [64 / last["images_per_s"] for _, last in lines], [last["data_wait"] for _, last in lines]
    assert whole["samples"] == pytest.approx(steps)
    assert whole["step_ms"] == round(1e3 * statistics.median(steps), 3)
    assert whole["images_per_s"] == round(64 / statistics.median(steps), 1)
    waited = statistics.median(step * wait for step, wait in zip(steps, waits, strict=True))
    assert whole["data_wait_ms"] == pytest.approx(1e3 * waited, abs=1e-3)
    ratio = statistics.median(one / other for one, other in zip(bare["samples"], steps, strict=True))
    assert (bare["ratio"], whole["ratio"]) == (1, pytest.approx(ratio, abs=1e-4))
    assert min(bare["step_ms"], whole["step_ms"]) > 0.95 * least  # the host is up to a step ahead
