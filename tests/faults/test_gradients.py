"""Gradients that stay NaN with a finite loss: the run knows at the step, and rolls back, whatever `log.every` is."""

import json

import pytest

from tests.faults.ranks import ranks

FP16 = ("--engine.kind", "deepspeed", "--train.precision", "fp16")


@pytest.mark.parametrize(
    ("fault", "options", "excluded"),
    [
        ("gradient@6-12", (), [6, 10]),
        # fp16 first looks for a loss scale: 20 steps. DeepSpeed's least scale, after 17, was an error of its own.
        # Few channels: on a CPU fp16 takes its time.
        ("half@0,gradient@6-40", (*FP16, "--model.channels", "16"), [26, 30]),
    ],
)
def test_a_run_rolls_back_when_too_many_steps_have_failed(digits, tmp_path, fault, options, excluded):
    run = tmp_path / "run"
    options = (*options, "--log.every", "50", "--train.save_every_steps", "4", "--train.max_steps", "45")
    codes, output = ranks(1, fault, digits, run, *options).wait()
    assert codes == [0], output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line.get("event") == "rollback")
    assert first["skipped_ranges"] == excluded
    assert first["from"] == excluded[1]  # and not step 50
    assert json.loads((run / "done.json").read_text())["step"] == 45
