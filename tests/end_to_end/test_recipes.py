"""Every shipped recipe starts, trains, saves, goes on and evaluates, on data in its source's own layout."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import widemix
from tests.conftest import ROOT
from tests.layouts import LAYOUTS
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.estimate.recipe_tables import header, shipped
from widemix.evaluation.assessment import assess
from widemix.recipe import Recipe, load_recipe

SHIPPED = shipped(ROOT / "recipes")
# What makes a network of each kind tiny.
SMALLER = {
    "mixer": {"depth": 1, "channels": 8, "token_hidden": 8, "channel_hidden": 8},
    "s_mixer": {"depth": 1, "channels": 8},
    "ff_only": {"depth": 1, "channels": 8},
    "permutator": {"depth": 1, "channels": 8},
    "repmlp": {"depth": 1, "channels": 8},
    "resmlp": {"depth": 1, "channels": 8},
    "gmlp": {"depth": 1, "channels": 8},
    "sw_mlp": {"depth": 1, "width": 64, "channels": 1},
    "bottleneck_mlp": {"depth": 1, "width": 8},
    "shallow": {"width": 16},
    "s_fc": {"base_channels": 1},
    "timm": {},
    "text_mixer": {"depth": 1, "channels": 8},
    "text_transformer": {"depth": 1, "channels": 8},
}
# How folders are prepared where not by default.
PREPARED = {"imagenet21k": {"holdout": 0.4}, "far-pairs": {"length": 17, "vocab_size": 100}}
# What the runs that others start from are trained by, and on, where their names do not say it.
STARTS = {"runs/cifar10": ("cifar10/mixer_small", "cifar10")}


def layout(name: str):
    """The source of a prepared folder, and what writes it: of few-shot data, that of all."""
    return LAYOUTS[re.sub(r"-\d+-shot$", "", name)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepare a folder of the recipes once: prepared(name) -> where it is."""
    folders: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in folders:
            source, write = layout(name)
            target = tmp_path_factory.mktemp("prepared")
            origin = tmp_path_factory.mktemp(name) if write else None
            if write:
                write(origin)
            settings = PrepSettings(**PREPARED.get(name, {}))
            prepare(source, origin, target, settings, processes=1)
            folders[name] = target
        return folders[name]

    return of


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, prepared):
    """Tiny runs of what other recipes start from: pretrained(train.init_from) -> run folder."""
    runs: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in runs:
            place, data = STARTS.get(name, (f"imagenet/{Path(name).name.replace('-', '_')}", "imagenet21k"))
            path = ROOT / f"recipes/{place}.yaml"
            whole = load_recipe(path)
            overrides = [*tiny(whole), ("data.path", str(prepared(data))), ("train.max_steps", "1")]
            runs[name] = tmp_path_factory.mktemp("pretrained") / "run"
            assert widemix.train(load_recipe(path, overrides), runs[name])
        return runs[name]

    return of


def tiny(recipe: Recipe) -> list[tuple[str, str]]:
    """Overrides that leave everything of a recipe but its size and number of classes."""
    given = recipe.model.model_dump(exclude_none=True)
    model = {key: value for key, value in SMALLER[recipe.model.kind].items() if key in given}
    if "token_hidden" in model:
        model["token_hidden"] = given["token_hidden"] // 48  # which grows with the image
    mixup = [("augment.mix_group", "2")] if recipe.data.kind == "images" else []
    shared = {"train.global_batch": 4, "log.every": 1, "log.tensorboard": "false", "log.images": 0, "data.workers": 1}
    shared["data.num_classes"] = 0
    return [
        *((f"model.{key}", str(value)) for key, value in model.items()),
        *mixup,
        *((k, str(v)) for k, v in shared.items()),
    ]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_trains_saves_goes_on_and_evaluates(path, prepared, pretrained, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    whole = load_recipe(path)
    folder = prepared(Path(whole.data.path).name)
    overrides = [*tiny(whole), ("data.path", str(folder))]
    if whole.train.init_from:
        overrides.append(("train.init_from", str(pretrained(whole.train.init_from))))
    run = tmp_path / "run"
    for steps in (2, 3):
        recipe = load_recipe(path, [*overrides, ("train.max_steps", str(steps))])
        assert widemix.train(recipe, run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 3]
    assert all(np.isfinite(line["loss"]) for line in lines)
    done = json.loads((run / "done.json").read_text())
    again = assess(str(run)).metrics
    assert again["loss"] == pytest.approx(done["loss"], rel=1e-6)
    assert (done["step"], again["top1"]) == (3, done["top1"])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipes_header_says_how_and_what(path):
    fields = header(path)
    name, recipe = path.relative_to(ROOT), load_recipe(path)
    assert re.match(
        rf"widemix prep {layout(Path(recipe.data.path).name)[0]} .*--to {recipe.data.path}\b", fields["prepare"]
    )
    assert fields["command"].split(" --")[0] in (
        f"widemix train {name}",
        f"widemix train {path.parent.name}/{path.stem}",
    )
    assert f"widemix cost {name}" in fields["cost"]
    assert not any(re.search(r"MEASURED|TODO", line) for line in fields.values())
