"""Every shipped recipe starts, trains, saves, goes on and evaluates, on data in its source's own layout."""

import gzip
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.prepare import prepare
from data_prep.settings import PrepSettings
from pipeline.commands import Exit
from pipeline.recipe import load_recipe
from pipeline.train import train
from tests.conftest import ROOT

SHIPPED = sorted(path for path in ROOT.glob("recipes/*/*.yaml") if path.parent.name != "base")


def class_folders(folder: Path) -> None:
    """Eight pictures of two classes to train on, five to evaluate on."""
    numbers = np.random.RandomState(0)
    for split, count in (("train", 8), ("val", 5)):
        for i in range(count):
            path = folder / split / f"n0000000{i % 2}" / f"{i}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(numbers.randint(0, 256, (40, 50, 3)).astype(np.uint8)).save(path)


def idx_files(folder: Path) -> None:
    numbers = np.random.RandomState(0)
    for name, count in (("train", 8), ("t10k", 5)):
        images, labels = numbers.randint(0, 256, (count, 28, 28)), numbers.randint(0, 10, count)
        for kind, head, values in (
            ("images-idx3", struct.pack(">4i", 2051, count, 28, 28), images),
            ("labels-idx1", struct.pack(">2i", 2049, count), labels),
        ):
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))


def cifar_bin(labels: int) -> Callable[[Path], None]:
    """Binary CIFAR with so many label bytes a picture: 1 is CIFAR-10, 2 is CIFAR-100."""

    def write(folder: Path) -> None:
        numbers = np.random.RandomState(0)
        train = [f"data_batch_{i}.bin" for i in range(1, 6)] if labels == 1 else ["train.bin"]
        for name in (*train, "test_batch.bin" if labels == 1 else "test.bin"):
            rows = numbers.randint(0, 256, (8, labels + 3072)).astype(np.uint8)
            rows[:, :labels] = numbers.randint(0, 10, (8, labels))
            (folder / name).write_bytes(rows.tobytes())
        if labels == 1:
            (folder / "batches.meta.txt").write_text("".join(f"class{i}\n" for i in range(10)))
        else:
            (folder / "fine_label_names.txt").write_text("".join(f"class{i}\n" for i in range(100)))
            (folder / "coarse_label_names.txt").write_text("".join(f"group{i}\n" for i in range(20)))

    return write


def pair_files(folder: Path) -> None:
    """Eight pairs to train on, five to evaluate on, and a vocabulary."""
    for split, count in (("train", 8), ("dev_matched", 5)):
        rows = [f"{'neutral' if i % 2 else 'entailment'}\tsome people eat\tpeople eat {i}" for i in range(count)]
        (folder / f"{split}.tsv").write_text("\n".join(["gold_label\tsentence1\tsentence2", *rows]) + "\n")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "some", "people", "eat", *map(str, range(10))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")


LAYOUTS = {
    "digits": None,
    "imagenet": class_folders,
    "mnist": idx_files,
    "cifar10": cifar_bin(1),
    "cifar100": cifar_bin(2),
    "mnli": pair_files,
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepare a source once: prepared(name) -> folder."""
    folders: dict[str, Path] = {}

    def of(source: str) -> Path:
        if source not in folders:
            write, target = LAYOUTS[source], tmp_path_factory.mktemp("prepared")
            origin = tmp_path_factory.mktemp(source) if write else None
            if write:
                write(origin)
            prepare(source, origin, target, PrepSettings(), processes=1)
            folders[source] = target
        return folders[source]

    return of


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_trains_saves_goes_on_and_evaluates(path, prepared, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    shipped = load_recipe(path)
    shape = [] if shipped.model.kind == "shallow" else [("model.depth", "1")]
    mixing = [("augment.mix_group", "2")] if shipped.data.kind == "pictures" else []
    overrides = [
        *(shape + mixing),
        ("data.path", str(prepared(path.parent.name))),
        ("train.global_batch", "4"),
        ("log.every", "1"),
        ("eval.batch", "4"),
    ]
    run = tmp_path / "run"
    for steps in (2, 3):
        recipe = load_recipe(path, [*overrides, ("train.max_steps", str(steps))])
        assert train(recipe, run, "auto", path) == Exit.DONE
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 3]
    assert all(np.isfinite(line["loss"]) for line in lines)
    done = json.loads((run / "done.json").read_text())
    assert done["step"] == 3
    assert done["loss"] == lines[-1]["loss"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipes_header_says_how_and_what(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for word in (
        "prepare   widemix prep",
        f"command   widemix train {path.relative_to(ROOT)}",
        "expected  ",
        "cost      ",
    ):
        assert any(line.startswith(f"#   {word}") for line in header), word
    assert not any(re.search(r"MEASURED|TODO", line) for line in header)
