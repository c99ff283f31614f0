"""The benchmark of a step compares like with like."""

import itertools
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import timm
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
from widemix.recipe.log import LogSection
from widemix.training.profile import torch_profiler


def test_all_contestants_train_the_same_weights_as_often(tmp_path, monkeypatch):
    networks, build = [], step.build_model

    def kept(*arguments):
        networks.append(build(*arguments))
        return networks[-1]

    monkeypatch.setattr(step, "build_model", kept)
    # another rate in each step
    monkeypatch.setattr(step, "build_schedule", lambda section, rate, *_: lambda done: rate * (1 + done))
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


def test_on_a_gpu_what_a_step_adds_is_counted_beside_the_networks_own(monkeypatch):
    """Other networks may lie there too: 5 GiB are in use before, of which a quarter is this one's."""
    gib, asked = 1 << 30, []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: asked.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * gib if asked == ["reset"] else 9 * gib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 * gib if asked[-1:] == ["step"] else 0)
    others = [SimpleNamespace(nbytes=gib, is_cuda=True), SimpleNamespace(nbytes=gib // 4, is_cuda=True)]
    others.append(SimpleNamespace(nbytes=gib, is_cuda=False))
    step = partial(asked.append, "step")
    assert peak_memory(step, torch.nn.Linear(1 << 10, 1 << 10), others, torch.device("cuda")) == 3.25
    assert asked == ["reset", "step"]


def test_on_a_gpu_the_operations_are_its_kernels(monkeypatch):
    """A kernel of one name is listed once; the operators that started them are none."""
    kinds, done = torch.autograd.DeviceType, []

    def event(key, device, cpu, kind):
        return SimpleNamespace(key=key, self_device_time_total=device, self_cpu_time_total=cpu, device_type=kind)

    events = [event("gemm", 3000, 7, kinds.CUDA), event("aten::mm", 4000, 9000, kinds.CPU)]
    events += [
        event("gemm", 1000, 7, kinds.CUDA),
        event("copy", 5000, 7, kinds.CUDA),
        event("nothing", 0, 7, kinds.CUDA),
    ]
    profiler = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(operations, "torch_profiler", lambda: nullcontext(profiler))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))
    times = time_by_operation(lambda: done.append("step"), torch.device("cuda"))
    assert list(times.items()) == [("copy", 5), ("gemm", 4)]
    assert done == ["step", "waited"]
    assert time_by_operation(lambda: None, torch.device("cpu")) == {"aten::mm": 9}


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


