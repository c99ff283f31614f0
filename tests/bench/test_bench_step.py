"""`widemix bench step`: its contestants train alike, and its rows are the medians of what their steps took."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.bench.conftest import Clock
from tests.conftest import ROOT, System
from widemix.bench.network_step import (
    Contestant,
    measure_networks,
    peak_memory,
    row_of,
    time_by_operation,
)
from widemix.bench.step import ENGINE, LOOP, PLAIN, SMALL, compare_loops, contests, make_recipe, rows_of
from widemix.distributed.topology import Topology, process_group
from widemix.estimate.hardware import stated_peak
from widemix.models.cost import model_cost
from widemix.models.registry import build_model
from widemix.recipe import load_recipe
from widemix.recipe.sections import ScheduleSection

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def undone():
    """What the benchmarks set for the process: several threads wait for each other on a busy machine."""
    torch.set_num_threads(1)
    yield
    torch.set_float32_matmul_precision("highest")


# The training loop.


def test_loops_train_alike_and_rows_compare_turns_of_a_round(clock: Clock, tmp_path) -> None:
    """With another learning rate in each of the first steps, by a clock that each update moves by another time."""
    rng, optimizers, seconds, rates = np.random.default_rng(0), {}, {}, {}

    def updated(optimizer, *_) -> None:
        name = optimizers.setdefault(id(optimizer), (PLAIN, ENGINE, LOOP)[min(len(optimizers), 2)])
        seconds.setdefault(name, []).append(rng.uniform(1, 9))
        rates.setdefault(name, []).append([group["lr"] for group in optimizer.param_groups])
        weights[name] = [value for group in optimizer.param_groups for value in group["params"]]
        clock.takes(seconds[name][-1])

    weights: dict[str, list[torch.Tensor]] = {}
    topology = Topology(0, 1, 0, 1, CPU)
    recipe = make_recipe(SMALL, 8, batch=6, precision="fp32", every=4)
    recipe = recipe.model_copy(update={"schedule": ScheduleSection(warmup_epochs=1e-11)})  # 11 steps
    with register_optimizer_step_post_hook(updated), process_group(topology, 60):
        rows = compare_loops("n", recipe, topology, tmp_path, steps=2, rounds=3)
    assert len(optimizers) == 3
    assert len({lr for lr, *_ in rates[PLAIN]}) == 12  # those of the warm-up, and that after it
    assert rates[PLAIN] == rates[ENGINE] == rates[LOOP]
    plain, *ours = ({p.shape: p for p in own if p.shape != (4,)} for own in map(weights.get, (PLAIN, ENGINE, LOOP)))
    for own in ours:  # of each shape the last; those of 4 have no gradient but rounding
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-5)
    torch.manual_seed(0)
    untrained = build_model(recipe.model, 8, 1000).head.weight
    assert (plain[untrained.shape] - untrained).abs().max() > 1e-3
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3  # of 14 steps
    rounds = {
        name: np.reshape(own[2:], (3, 4)).mean(axis=1) for name, own in seconds.items()
    }  # without the first turn
    for row, name in zip(rows, (PLAIN, ENGINE, LOOP), strict=True):
        own, plain = rounds[name], rounds[PLAIN]
        assert row.pop("memory_gib") > 0
        assert row == {
            "name": f"{name}, n",
            "images_per_cpu_s": round(6 / np.median(own), 1),
            "ratio": round(np.median(plain / own), 4),
            "us_more": round(1e6 * np.median(own - plain)),
        }


@pytest.mark.parametrize(
    ("gpu", "batch", "expected"),
    [(False, None, ("fp32", 1, 1)), (True, None, ("bf16", 256, 10)), (True, 5, ("bf16", 5, 10))],
)
def test_loops_are_compared_on_mixer_s16_and_a_tiny_network(gpu: bool, batch: int | None, expected: tuple) -> None:
    """A round has the steps between two lines of the log, and the tiny network has twenty times as many."""
    (first, large, steps, rounds), (second, tiny, *sizes) = contests(gpu, batch, 3)
    assert (first, rounds, second, sizes) == ("Mixer-S/16", 3, "a tiny network", [tiny.log.every, 60])
    for recipe in (large, tiny):
        assert (recipe.train.precision, recipe.train.global_batch, steps) == expected
    with torch.device("meta"):
        theirs = timm.create_model("mixer_s16_224")
    assert model_cost(large.model, 224, 1000).parameters == sum(p.numel() for p in theirs.parameters())
    assert (large.data.image_size, tiny.data.image_size) == (224, 8)
    assert model_cost(tiny.model, 8, 1000).parameters < 20_000


# A network's step.


def counts_time(system: System, reads: int) -> list[float]:
    """Let the clocks go on by random microseconds at each read, from read `reads` on by seconds; return these."""
    rng, steps = np.random.default_rng(0), []

    def advance() -> float:
        steps.append(rng.uniform(1, 9) * (1 if len(steps) >= reads else 1e-6))
        return sum(steps)

    system({f"time.{name}": advance for name in ("perf_counter", "process_time")})
    return steps


S_MIXER = {"model.depth": "1", "train.precision": "fp16", "engine.memory_layout": "plain"}
SPARSE = {"model.width": "2048", "model.density": "0.02", "model.depth": "1"}
IN_BF16 = {"engine.memory_layout": "batch_last", "train.precision": "bf16"}
COMPILED = dict.fromkeys(("normal compiled", "rp compiled"), "plain")


@pytest.mark.parametrize(
    ("name", "keys", "batch", "dtype", "layouts"),
    [
        ("digits/mixer",
         {"engine.memory_layout": "plain", "train.matmul_precision": "high", "model.drop_path": "0.3"},
         4, None, {"normal": "plain", "rp": "plain", "timm eager": "plain"}),
        ("digits/mixer", IN_BF16, 6, torch.bfloat16,
         {"normal": "batch_last", "rp": "batch_last", "normal eager": "plain", "timm eager": "plain", **COMPILED,
          "timm compiled": "plain"}),
        ("cifar10/s_mixer", S_MIXER, 2, torch.float16, {"normal": "plain", "rp": "plain", **COMPILED}),
        ("cifar10/sw_mlp", SPARSE, 64, None, {"network": "plain"}),
    ],
)  # fmt: skip
def test_networks_take_turns_and_have_rows_of_medians(name, keys, batch, dtype, layouts, system: System) -> None:
    """They begin with the weights that a seed gives them, without stochastic depth, which timm's has not."""
    recipe = load_recipe(ROOT / f"recipes/{name}.yaml", list(keys.items()))
    count, rounds, size = len(layouts), 3, (recipe.data.image_size, recipe.data.num_classes)
    section = recipe.model.model_copy(update={"drop_path": 0.0} if hasattr(recipe.model, "drop_path") else {})
    expected = []
    for kind in (row.split()[0] for row in layouts):
        permuted = {"normal": {"permutation": "commutation"}, "rp": {"permutation": "random"}}.get(kind, {})
        torch.manual_seed(0)
        expected.append(
            recipe.model.timm_twin(*size)()
            if kind == "timm"
            else build_model(section.model_copy(update=permuted), *size)
        )
    first: dict[int, tuple] = {}
    optimizers: dict[int, torch.optim.Optimizer] = {}
    features: list[torch.Tensor] = []

    def passed(module, given, output) -> None:
        if isinstance(module, torch.nn.Linear) and module.out_features == size[1]:
            features[:] = [given[0].detach()]  # of the head, whose weights begin as zeros
        if type(module) in set(map(type, expected)):
            assert module.training
            assert all(p.grad is None for p in module.parameters())  # of the step before
            half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            first.setdefault(id(module), (module, given[0], features[0], half))

    kept = register_optimizer_step_post_hook(lambda each, *_: optimizers.setdefault(id(each), each))
    products, multiply = [], torch.mm
    system({"torch.mm": lambda a, b: products.append(a) or multiply(a, b), "torch.compile": lambda network: network})
    reads = 4 * (1 + count * (rounds + 1 + 2))
    steps = counts_time(system, reads)
    with register_module_forward_hook(passed), kept:
        found = measure_networks(recipe, batch, rounds, any("compiled" in row for row in layouts), CPU)
    assert torch.get_float32_matmul_precision() == recipe.train.matmul_precision
    assert {row["name"]: row["memory_layout"] for row in found} == layouts
    turns = np.reshape(steps[4 * (1 + count) :][: 4 * count * rounds], (rounds, count, 4))[..., 1:]
    totals, product = turns.sum(axis=2), [x for x in products if x.dtype == (dtype or torch.float32)][-10:]
    assert {tuple(x.shape) for x in product} == {(256, 256)}
    flops = [row["tflop_per_s"] * np.median(own) * 1e12 for row, own in zip(found, totals.T, strict=True)]
    if name == "cifar10/sw_mlp":  # a CPU multiplies by the weights that the masks leave
        layers = recipe.model.layer_costs(*size).layers
        exact = batch * sum(2 * layer.connections * (1 + layer.backward_products) for layer in layers)
    else:
        exact = batch * model_cost(recipe.model, *size).training_flops
    assert flops == pytest.approx([exact] * count, rel=0.05)
    for k, row in enumerate(found):
        own, own_total = turns[:, k], np.median(totals[:, k])
        for part, values in zip(("forward", "backward", "optimizer"), own.T, strict=True):
            assert row[f"{part}_ms"] == round(1e3 * np.median(values), 3)
        assert row["images_per_cpu_s"] == round(batch / own_total, 1)
        assert row["time_ratio"] == round(np.median(totals[:, k] / totals[:, 0]), 4)
        fraction = flops[k] / own_total / (2 * 256**3 / min(steps[-1:-20:-2]))
        assert row["peak_fraction"] == pytest.approx(fraction, rel=1e-3)
        assert row["mfu"] is None
        assert row["memory_gib"] >= round(16 * sum(p.numel() for p in expected[k].parameters()) / 2**30, 3)
        assert any(operation.startswith("aten::") for operation in row["operations_ms"])
    for (_, inputs, found_features, half), network in zip(list(first.values()), expected, strict=True):
        assert half == dtype
        with torch.autocast("cpu", dtype, enabled=dtype is not None), register_module_forward_hook(passed):
            network(inputs)
        close = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
        assert features[0].abs().max() > 0.1
        torch.testing.assert_close(features[0], found_features, **close)
        assert inputs.shape == (batch, 3, size[0], size[0])
        assert inputs.is_contiguous(memory_format=torch.channels_last)
    for optimizer in optimizers.values():
        [group] = optimizer.param_groups
        assert (type(optimizer), group["lr"], group["fused"]) == (torch.optim.AdamW, 1e-4, True)


