"""Folders of coefficients: a copy of one trains as the JPEGs do, and FFCV's readers do not get it."""

import json

import pytest

import widemix
from widemix.data_prep.adopt import adopt
from widemix.data_prep.verify import verify
from widemix.errors import InputError
from widemix.launch.stage import stage


def test_a_staged_copy_trains_and_evaluates_alike(images, coefficients, tmp_path):
    """To equal losses, gradients and metrics, with the loader's own augmentation and mixup."""
    copy, lines = stage(coefficients, tmp_path / "local"), []
    assert verify(copy) == []
    for number, folder in enumerate((images, copy)):
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


def test_coefficients_are_not_adopted(coefficients, tmp_path):
    message = r"train\.beton: holds coefficients, not FFCV's images; use the folder that it was made in$"
    with pytest.raises(InputError, match=message):
        adopt({"train": coefficients / "train.beton"}, tmp_path / "adopted")
    assert not (tmp_path / "adopted").exists()