@pytest.mark.parametrize("gpu", [False, True])
def test_a_round_has_the_steps_between_two_lines_of_the_whole_loop(gpu, monkeypatch):
    """Its number is the mean of its turns; the tiny network has twenty times as many rounds."""
    every, calls = LogSection().every, []

    def time_contestants(recipe, topology, folder, steps, turns):
        calls.append((recipe, topology.device.type, steps, turns))
        rounds = np.repeat(
            np.arange(steps * turns // every), every // steps
        )  # each turn of one as its round's number
        offsets = np.tile([-0.25, 0.25], turns // 2) if turns > 60 else 0  # of the turns of a round
        plain = 1 + rounds + offsets
        return {step.PLAIN: plain.tolist(), step.ENGINE: (plain + 1).tolist(), step.LOOP: (2 * plain).tolist()}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(step, "process_group", lambda *_, **__: nullcontext())
    monkeypatch.setattr(step, "peak_memory", lambda device: 1.23456)
    monkeypatch.setattr(step, "time_contestants", time_contestants)
    rows = step.run(Namespace(recipe=None, batch=None, rounds=3))
    with torch.device("meta"):
        theirs = timm.create_model("mixer_s16_224")
    (first, device, steps, turns), (second, _, *tiny) = calls
    assert (steps, turns) == ((10, 3 * every // 10) if gpu else (1, 3 * every))
    assert tiny == [every, 60]
    assert model_cost(first.model, 224, 1000).parameters == sum(p.numel() for p in theirs.parameters())
    assert model_cost(second.model, 8, 1000).parameters < 20_000
    for recipe in (first, second):
        assert (recipe.train.precision, recipe.train.global_batch, device) == (
            ("bf16", 256, "cuda") if gpu else ("fp32", 1, "cpu")
        )
    rate, batch = ("images_per_s", 256) if gpu else ("images_per_cpu_s", 1)
    names = [
        f"{name}, {network}"
        for network in ("Mixer-S/16", "a tiny network")
        for name in (step.PLAIN, step.ENGINE, step.LOOP)
    ]
    assert [row["name"] for row in rows] == names
    medians = [2, 3, 4, 30.5, 31.5, 61]  # of 1 to 3, and of 1 to 60 seconds a step
    assert [row[rate] for row in rows] == [round(batch / seconds, 1) for seconds in medians]
    ratios = [1, 0.6667, 0.5, 1, round(np.median(np.arange(1, 61) / np.arange(2, 62)), 4), 0.5]
    assert [row["ratio"] for row in rows] == ratios
    assert [row["us_more"] for row in rows] == [0, 1e6, 2e6, 0, 1e6, 30.5e6]
    assert {row["memory_gib"] for row in rows} == {1.23}


@pytest.mark.parametrize(("gpu", "batch"), [(False, None), (True, 5)])
def test_a_recipes_network_is_measured_by_its_batch_unless_another_is_given(gpu, batch, monkeypatch):
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(step, "load_from_arguments", lambda arguments: recipe)
    monkeypatch.setattr(step, "measure_networks", lambda *given: given)
    given = step.run(Namespace(recipe="r", batch=batch, rounds=3, compiled=True))
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    assert given == (recipe, batch or recipe.train.global_batch, 3, True, device)


def test_a_network_has_medians_of_its_parts_and_is_compared_within_a_round():
    first = network_step.Contestant("first", None, None, seconds=[[1.0, 2.0, 1.0], [1.0, 5.0, 2.0], [2.0, 1.0, 3.0]])
    other = network_step.Contestant(
        "other", None, None, "batch_last", [[4.0, 0.5, 0.5], [2.0, 1.0, 1.0], [8.0, 1.0, 3.0]]
    )
    other.memory_gib, other.operations_ms = 1.5, {"aten::mm": 3.0}
    row = network_step._row(other, first, 12, 30 * 10**12, 1e13, torch.device("cpu"))
    same = {"name": "other", "memory_layout": "batch_last", "time_ratio": 1.25, "memory_gib": 1.5}  # of 1.25, 0.5, 2
    parts = {"forward_ms": 4000, "backward_ms": 1000, "optimizer_ms": 1000}
    numbers = {"images_per_cpu_s": 2.4, "tflop_per_s": 6, "peak_fraction": 0.6}  # a step takes 5 s
    assert row == same | parts | numbers | {"operations_ms": {"aten::mm": 3.0}}
    row = network_step._row(first, first, 12, 30 * 10**12, 1e13, torch.device("cuda"))
    assert (row["images_per_s"], row["time_ratio"], row["backward_ms"]) == (2, 1, 2000)


@pytest.mark.parametrize("layout", ["plain", "batch_last"])
def test_networks_take_turns_of_one_step_of_which_the_first_is_not_counted(layout, monkeypatch):
    """PyTorch's alone is a row of its own only where the first network computes its blocks otherwise."""
    recipe, steps, build = load_recipe(ROOT / "recipes/digits/mixer.yaml"), [], partial(torch.nn.Linear, 2, 2)

    def step(contestant, *_):
        steps.append(contestant.name)
        return [float(len(steps))]

    def row(contestant, first, batch, flops, peak, device):
        return {contestant.name: (first.name, contestant.seconds, contestant.memory_gib, batch, peak)}

    networks = {"a": build, "b": build}, {"a eager": build, "timm eager": build}
    known = {"_networks": lambda *_: networks, "_step": step, "_row": row, "measure_peak": lambda *_: 5.0}
    known |= {"layout_blocks": lambda network: True, "choose_memory_layout": lambda *_: layout}
    known |= {"use_memory_layout": lambda *_: None, "peak_memory": lambda *_: 1.5, "time_by_operation": lambda *_: {}}
    for name, function in known.items():
        monkeypatch.setattr(network_step, name, function)
    rows = measure_networks(recipe, 4, 2, False, torch.device("cpu"))
    names = ["a", "b", *(["a eager"] if layout != "plain" else []), "timm eager"]
    count = len(names)
    assert steps == ["a", *names * 3]  # one to count its FLOPs
    seconds = {name: [[2.0 + count * turn + k] for turn in (1, 2)] for k, name in enumerate(names)}
    assert rows == [{name: ("a", seconds[name], 1.5, 4, 5.0)} for name in names]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_peak_is_that_of_the_fastest_product_in_the_precision(precision, monkeypatch):
    """Ten products of two matrices of 6 rows: 432 FLOPs each, the fourth in 0.5 s."""
    now, seconds, products = [0.0], iter([9, 2, 3, 0.5, 4, 5, 1, 6, 7, 8]), []

    def mm(left, right):
        products.append((left.dtype, right.dtype, left.shape, right.shape))
        now[0] += next(seconds)

    monkeypatch.setattr(network_step, "product_side", lambda *_: 6)
    monkeypatch.setattr(network_step, "compute_clock", lambda device: now[0])
    monkeypatch.setattr(network_step.torch, "mm", mm)
    assert measure_peak(precision, torch.device("cpu")) == 864
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert products == [(dtype, dtype, (6, 6), (6, 6))] * 10


@pytest.mark.parametrize(
    ("name", "ours", "timms"),
    [
        ("digits/mixer", {"normal": "commutation", "rp": "random"}, ["timm"]),
        ("cifar10/s_mixer", {"normal": "commutation", "rp": "random"}, []),
        ("cifar10/sw_mlp", {"network": None}, []),
    ],
)
def test_networks_are_compared_with_the_recipes_permutations_and_timms(name, ours, timms, monkeypatch):
    """Without stochastic depth, which timm's has not; each also compiled, where that is asked for."""
    recipe = load_recipe(ROOT / f"recipes/{name}.yaml")
    mixes = hasattr(recipe.model, "drop_path")
    changed = recipe.model.model_copy(update={"drop_path": 0.1} if mixes else {})
    sections = {
        each: recipe.model.model_copy(update={"drop_path": 0.0, "permutation": kind} if mixes else {})
        for each, kind in ours.items()
    }
    built, compiled = [], []
    monkeypatch.setattr(network_step, "build_model", lambda section, *size: built.append((section, size)) or "built")
    monkeypatch.setattr(network_step.torch, "compile", lambda network: compiled.append(network) or "compiled")
    size, first = (recipe.data.image_size, recipe.data.num_classes), next(iter(ours))
    for chosen in (False, True):
        own, alone = network_step._networks(recipe.model_copy(update={"model": changed}), chosen)
        names = [f"{each} eager" for each in (first, *timms)]
        names += [f"{each} compiled" for each in (*ours, *timms)] if chosen else []
        assert (list(own), list(alone)) == (list(ours), names)
        for each, build in (own | alone).items():
            kind, _, way = each.partition(" ")
            network = build()
            assert network == "compiled" if way == "compiled" else isinstance(network, str) == (kind != "timm")
            if way == "compiled":
                network = compiled.pop()
            if kind == "timm":
                assert len(network.state_dict()) == len(recipe.model.timm_twin(*size)().state_dict())
            else:
                assert built.pop() == (sections[kind], size)
    assert built == compiled == []


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_steps_parts_are_timed_in_the_recipes_precision(precision, dtype, monkeypatch):
    now, network = [0.0], torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)

    def takes(seconds):
        now[0] += seconds

    seen = []
    network.register_forward_pre_hook(
        lambda *_: (
            takes(1) or seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        )
    )
    network.weight.register_hook(lambda gradient: takes(2))
    optimizer.register_step_post_hook(lambda *_: takes(4))
    monkeypatch.setattr(network_step, "compute_clock", lambda device: now[0])
    inputs, targets = torch.eye(4), torch.full((4, 3), 1 / 3)
    before = network.weight.detach().clone()
    contestant = network_step.Contestant("a", network, optimizer)
    assert network_step._step(contestant, inputs, targets, precision) == [1, 2, 4]
    assert seen == [dtype]
    assert network.weight.grad is None
    assert not torch.equal(network.weight, before)


def test_all_contestants_begin_with_the_same_weights_and_take_adamws_steps():
    recipe = load_recipe(ROOT / "recipes/digits/mixer.yaml")
    inputs, targets = network_step._batch(recipe, 6, torch.device("cpu"))
    assert (inputs.shape, targets.shape) == ((6, 3, 8, 8), (6, 10))
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(targets.sum(1), torch.ones(6))
    one, other = (network_step._contestant(name, lambda: torch.nn.Linear(9, 9), torch.device("cpu")) for name in "ab")
    assert torch.equal(one.network.weight, other.network.weight)
    assert one.network.training
    assert (type(one.optimizer), one.optimizer.param_groups[0]["lr"]) == (torch.optim.AdamW, 1e-4)
    assert one.optimizer.param_groups[0]["fused"]
