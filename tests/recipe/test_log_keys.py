"""Every key of section `log` does what its help says, with a value that is not its default."""

import json
import math
from collections import defaultdict
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.recipe.small_runs import Row, SmallRun
from widemix.recipe.sections import LogSection
from widemix.run import trackers


def every_third(run: SmallRun) -> list[Any]:
    """The steps and losses of lines of three steps, and of the two that are left."""
    return [3, 6, 8, *(pytest.approx(fmean(run.losses[first:last])) for first, last in ((0, 3), (3, 6), (6, 8)))]


def in_tensorboard(run: SmallRun) -> list[Any]:
    """Steps, losses of training, and accuracies of evaluations."""
    board = EventAccumulator(str(run.folder), {"scalars": 0})
    board.Reload()
    names = [name for name in ("loss/train", "eval/top1") if name in board.Tags()["scalars"]]
    return [[(event.step, pytest.approx(event.value)) for event in board.Scalars(name)] for name in names]


def in_metrics(run: SmallRun) -> list[Any]:
    pairs = (("train", "loss"), ("eval", "top1"))
    return [list(zip(run.column(split, "step"), run.column(split, name), strict=True)) for split, name in pairs]


def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases and MLflow write their lines into files of the run folder."""

    def tracker(name: str) -> type:
        class Recorder:
            id = name

            def __init__(self, run_dir, *_):
                self.path = run_dir / f"{name}.jsonl"

            def add_line(self, line):
                with self.path.open("a") as file:
                    file.write(f"{json.dumps(line)}\n")

            def close(self, failed):
                return None

        return Recorder

    monkeypatch.setattr(trackers, "_TRACKERS", {name: tracker(name) for name in ("wandb", "mlflow")})


def in_file_of(name: str) -> Row:
    def seen(run: SmallRun) -> list[str]:
        return [
            path.read_text()
            for path in (run.folder / f"{each}.jsonl" for each in ("wandb", "mlflow"))
            if path.exists()
        ]

    def expected(run: SmallRun) -> list[str]:
        assert [path.stem for path in run.folder.glob("*.jsonl") if path.stem in ("wandb", "mlflow")] == [name]
        return [(run.folder / "metrics.jsonl").read_text()]

    return Row("true", seen, expected, patch=in_files)


def block_norms(run: SmallRun) -> list[dict[str, float]]:
    lines = run.lines("train")
    return [{key: value for key, value in line.items() if key.startswith("grad_norm/")} for line in lines]


def gradients_by_block(run: SmallRun) -> object:
    """Of the steps 3, 6 and 8, from what plain SGD has subtracted from the weights."""
    found = []
    for step in (3, 6, 8):
        squares: dict[str, float] = defaultdict(float)
        before, after = run.weights[step - 1 : step + 1]
        for name in before:
            block = ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])
            gradient = (before[name] - after[name]).double() / run.rates[step - 1]
            squares[f"grad_norm/{block}"] += gradient.square().sum().item()
        found.append(pytest.approx({name: math.sqrt(square) for name, square in squares.items()}, rel=1e-3))
    return found


def tiles(run: SmallRun, name: str) -> int:
    """Images of 8 x 8 pixels in a grid of one row, each 14 times as large, with gaps of 8."""
    path = run.folder / f"images/{name}.png"
    if not path.exists():
        return 0
    with Image.open(path) as image:
        return (image.width - 8) // (14 * 8 + 8)


def confusions_and_mistakes(run: SmallRun) -> tuple[Any, int]:
    path = run.folder / "confusion.json"
    return json.loads(path.read_text())["counts"] if path.exists() else None, tiles(run, "mistakes")


def expected_confusions(run: SmallRun) -> tuple[Any, int]:
    labels = {int(i): int(j) for (b,) in run.steps for i, j in zip(b.samples, b.targets.argmax(1), strict=True)}
    counts = np.zeros((10, 10), int)
    for number, guess in enumerate(run.called("head", training=False)[-1][1].argmax(1).tolist()):
        counts[labels[number], guess] += 1
    assert counts.sum() - counts.trace() > 3
    return counts.tolist(), 3


PLAIN_SGD = (
    ("schedule.name", "constant"),
    ("optim.name", "sgd"),
    ("optim.momentum", "0"),
    ("optim.weight_decay", "0"),
    ("optim.lr", "0.5"),
)
LOG = {
    "every": Row("3", lambda run: [*run.column("train", "step"), *run.column("train", "loss")], every_third),
    "tensorboard": Row("true", in_tensorboard, in_metrics),
    "wandb": in_file_of("wandb"),
    "mlflow": in_file_of("mlflow"),
    "block_norms": Row("true", block_norms, gradients_by_block, (("log.every", "3"), *PLAIN_SGD)),
    "mistakes": Row("3", confusions_and_mistakes, expected_confusions),
    "images": Row("3", lambda run: tiles(run, "first_batch"), 3),
}


@pytest.mark.parametrize("key", LOG)
def test_a_key_does_what_it_is_for(key, runs):
    LOG[key].check(f"log.{key}", runs)


def test_the_table_has_every_key():
    assert set(LOG) == set(LogSection.model_fields)
