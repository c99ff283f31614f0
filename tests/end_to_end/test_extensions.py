"""A family, an optimizer, an operation and a data source of another package, through every command."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file

from tests.conftest import Command
from tests.end_to_end.extended import Pixels, be_extended
from tests.forks import Forks

RECIPE = """
data: {{path: {folder}/data, num_classes: 2, image_size: 8, eval_split: test, workers: 1}}
model: {{kind: pixels, width: 12}}
augment: {{auto_augment: rand-m9-n1-p1-tours, hflip: 0.0}}
optim: {{name: rmsprop, lr: 3e-3}}
train: {{epochs: 6, global_batch: 16}}
eval: {{batch_size: 16}}
log: {{every: 1, tensorboard: false}}
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """extended(words...) runs the command in a fork and returns its output; the folder has recipe.yaml."""
    folder = tmp_path_factory.mktemp("extended")
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))

    def run(*words, expected: int = 0) -> str:
        codes, output = Forks(be_extended, *map(str, words), log=folder / "log").wait()
        assert codes == [expected], output
        return output

    run("prep", "stripes", "--to", folder / "data")
    train = ("train", folder / "recipe.yaml", "--run-dir", folder / "run")
    code, output = Command(*train, module="tests.end_to_end.extended").wait()  # as somebody else's users start it
    assert code == 0, output
    return folder, run


def test_it_is_evaluated(extended):
    folder, run = extended
    done = json.loads((folder / "run/done.json").read_text())
    run("eval", folder / "run", "--json", folder / "eval.json")
    assert json.loads((folder / "eval.json").read_text())["top1"] == done["top1"]


def test_its_cost_is_known(extended):
    folder, run = extended
    run("cost", folder / "recipe.yaml", "--samples", "48", "--json", folder / "cost.json")
    rows = {row["name"]: row["value"] for row in json.loads((folder / "cost.json").read_text())["rows"]}
    assert rows["parameters"] == sum(p.numel() for p in Pixels(8, 12, 2).parameters())
    assert rows["state, DDP"] == rows["parameters"] * 4 * 3  # weights, gradients and one state


def test_its_export_is_the_network(extended):
    folder, run = extended
    run("export", folder / "run", "--to", folder / "exported")
    network = Pixels(8, 12, 2)
    network.load_state_dict(load_file(folder / "exported/model.safetensors"))
    from tests.end_to_end import extended as outside

    outside.register_family(outside.PixelsSection)
    try:
        loaded = timm.create_model(f"local-dir:{folder / 'exported'}", pretrained=True)
    finally:
        from widemix.models.families import KINDS

        del KINDS["pixels"]
    images = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(loaded(images), network(images))


def test_help_and_errors_name_them(extended):
    folder, run = extended
    assert "stripes" in run("prep", "--help", "sources")
    assert "pixels: one hidden layer over all pixels" in run("train", "--help", "model").replace("\n      ", " ")
    assert "did you mean pixels?" in run("train", folder / "recipe.yaml", "--model.kind", "pixel", expected=2)
    assert "did you mean rmsprop?" in run("train", folder / "recipe.yaml", "--optim.name", "rmspro", expected=2)
