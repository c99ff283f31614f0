"""What prepares data, lists and reports runs, or answers a mistake imports neither torch nor timm, which are slow."""

import json
import subprocess
import sys

from tests.clone import CLONE, ROOT
from widemix.recipe import dump_recipe, load_recipe

PROGRAM = """
import contextlib, io, sys
import widemix
widemix.prepare, widemix.load_recipe
from widemix.cli import main
for code, words in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sys.argv = ["widemix", *words]
        try:
            main()
        except SystemExit as end:
            assert end.code == code, words
    heavy = {{"torch", "timm", "numba", "scipy", "matplotlib", "deepspeed", "torchvision"}} & sys.modules.keys()
    assert not heavy, (words, heavy)
"""


def test_preparing_listing_and_planning_need_no_torch(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(dump_recipe(load_recipe(ROOT / "recipes/digits/mixer.yaml")))
    (run / "environment.json").write_text("{}")
    line = {"split": "train", "step": 1, "epoch": 0.1, "loss": 2.0, "lr": 0.1, "images_per_s": 9.0, "time": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    commands = [
        ["runs", str(tmp_path)],
        ["runs", "diff", str(run), str(run)],
        ["runs", "csv", str(tmp_path)],
        ["report", str(run), "--to", str(tmp_path / "page.html")],
        ["study", "plan", "figure7", "--to", str(tmp_path / "study")],
    ]
    missing = str(tmp_path / "missing")
    mistakes = [
        ["eval", missing],
        ["predict", missing, str(tmp_path)],
        ["export", missing, "--to", str(tmp_path / "x")],
        ["push", missing, "owner/name"],
        ["train", "digits/mixer", "--data.path", missing, "--model.depht", "2"],
        ["analyse", "cka", missing, missing, "--to", str(tmp_path / "x")],
        *(["analyse", name, missing] for name in ("spectrum", "weights", "pixels", "filters")),
        ["bench", "inference", missing],
        ["study", "report", missing],
        ["submit", missing],
    ]
    program = PROGRAM.format(commands=[(0, words) for words in commands] + [(2, words) for words in mistakes])
    done = subprocess.run([sys.executable, "-c", program], cwd=CLONE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
