"""The benchmark of a step compares like with like."""

import itertools

import pytest
import torch

from tests.conftest import ROOT
from widemix.bench import network_step, operations, step
from widemix.bench.network_step import PARTS, measure_networks, measure_peak
from widemix.bench.operations import peak_memory, time_by_operation
from widemix.bench.report import report
from widemix.distributed.topology import Topology, process_group
from widemix.errors import InputError
from widemix.models.cost import model_cost
from widemix.models.registry import build_model
from widemix.recipe import load_recipe
from widemix.training.profile import torch_profiler


def test_all_contestants_train_the_same_weights_as_often(tmp_path, monkeypatch):
    networks, build = [], step.build_model

    def kept(*arguments):
        networks.append(build(*arguments))
        return networks[-1]

    monkeypatch.setattr(step, "build_model", kept)
    monkeypatch.setattr(step, "build_schedule", lambda *_: lambda done: 1e-3 * (1 + done))  # another in each step
    topology = Topology(0, 1, 0, 1, torch.device("cpu"))
    with process_group(topology, 60):
        recipe = step.make_recipe(step.SMALL, 8, batch=4, precision="fp32", every=6)
        first = build(recipe.model, 8, 1000).state_dict()
        times = step.time_contestants(recipe, topology, tmp_path, steps=3, turns=4)
    assert {name: len(seconds) for name, seconds in times.items()} == {step.PLAIN: 4, step.ENGINE: 4, step.LOOP: 4}
    plain, *ours = (network.state_dict() for network in networks)
    assert len(ours) == 2
    for weights in ours:
        for name, value in plain.items():
            if not name.endswith("mlp_tokens.fc2.bias"):  # no gradient but rounding
                torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert (plain["head.weight"] - first["head.weight"]).abs().max() > 1e-3
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2  # of 15 steps


def test_rows_compare_the_turns_of_one_round():
    """Medians of ratios and differences, which are not those of the medians."""
    seconds = {step.PLAIN: [1.0, 2.0, 4.0], step.ENGINE: [0.5, 4.0, 3.0]}
    rows = step._rows(seconds, "n", 6, Topology(0, 1, 0, 1, torch.device("cpu")))
    same = {"memory_gib": rows[0]["memory_gib"]}
    assert rows[0] == {"name": "plain loop, n", "images_per_cpu_s": 3, "ratio": 1, "us_more": 0} | same
    assert (
        rows[1] == {"name": "our engine alone, n", "images_per_cpu_s": 2, "ratio": 1.3333, "us_more": -500_000} | same
    )


def test_timms_mixer_of_a_recipe_is_the_same_network():
    recipe = load_recipe(ROOT / "recipes/cifar10/mixer_small.yaml")
    ours = build_model(recipe.model, 32, 10)
    theirs = recipe.model.timm_twin(32, 10)()
    theirs.load_state_dict(ours.state_dict())
    inputs = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(inputs), theirs(inputs))
    assert load_recipe(ROOT / "recipes/cifar10/s_mixer.yaml").model.timm_twin(32, 10) is None


