"""`widemix train --dry-run`: what a run would do, and nothing written."""

import re

import yaml

from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.recipe import dump_recipe, load_recipe


def test_a_dry_run_prints_recipe_cost_and_batch(digits, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["digits/rp_mixer", "--data.path", str(digits), "--train.epochs", "3", "--data.workers", "1"]
    assert run_command(make_parser(), None, ["train", *words, "--run-dir", "run", "--ranks", "2", "--dry-run"]) == 0
    said = capsys.readouterr().out
    overrides = [("data.path", str(digits)), ("train.epochs", "3"), ("data.workers", "1")]
    assert yaml.safe_load(said[: said.index("first batch of rank 0")]) == yaml.safe_load(
        dump_recipe(load_recipe("digits/rp_mixer", overrides))
    )
    here, there = said.index("on this machine (CPU, "), said.index("digits/rp_mixer: an estimate for 2 x A100")
    assert here < there < said.index("GPU hours")
    assert "hidden width" not in said[there:]  # which `widemix cost` has
    assert re.search(r"about [\d.]+ (ms|s|min) for all steps, [\d,]+ samples/s, a step [\d.]+ (ms|s) \(", said)
    assert "32 x 3 x 8 x 8, torch.float32" in said  # half of the batch of 64
    assert "22 steps an epoch" in said
    assert said.endswith("nothing was written\n")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_has_no_launcher(monkeypatch, capsys, tmp_path):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run_command(make_parser(), None, ["train", "digits/mixer", "--dry-run"]) == 2
    assert "--dry-run: is for `widemix train` alone" in capsys.readouterr().err