@pytest.mark.parametrize("batch", [None, 5])
def test_the_command_takes_the_recipes_batch_unless_another_is_given(batch, system, tmp_path, widemix) -> None:
    steps, file = counts_time(system, 0), tmp_path / "rows.json"
    words = ("--rounds", "1", "--json", file, "--engine.memory_layout=plain", *(("--batch", batch) if batch else ()))
    assert widemix("bench", "step", "digits/mixer", *words)[0] == 0
    rows, times = json.loads(file.read_text())["rows"], steps[16:20]  # of the second round, after the first of three
    expected = (batch or load_recipe(ROOT / "recipes/digits/mixer.yaml").train.global_batch) / sum(times[1:])
    assert rows[0]["images_per_cpu_s"] == round(expected, 1)


# Rows on each device: on a GPU images are counted by the wall clock.


@pytest.mark.parametrize(("device", "rate"), [("cpu", "images_per_cpu_s"), ("cuda", "images_per_s")])
def test_rows_name_the_clock_of_their_device(device, rate, system: System) -> None:
    system({"torch.cuda.max_memory_allocated": lambda device: 3 << 30})
    turns = {PLAIN: [1.0, 2.0, 4.0], LOOP: [2.0, 2.5, 3.0]}
    plain, loop = rows_of(turns, "n", 8, Topology(0, 1, 0, 1, torch.device(device)))
    memory = plain.pop("memory_gib"), loop.pop("memory_gib")
    assert memory == (3, 3) or device == "cpu"
    assert plain == {"name": f"{PLAIN}, n", rate: 4, "ratio": 1, "us_more": 0}
    assert loop == {"name": f"{LOOP}, n", rate: 3.2, "ratio": 0.8, "us_more": 500_000}
    layer = torch.nn.Linear(1, 1)
    first, other = (
        Contestant(name, layer, torch.optim.SGD(layer.parameters()), "rows", seconds, 1.5, {"a": 2.0})
        for name, seconds in (("normal", [[1, 2, 1], [1, 1, 2]]), ("rp", [[2, 4, 2], [1, 3, 4]]))
    )
    assert row_of(other, first, 8, 4 * 10**12, (10**12, 4e12), torch.device(device)) == {
        "name": "rp", "memory_layout": "rows", rate: 1, "time_ratio": 2, "forward_ms": 1500, "backward_ms": 3500,
        "optimizer_ms": 3000, "tflop_per_s": 0.5, "peak_fraction": 0.5, "mfu": 0.125, "memory_gib": 1.5,
        "operations_ms": {"a": 2.0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "keys", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", {"train.precision": "bf16"}, 989e12),
        ("NVIDIA H100 80GB HBM3", {}, 67e12),
        ("NVIDIA H100 80GB HBM3", {"train.matmul_precision": "high"}, None),  # TF32
        ("", {}, None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet(name, keys, peak) -> None:
    train = load_recipe(ROOT / "recipes/digits/mixer.yaml", list(keys.items())).train
    assert stated_peak(train, name) == peak


# What a step goes into.


def test_memory_is_what_is_alive_at_once() -> None:
    network, kept = torch.nn.Linear(1 << 18, 64, bias=False), torch.empty(1 << 24)  # 64 MiB each

    def step():
        for _ in range(3):  # one after the other
            torch.empty(1 << 25)
        both = torch.empty(1 << 24), torch.empty(1 << 24)
        del both

    assert peak_memory(step, network, [kept], CPU) == 0.25
    assert peak_memory(step, network, [], CPU) == 0.188


def test_memory_on_a_gpu_is_its_own_and_the_steps(system: System) -> None:
    """Other networks may lie there too: 5 GiB are in use before, of which a quarter is this one's."""
    gib, asked = 1 << 30, []
    system({
        "torch.cuda.reset_peak_memory_stats": lambda device: asked.append("reset"),
        "torch.cuda.memory_allocated": lambda device: 5 * gib if asked == ["reset"] else 9 * gib,
        "torch.cuda.max_memory_allocated": lambda device: 7 * gib if asked[-1:] == ["step"] else 0,
    })  # fmt: skip
    others = [SimpleNamespace(nbytes=size, is_cuda=on) for size, on in ((gib, True), (gib // 4, True), (gib, False))]
    step = partial(asked.append, "step")
    assert peak_memory(step, torch.nn.Linear(1 << 10, 1 << 10), others, torch.device("cuda")) == 3.25
    assert asked == ["reset", "step"]


@pytest.mark.parametrize(
    ("device", "more", "expected"),
    [
        ("cuda", 0, {"copy": 5, "gemm": 4}),  # a kernel of one name once, and no operators that started them
        ("cpu", 0, {"aten::mm": 9}),
        ("cpu", 14, {"aten::mm": 9, **{f"op {k}": k / 1e3 for k in range(14, 3, -1)}, "other": 0.006}),
    ],
)
def test_operations_are_those_of_the_device(device, more, expected, system: System) -> None:
    kinds, done = torch.autograd.DeviceType, []
    events = [
        ("gemm", 3000, 7, kinds.CUDA), ("aten::mm", 4000, 9000, kinds.CPU), ("gemm", 1000, 7, kinds.CUDA),
        ("copy", 5000, 7, kinds.CUDA), ("nothing", 0, 7, kinds.CUDA),
        *((f"op {k}", 0, k, kinds.CPU) for k in range(1, more + 1)),
    ]  # fmt: skip
    names = ("key", "self_device_time_total", "self_cpu_time_total", "device_type")
    averages = [SimpleNamespace(**dict(zip(names, event, strict=True))) for event in events]
    system({
        "torch.profiler.profile.key_averages": lambda profiler: averages,
        "torch.cuda.synchronize": lambda device: done.append("waited"),
    })  # fmt: skip
    times = time_by_operation(lambda: done.append("step"), torch.device(device))
    assert list(times.items()) == list(expected.items())
    assert done == ["step", "waited"][: 2 if device == "cuda" else 1]


def test_operations_are_timed_in_a_step() -> None:
    matrix = torch.randn(512, 512)
    times = time_by_operation(lambda: (matrix @ matrix @ matrix).sin(), CPU)
    assert list(times) == sorted(times, key=lambda name: -times[name])
    assert times["aten::mm"] > times["aten::sin"] > 0