@pytest.fixture
def one_thread():
    """Several wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("memory_layout", ["plain", "batch_last"])
def test_the_rows_of_a_recipe_add_up(one_thread, monkeypatch, memory_layout):
    """By a clock that goes on by a millisecond each time that it is read: the parts of a real step vary."""
    monkeypatch.setattr(network_step, "product_side", lambda *_: 512)
    assert measure_peak("fp32", torch.device("cpu")) > 1e9
    precisions, reads, profilers = [], itertools.count(), []

    def kept_profiler():
        profilers.append(torch_profiler())
        return profilers[-1]

    monkeypatch.setattr(operations, "torch_profiler", kept_profiler)
    monkeypatch.setattr(network_step, "compute_clock", lambda _: 1e-3 * next(reads))
    monkeypatch.setattr(network_step, "set_matmul_precision", precisions.append)
    values = [("train.matmul_precision", "high"), ("engine.memory_layout", memory_layout)]
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml", values)
    rows = measure_networks(recipe, 4, 3, compiled=False, device=torch.device("cpu"))
    layouts = {"normal": memory_layout, "rp": memory_layout, "normal eager": "plain", "timm eager": "plain"}
    if memory_layout == "plain":
        del layouts["normal eager"]  # the first row
    assert {row["name"]: row["memory_layout"] for row in rows} == layouts
    flops = 4 * model_cost(recipe.model, 8, 10).training_flops
    for row, profiler in zip(rows, profilers, strict=True):
        assert row["memory_gib"] >= round(16 * model_cost(recipe.model, 8, 10).parameters / 2**30, 3)
        milliseconds = {event.key: event.self_cpu_time_total / 1e3 for event in profiler.key_averages()}
        other = row["operations_ms"].pop("other")
        assert row["operations_ms"] == {name: round(milliseconds[name], 3) for name in row["operations_ms"]}
        assert sum(row["operations_ms"].values()) + other == pytest.approx(sum(milliseconds.values()), abs=0.01)
        assert {row[f"{part}_ms"] for part in PARTS} == {1}
        seconds = 1e-3 * len(PARTS)
        assert row["images_per_cpu_s"] == pytest.approx(4 / seconds, abs=0.1)
        assert abs(row["tflop_per_s"] * 1e12 - flops / seconds) < 0.05 * flops / seconds + 1e8
        assert row["time_ratio"] == 1
    assert precisions == ["high"]
    sizes = [("model.width", "2048"), ("model.density", "0.02"), ("model.depth", "1")]
    other = load_recipe(ROOT / "recipes/cifar10/sw_mlp.yaml", sizes)
    (row,) = measure_networks(other, 64, 3, False, torch.device("cpu"))
    assert row["name"] == "network"
    layers = other.model.layer_costs(32, 10).layers  # a CPU multiplies by the weights that the masks leave
    flops = 64 * sum(2 * layer.connections * (1 + layer.backward_products) for layer in layers)
    assert row["tflop_per_s"] * 64e12 / row["images_per_cpu_s"] == pytest.approx(flops, rel=0.05)
    with pytest.raises(InputError, match="takes no images"):
        measure_networks(load_recipe(ROOT / "recipes/mnli/mixer_gelu.yaml"), 2, 1, False, torch.device("cpu"))
    in_fp8 = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("train.precision", "bf16"), ("train.fp8", "true")])
    with pytest.raises(InputError, match="not in float8"):
        measure_networks(in_fp8, 2, 1, False, torch.device("cpu"))


def test_the_memory_of_a_step_is_what_is_alive_at_once():
    network, kept = torch.nn.Linear(1 << 18, 64, bias=False), torch.empty(1 << 24)  # 64 MiB each

    def step():
        for _ in range(3):  # one after the other
            torch.empty(1 << 25)
        both = torch.empty(1 << 24), torch.empty(1 << 24)
        del both

    assert peak_memory(step, network, [kept], torch.device("cpu")) == 0.25
    assert peak_memory(step, network, [], torch.device("cpu")) == 0.188


def test_a_steps_time_is_that_of_its_operations(capsys):
    matrix, vector = torch.randn(512, 512), torch.randn(8)

    def step():
        product = matrix @ matrix @ matrix
        for name in ("sin", "cos", "tan", "exp", "abs", "neg", "sign", "ceil", "floor", "round", "frac", "erf"):
            getattr(vector, name)()
        return product

    times = time_by_operation(step, torch.device("cpu"))
    listed = [time for name, time in times.items() if name != "other"]
    assert "aten::mm" in times
    assert 10 < len(listed) <= 12
    assert listed == sorted(listed, reverse=True)
    report([{"name": "a", "metric": 1, "operations_ms": {"aten::mm": 3.0, "aten::sin": 1.0}}], ("torch",), None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == ["operations_ms of a:", f"{'3':>18}   75%  aten::mm", f"{'1':>18}   25%  aten::sin"]
