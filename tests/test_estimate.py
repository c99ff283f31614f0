"""`widemix cost`: numbers that follow from the papers' formulas."""

import json

import pytest

from pipeline.errors import InputError
from pipeline.estimate import GPUS, UTILISATION, estimate, pairs_table
from pipeline.recipe import load_recipe
from tests.conftest import ROOT, Command

B16 = ROOT / "recipes/imagenet/mixer_b16.yaml"


def values(*overrides, gpus=128, gpu="a100", samples=1_281_167):
    return {row.name: row.value for row in estimate(load_recipe(B16, overrides), gpus, gpu, samples)}


def test_counts_hours_and_memory_of_mixer_b16():
    found = values()
    assert found["parameters"] == 59_880_472
    assert found["Omega"] == pytest.approx(196 * 768 * (384 + 3072) / 2)
    assert found["steps"] == 1_281_167 // 4096 * 300
    flops = found["training FLOPs"] * 4096 * found["steps"]
    assert found["GPU hours"] == pytest.approx(flops / (GPUS["a100"][0] * UTILISATION) / 3600)
    assert found["GPU hours"] == pytest.approx(128 * found["hours"])
    assert found["state, DDP"] == 16 * 59_880_472
    assert found["state, FSDP"] == 16 * 59_880_472 / 128
    assert found["memory"] == found["state, DDP"] + found["activations"]


def test_memory_follows_the_recipes_engine():
    options = [("engine.kind", "deepspeed"), ("engine.zero_stage", "2")]
    found = values(*options)
    assert found["memory"] == found["state, ZeRO 2"] + found["activations"]
    assert found["state, ZeRO 2"] == pytest.approx((2 + 2 / 128 + 12 / 128) * 59_880_472)


def test_wrong_numbers_are_refused():
    for wrong in ({"gpus": 0}, {"gpus": 3}, {"samples": 0}):
        with pytest.raises(InputError):
            values(**wrong)
    with pytest.raises(InputError, match="both must be above 0"):
        pairs_table(-1, 1)


def test_pairs_have_the_omega_asked_for_and_the_widest_is_in_the_middle():
    lines = [line.strip("| ").split(" | ") for line in pairs_table(2**18, 1).splitlines()[2:-2]]
    rows = [[float(cell.replace(",", "")) for cell in line] for line in lines]
    widths = [width for _, _, width, _ in rows]
    assert widths.index(max(widths)) == len(rows) // 2
    assert [64, 64, 4096, 262_144] in rows
    assert all(omega == pytest.approx(2**18, rel=0.05) for *_, omega in rows)  # tokens are whole


def test_the_command_writes_json(tmp_path):
    file = tmp_path / "cost.json"
    code, output = Command("cost", B16, "--gpus", "128", "--samples", "1281167", "--json", file).wait()
    assert code == 0, output
    written = json.loads(file.read_text())
    assert written["machine"] == "128 x a100"
    assert {"name": "parameters", "value": 59_880_472, "text": "59,880,472", "note": ""} in written["rows"]
