"""Folders of coefficients and copies of them, read by every reader: what the same folder of JPEGs gives."""

import json
import re
from pathlib import Path

import pytest

import widemix
from tests.data.loading import FULL, damage, place, read, same, section, steps, train_loader
from tests.layouts import two_classes
from widemix.data.loader import EvalLoader
from widemix.data_prep.adopt import adopt
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import verify
from widemix.errors import InputError
from widemix.formats.beton import COEFFICIENTS, open_beton
from widemix.launch.stage import stage

BAD = 3, 30, 31  # samples of train


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    """The same images as JPEGs and as coefficients."""
    two_classes(tmp_path / "images")
    for encoding in ("jpeg", "coefficients"):
        settings = PrepSettings(encoding=encoding)
        prepare("image-folder", tmp_path / "images", tmp_path / encoding, settings, processes=1)
    assert (open_beton(tmp_path / "coefficients/train.beton").mode == COEFFICIENTS).all()
    return {encoding: tmp_path / encoding for encoding in ("jpeg", "coefficients")}


def test_a_staged_copy_trains_and_evaluates_alike(folders, tmp_path):
    """To equal losses, gradients and metrics, with the loader's own augmentation and mixup."""
    copy, lines = stage(folders["coefficients"], tmp_path / "local"), []
    assert verify(copy) == []
    for number, folder in enumerate((folders["jpeg"], copy)):
        recipe = {
            "data": {"path": str(folder), "num_classes": 2, "image_size": 16, "workers": 1},
            "augment": {"auto_augment": "rand-m9-mstd0.5-inc1", "mixup": 0.2, "mix_group": 4},
            "model": {"kind": "mixer", "patch_size": 4, "tokens": 16, "channels": 8, "depth": 1, "expansion": 2},
            "optim": {"name": "adamw", "lr": 1e-3},
            "train": {"epochs": 2, "global_batch": 16, "precision": "fp32"},
            "log": {"every": 1, "tensorboard": False},
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        widemix.train(widemix.load_recipe(tmp_path / "recipe.yaml"), tmp_path / f"run{number}")
        rows = [*map(json.loads, (tmp_path / f"run{number}/metrics.jsonl").read_text().splitlines())]
        lines.append([[row.get(key) for key in ("step", "split", "loss", "top1", "grad_norm")] for row in rows])
        assert sum(row["split"] == "train" for row in rows) == 6
    assert lines[0] == lines[1]


@pytest.mark.parametrize("order", ["random", "paged"])
def test_damaged_samples_are_replaced_alike(folders, order, capsys):
    found = []
    for folder in folders.values():
        damage(folder, *BAD)
        found.append(steps(section(folder, order=order, shuffle_window_mib=1, on_corrupt="replace"), FULL))
    assert same(*found)
    words = r"sample (\d+) \(train/(.*)\) cannot be read: (.*?); .*replaced by"
    warnings = re.findall(words, capsys.readouterr().err)
    assert len(warnings) == 2 * len({sample for sample, *_ in warnings}) > 0
    assert {reason for *_, reason in warnings} == {"its bytes differ from its checksum"}


@pytest.mark.parametrize("checksums", [True, False])
def test_damaged_samples_are_named(folders, checksums):
    """Also by the decoder alone, of what it can notice; in evaluation no other image takes their place."""
    folder = folders["coefficients"]
    damage(folder, *BAD)
    damage(folder, 5, split="val")
    reason = "its bytes differ from its checksum" if checksums else ".*damaged"
    line = r"{}\.beton: sample {} \({}/class\d/\d+\.jpg\) cannot be read: " + reason
    words = line.format("train", r"(3|30|31)", "train") + ".*; --data.on_corrupt replace"
    with pytest.raises(InputError, match=words):
        read(train_loader(section(folder, checksums=checksums)), 1)
    for on_corrupt in ("error", "replace"):
        loader = EvalLoader(section(folder, checksums=checksums, on_corrupt=on_corrupt), 4, place())
        with pytest.raises(InputError, match=line.format("val", 5, "val")):
            read(loader)
    assert {int(sample) for line in verify(folder) for sample in re.findall(r"sample (\d+) \(", line)} == {5, *BAD}


def test_coefficients_are_not_adopted(folders, tmp_path):
    path = folders["coefficients"] / "train.beton"
    message = r"train\.beton: holds coefficients, not FFCV's images; use the folder that it was made in$"
    with pytest.raises(InputError, match=message):
        adopt({"train": path}, tmp_path / "adopted")
    assert not (tmp_path / "adopted").exists()
