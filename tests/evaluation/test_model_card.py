"""The card of an export, read by huggingface_hub, and its Python run as it stands."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from PIL import Image

from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.evaluation.export import export_checkpoint, model_card
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.recipe import dump_recipe, load_recipe
from widemix.run import checkpoint


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


def test_the_card_has_the_evaluations_until_its_checkpoint(run, digits, tmp_path):
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


def carded(run: Path, digits: Path, rows: list[dict], keys: dict, tmp_path: Path, *options: Any) -> ModelCard:
    """The card of the run's checkpoint at step 3 with these evaluations, and another recipe of the same data."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text("")
    row = {"step": 3, "ema": False, "data": str(digits), "samples": 9, "time": 1.0, "loss": 1.0}
    lines = "".join(f"{json.dumps(row | own)}\n" for own in rows)
    (tmp_path / "run/evaluations.jsonl").write_text(lines)
    name = "mnli/mixer" if keys.pop("text", False) else "digits/mixer"
    recipe = load_recipe(name, [("data.path", str(digits))])
    recipe = recipe.model_copy(
        update={"data": recipe.data.model_copy(update=keys), "plugins": tuple(keys.pop("plugins", ()))}
    )
    return ModelCard(model_card(checkpoint.find(tmp_path / "run"), recipe, "exported", *options))


def test_a_cards_numbers_are_those_of_its_steps_last_evaluation(run: Path, digits: Path, tmp_path: Path) -> None:
    given: list[dict] = [
        {"split": "val", "loss": 0.0, "top1": 10.0, "top5": 20.0},
        {"data": "/data/other", "split": "test", "loss": None, "top1": 55.123456, "top5": None},
    ]
    card = carded(run, digits, given, {}, tmp_path)
    name, recipe = digits.name, load_recipe("digits/mixer", [("data.path", str(digits))])
    assert (
        f"\n| 3 | {name} | val | 0.0000 | 10.00 % | 20.00 % |\n| 3 | other | test | - | 55.12 % | - |\n" in card.text
    )
    assert "| step | data | split | loss | top-1 | top-5 |" in card.text
    (top1,) = card.data.eval_results or []
    assert (top1.metric_type, top1.metric_value, top1.metric_name) == ("accuracy", 55.1235, "top-1")
    assert (top1.dataset_name, top1.dataset_type, top1.dataset_split) == ("other", "other", "test")
    assert (top1.task_type, card.data.pipeline_tag) == ("image-classification",) * 2
    assert card.data.tags == ["image-classification", "widemix"]
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "widemix")
    assert card.data.model_name == recipe.model.summary(8)
    assert "The weights after 3 steps of the recipe below" in card.text
    assert "`digits`, prepared by" in card.text
    for split, own in read_manifest(digits).splits.items():
        hashed = blake3(" ".join(own.blocks).encode()).hexdigest()[:32]
        assert f"| {split} | {own.samples} | `{hashed}` |" in card.text
    assert f"```yaml\n{dump_recipe(recipe).rstrip()}\n```" in card.text


def test_no_name_of_a_card_is_anything_but_text(run: Path, digits: Path, tmp_path: Path) -> None:
    """By a reader of Markdown that takes HTML. The page of a study is made by the same functions."""
    evil = "a\n```\n<script>alert(1)<\\script> ![x](http:evil) | `b` [c](javascript:d)\n# head"
    (tmp_path / evil).mkdir()
    manifest = read_manifest(digits)
    manifest = manifest.model_copy(update={"splits": manifest.splits | {evil: manifest.splits["train"]}})
    (tmp_path / evil / "manifest.json").write_text(manifest_json(manifest))
    row = {"data": evil, "split": evil, "top1": 10.0, "top5": 20.0}
    text = carded(run, digits, [row], {"path": str(tmp_path / evil)}, tmp_path).text
    shown = MarkdownIt("commonmark").enable("table").render(text)
    assert not re.search(r"<(script|img|a)\b", shown)
    assert len(re.findall("<h[1-6]>", shown)) == 4
    assert shown.count("alert(1)") == 4  # of the evaluation twice, of the data's split and of the recipe


def test_a_card_of_the_average_without_evaluations_says_so(run: Path, digits: Path, tmp_path: Path) -> None:
    keys = {"path": "none", "plugins": ["my_family"]}
    card = carded(run, digits, [{"split": "val", "top1": 1.0, "top5": 1.0}], keys, tmp_path, True, "mit")
    assert "The averaged weights after 3 steps" in card.text
    assert "import widemix, my_family, timm\n" in card.text
    assert (card.data.model_name, card.data.license) == (None, "mit")
    assert "`none`, which was not there when this was exported." in card.text


@pytest.mark.parametrize(
    ("keys", "metrics", "task", "tag"),
    [
        ({"targets": "multilabel"}, ["map"], "image-classification", "image-classification"),
        ({"targets": "regression"}, ["mae", "r2"], "image-regression", None),
        ({"text": True}, ["accuracy", "top5"], "text-classification", "text-classification"),
    ],
)
def test_the_hub_knows_what_a_network_is_for(
    run: Path, digits: Path, tmp_path: Path, keys: dict, metrics: list[str], task: str, tag: str | None
) -> None:
    row = {"split": "val", "map": 1.0, "mae": 0.0, "r2": 1.0, "top1": 1.0, "top5": 1.0}
    card = carded(run, digits, [row], dict(keys), tmp_path)
    results = card.data.eval_results or []
    assert [result.metric_type for result in results] == metrics
    assert {result.task_type for result in results} == {task}
    assert card.data.pipeline_tag == tag
    assert card.data.tags == [*([tag] if tag else []), "widemix"]
    assert ("create_transform" in card.text) == ("text" not in keys)


def test_the_lines_of_the_card_run(run: Path, tmp_path: Path) -> None:
    """Without timm they make of a file what timm's transform does."""
    text = card_of(run, tmp_path / "exported").text
    alone, ours = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    pixels = np.random.default_rng(0).integers(0, 256, (23, 31, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "exported/image.jpg")
    ours += 'from PIL import Image\nlogits = model(transform(Image.open("exported/image.jpg"))[None])'
    logits = []
    for code, where in ((alone, tmp_path / "exported"), (ours, tmp_path)):
        words = [sys.executable, "-c", f"{code}\nprint(*logits[0].tolist())"]
        printed = subprocess.run(words, cwd=where, capture_output=True, text=True, check=True)
        logits.append([float(word) for word in printed.stdout.split()])
    assert len(logits[0]) == 10
    assert logits[0] == pytest.approx(logits[1], abs=1e-5)
