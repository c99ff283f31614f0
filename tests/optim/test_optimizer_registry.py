"""The table of optimizers: recipes, help, engines and estimates follow it, also for one from outside the package."""

import json
from typing import Any

import pytest
import torch

from tests.clone import ROOT
from widemix.cli.arguments import Parser
from widemix.cli.commands import run_command
from widemix.cli.cost import add_cost
from widemix.errors import InputError
from widemix.optim.section import OPTIMIZERS, OptimizerSpec, register
from widemix.recipe import keys, load_recipe

RECIPE = ROOT / "recipes/digits/mixer.yaml"
DEEPSPEED = [("engine.kind", "deepspeed"), ("engine.zero_stage", "3")]


def build(groups: list[dict[str, Any]], section: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, lr=section.lr)


RMSPROP = OptimizerSpec(build, "RMSprop of a plug-in", states=2)


@pytest.fixture
def rmsprop():
    register("rmsprop", RMSPROP)
    yield "rmsprop"
    del OPTIMIZERS["rmsprop"]


def test_cost_and_help_know_it(rmsprop, tmp_path):
    parser = Parser(prog="widemix")
    add_cost(parser.add_subparsers(required=True))
    options = ["--optim.name", rmsprop, "--gpus", "4", "--json", str(tmp_path / "cost.json")]
    assert run_command(parser, argv=["cost", str(RECIPE), *options]) == 0
    rows = {row["name"]: row["value"] for row in json.loads((tmp_path / "cost.json").read_text())["rows"]}
    assert rows["state, ZeRO 1"] == pytest.approx((4 + 4 + 8 / 4) * rows["parameters"])
    choices, default, text = keys()["optim.name"]
    assert choices == "|".join(OPTIMIZERS)
    assert default == "adamw"
    assert all(f"{name}: {spec.help}" in text for name, spec in OPTIMIZERS.items())
    assert "rmsprop: RMSprop of a plug-in" in text


def test_an_unknown_name_is_an_error_that_suggests_the_nearest(rmsprop):
    words = r"optim.name 'rmsprob': no such optimizer; did you mean rmsprop\? known are adamw, .*, rmsprop$"
    with pytest.raises(InputError, match=words):
        load_recipe(RECIPE, [("optim.name", "rmsprob")])


def test_a_name_is_registered_once(rmsprop):
    for name, spec in ((rmsprop, RMSPROP), ("adamw", RMSPROP), ("timm:lion", RMSPROP)):
        before = OPTIMIZERS[name]
        with pytest.raises(ValueError, match=f"{name} is already registered"):
            register(name, spec)
        assert OPTIMIZERS[name] is before
    with pytest.raises(KeyError):
        OPTIMIZERS["lion"]  # which is timm's alone


@pytest.mark.parametrize(
    ("spec", "overrides", "words"),
    [
        (OptimizerSpec(build, "", 1, needs_whole="each row"), DEEPSPEED, "optim.name other needs each row"),
        (OptimizerSpec(build, "", 1, group_counters=("count",)), DEEPSPEED, "take engine.zero_stage 1 or 2"),
        (OptimizerSpec(build, "", 1, evaluation_weight=lambda _, w: w), [], "set schedule.name constant"),
        (OptimizerSpec(build, "", 1, penalty="l1"), [], "other takes l1 in place of weight_decay"),
        (OptimizerSpec(build, "", 1), [("optim.l1", "0.1")], "l1 is for beta_lasso, other would ignore it"),
    ],
)
def test_what_it_demands_is_checked(monkeypatch, spec, overrides, words):
    monkeypatch.setitem(OPTIMIZERS, "other", spec)
    with pytest.raises(InputError, match=words):
        load_recipe(RECIPE, [("optim.name", "other"), *overrides])
