"""The card of an export, read by huggingface_hub, and its Python run as it stands."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.evaluation.trained import export_checkpoint


def widemix(*words: object) -> None:
    assert run_command(make_parser(), None, [*map(str, words)]) == 0


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "run"
    options = ["--train.max_steps", 3, "--model.depth", 1, "--log.tensorboard", "false", "--data.workers", 1]
    widemix("train", "digits/mixer", "--run-dir", folder, "--data.path", digits, *options, "--eval.every_epochs", 9)
    return folder


def card_of(run: Path, to: Path) -> ModelCard:
    export_checkpoint(run, to, licence="cc-by-4.0")
    return ModelCard.load(to / "README.md")


def test_a_later_evaluation_is_in_the_card_and_in_the_run(run: Path, digits: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    widemix("eval", copy, "--split", "train", "--json", tmp_path / "train.json")
    found = json.loads((tmp_path / "train.json").read_text())
    (line,) = map(json.loads, (copy / "evaluations.jsonl").read_text().splitlines())
    assert (line["step"], line["split"], line["samples"], line["ema"]) == (3, "train", 1437, False)
    assert line["top1"] == found["top1"]
    card = card_of(copy, tmp_path / "exported")
    assert f"| 3 | {digits.name} | train | {found['loss']:.4f} | {found['top1']:.2f} %" in card.text
    top1 = next(result for result in card.data.eval_results or [] if result.metric_type == "accuracy")
    assert top1.metric_value == pytest.approx(found["top1"], abs=1e-4)
    assert (top1.dataset_name, top1.dataset_split) == (digits.name, "train")
    assert card.data.license == "cc-by-4.0"
    assert card.data.library_name == "timm"
    assert card.data.pipeline_tag == "image-classification"


def test_the_card_has_the_evaluations_until_the_checkpoint_and_its_head_those_of_its_step(run, digits, tmp_path):
    """Pretended ones: at steps 2 and 4 of a checkpoint at step 3; with averaged weights too, which are others'."""
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run/metrics.jsonl"
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if line["split"] != "eval"]
    card = write_and_load(path, lines, tmp_path / "none")
    assert "\nNone; `widemix eval` of the run measures it" in card.text
    assert not card.data.eval_results
    numbers = {"loss": 1.0, "top5": 90.0, "ema_loss": 2.0, "ema_top1": 99.0, "ema_top5": 99.0}
    lines += [{"step": step, "split": "eval", "epoch": 1.0, **numbers, "top1": 10.0 + step} for step in (2, 4)]
    card = write_and_load(path, lines, tmp_path / "before")
    rows = [line for line in card.text.splitlines() if line.endswith(" % |")]
    assert rows == [f"| 2 | {digits.name} | test | 1.0000 | 12.00 % | 90.00 % |"]
    assert not card.data.eval_results
    lines.append({"step": 3, "split": "eval", "epoch": 1.0, **numbers, "top1": 13.0})
    card = write_and_load(path, lines, tmp_path / "own")
    assert [result.metric_value for result in card.data.eval_results or []] == [13.0, 90.0]


def write_and_load(path: Path, lines: list[dict], to: Path) -> ModelCard:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return card_of(path.parent, to)


def test_a_checkpoint_away_from_its_run_is_evaluated_without_a_record(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints/00000003", tmp_path / "a/b/00000003")
    widemix("eval", tmp_path / "a/b/00000003")
    assert not list(tmp_path.rglob("evaluations.jsonl"))


def test_the_lines_of_the_card_run(run: Path, tmp_path: Path) -> None:
    card = card_of(run, tmp_path / "exported")
    found = re.search(r"```python\n(.*?)```", card.text, re.DOTALL)
    assert found
    lines = found[1].splitlines()
    assert len(lines) == 3
    code = "\n".join(
        [*lines, "from PIL import Image", "print(model(transform(Image.new('RGB', (9, 9)))[None]).shape)"]
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert printed.stdout == "torch.Size([1, 10])\n"
