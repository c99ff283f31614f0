"""What is counted on fake ranks and measured on this machine, and how far estimates are off."""

import json

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile

from tests.conftest import ROOT, Fork, System
from widemix.estimate import rehearse as module
from widemix.estimate.fake import fake_inputs
from widemix.estimate.hardware import EFFICIENCY, GPUS, Cluster, Gpu
from widemix.estimate.measure import measured_pass, measured_peaks, product_side, shortest
from widemix.estimate.network import fake_pass
from widemix.estimate.rehearse import rehearse
from widemix.estimate.report import estimate
from widemix.estimate.tables import size
from widemix.models.cost import model_cost
from widemix.models.registry import build_model
from widemix.recipe import Recipe, load_recipe
from widemix.recipe.losses import softmax_loss

B16 = ROOT / "recipes/imagenet/mixer_b16.yaml"
TINY = (
    *(("model.depth", "2"), ("model.channels", "96"), ("model.channel_hidden", "384")),
    *(("train.global_batch", "64"), ("augment.mix_group", "2")),
)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


# A pass on fake tensors.


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("mixer_b16", 528),
        pytest.param("mixer_s16", 1543, marks=pytest.mark.long),
        pytest.param("mixer_l16", 164, marks=pytest.mark.long),
    ],
)
def test_the_roofline_against_published_speeds(name, published):
    """timm's benchmark-train-amp-nchw table for an RTX 3090."""
    values = load_recipe(B16).model_dump(mode="json")
    values["model"] = {"kind": "timm", "name": f"{name}_224"}
    values["train"]["precision"] = "fp16"
    seconds = fake_pass(Recipe.model_validate(values), 64).seconds(GPUS["rtx3090"])
    assert 64 / seconds * EFFICIENCY == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_a_fake_pass_takes_the_memory_of_a_real_one(checkpointing):
    """Against what PyTorch's allocator hands out, as its profiler records it."""
    changes = (*TINY, ("train.precision", "fp32"), ("train.activation_checkpointing", checkpointing))
    recipe = load_recipe(B16, changes)
    module = build_model(recipe.model, 224, 1000)
    if recipe.train.activation_checkpointing:
        module.set_grad_checkpointing(True)
    inputs, targets = torch.zeros(16, 3, 224, 224), torch.zeros(16, 1000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as real:
        softmax_loss(module(inputs), targets).backward()
    sizes = [e.nbytes() for e in real.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for change in sizes:
        held += change
        peak = max(peak, held)
    assert fake_pass(recipe, 16).peak == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_checkpointing_computes_blocks_again_for_less_memory(precision, engine):
    options = (*TINY, ("train.precision", precision), ("engine.kind", engine))
    plain, again = (
        fake_pass(load_recipe(B16, (*options, ("train.activation_checkpointing", each))), 16)
        for each in ("false", "true")
    )
    layers = 2 * 96 * 196 * 384 + 196 * 96 * 384  # of a block; nothing needs what the last one computes
    assert again.flops == plain.flops + 16 * 2 * 2 * layers  # of two blocks, two a multiply-add
    assert again.peak < 0.7 * plain.peak


def test_a_fake_pass_has_the_flops_of_the_cost():
    """And counts its weights, those that train, and those of blocks."""
    for precision, frozen in (("fp32", "[stem.*]"), ("bf16", "[]"), ("fp16", "[]")):
        options = ("train.precision", precision), ("train.freeze", frozen), ("model.depth", "2")
        recipe = load_recipe("digits/mixer", options)
        found, cost = fake_pass(recipe, 3), model_cost(recipe.model, 8, 10)
        module = build_model(recipe.model, 8, 10)
        spared = module.stem.proj.weight.numel() if frozen != "[]" else 0  # whose gradient is not computed
        assert found.flops == 3 * (cost.training_flops - 2 * recipe.model.tokens(8) * spared)
        assert {kind for kind, flops, _ in found.operators if flops} == {precision}
        still = sum(p.numel() for p in module.stem.parameters()) if spared else 0
        assert (found.weights, found.trained) == (cost.parameters, cost.parameters - still)
        assert (found.blocks, found.in_blocks) == (2, sum(p.numel() for p in module.blocks.parameters()))
    images = fake_inputs(recipe, 3)
    assert images.shape == (3, 3, 8, 8)
    assert images.is_contiguous(memory_format=torch.channels_last)
    text = load_recipe("mnli/mixer")
    assert (fake_inputs(text, 3).dtype, fake_inputs(text, 3).ndim) == (torch.long, 2)


# Rehearsals.


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "engine",
    [
        (("engine.kind", "ddp"),),
        (("engine.kind", "ddp"), ("engine.reduce_dtype", "bf16"), ("train.grad_accum_steps", "2")),
        (("engine.kind", "fsdp"), ("train.grad_accum_steps", "2")),
        (("engine.kind", "fsdp"), ("engine.sharding", "hybrid"), ("train.precision", "fp16")),  # counted as bf16
        (("engine.kind", "ddp"), ("train.freeze", "[body]"), ("train.ema_decay", "0.99")),
    ],
)
def test_a_rehearsal_sends_and_keeps_what_the_estimate_says(engine):
    """And says how far that is off."""
    gpus = 8 if ("engine.sharding", "hybrid") in engine else 4
    rows = {
        row.name: row for row in estimate(load_recipe(B16, (*TINY, *engine)), Cluster(gpus), 10_000, rehearsed=True)
    }
    kinds = [kind for kind in ("all-reduce", "all-gather", "reduce-scatter") if kind in rows]
    assert [name for name in rows if name.startswith("rehears")] == [
        *(f"rehearsed {kind}" for kind in rows if kind in kinds), "rehearsed memory", "rehearsal",
    ]  # fmt: skip
    for kind in kinds:
        counted = rows[f"rehearsed {kind}"]
        assert (counted.value, counted.text) == (rows[kind].value, size(counted.value)), kind
        assert counted.note.startswith("a step, in ")
        assert counted.note.endswith(" calls; the estimate is +0.0% off")
    memory = rows["rehearsed memory"]
    if kinds == ["all-reduce"]:  # FSDP's also has what it has just gathered, which is much of so small a network
        assert rows["memory"].value == pytest.approx(memory.value, rel=0.2)
    off = f"{rows['memory'].value / memory.value - 1:+.1%} off"
    assert memory[2:] == (size(memory.value), f"peak on a GPU, counted; the estimate is {off}")
    assert rows["rehearsal"].note == f"{gpus} ranks, of which this process was rank 0"


def test_the_command_rehearses_zero_and_writes_json(tmp_path):
    """In a process of its own: DeepSpeed has one group for good. It counts a batch of one image."""
    file = tmp_path / "cost.json"
    tiny = [f"--{name}={value}" for name, value in TINY]
    engine = ("--engine.kind=deepspeed", "--engine.zero_stage=2")
    words = ("cost", B16, *tiny, *engine, "--gpus", "4", "--rehearse", "--json", file)
    code, output = Fork(*words, log=tmp_path / "log").wait()
    assert code == 0, output
    written = json.loads(file.read_text())
    assert written["machine"] == "4 x a100"
    found = {row["name"]: row for row in written["rows"]}
    for kind in ("all-reduce", "all-gather"):
        assert found[kind]["value"] == pytest.approx(found[f"rehearsed {kind}"]["value"], rel=1e-4), kind  # it pads
    memory = found["rehearsed memory"]
    assert "peak on a GPU, counted between steps, plus estimated activations; " in memory["note"]
    assert memory["value"] > found["activations"]["value"] + 4 * found["parameters"]["value"]


def test_a_rehearsal_that_fails_leaves_no_group(system: System):
    system({"torch.optim.AdamW": lambda *_, **__: 1 / 0})
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            rehearse(load_recipe(B16, TINY), 4, 2)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("gpus", "words"), [(1, " or take more --gpus with engine.kind fsdp"), (2, " or engine.kind fsdp")]
)
def test_too_much_memory_has_its_cures(gpus, words):
    recipe = load_recipe(B16, [("train.grad_accum_steps", "4")])
    first = "raise train.grad_accum_steps (now 4), set train.activation_checkpointing"
    assert module.cures(recipe, Cluster(gpus)) == f"{first}{words}"


# Measurements, by a clock that goes on where a test says so.


@pytest.fixture
def clock(system: System):
    """clock(seconds): each reading of the time is so much later, a number or a function of the last random matrix."""
    now, sides, sample = [0.0], [0], torch.randn

    def go_on(seconds):
        def read():
            now[0] += seconds(sides[-1]) if callable(seconds) else seconds
            return now[0]

        def matrix(*shape, **options):
            sides.append(shape[0])
            return sample(*shape, **options)

        system({"time.perf_counter": read, "torch.randn": matrix})

    return go_on


@pytest.mark.parametrize(
    ("seconds", "device", "side"),
    [
        (1.0, CPU, 256),
        (lambda side: (side / 1024) ** 3 / 8, CPU, 1024),
        (0.0, CPU, 2048),
        (0.0, GPU, 8192),
    ],
)
def test_a_peak_is_measured_by_products_that_take_a_moment(clock, seconds, device, side):
    """Not in bf16: without instructions for it PyTorch's products take a minute."""
    clock(seconds)
    assert product_side(torch.float32, device) == side


def test_peaks_of_this_machine_are_of_products_and_a_copy(clock, system: System):
    """Products of n rows take 2 n^3 FLOPs; 32 bytes are read and written in half a second."""
    asked = []
    zeros = torch.zeros
    system({"torch.zeros": lambda count, device: asked.append((count, device)) or zeros(8)})
    clock(0.5)
    found = measured_peaks(CPU)
    assert (found.half, found.single, found.bandwidth) == (2 * 256**3 / 0.5, 2 * 256**3 / 0.5, 2 * 32 / 0.5)
    assert asked == [(2**26, CPU)]


@pytest.mark.parametrize(("device", "seconds"), [(CPU, 2.0), (GPU, 12.0)])
def test_the_shortest_of_three_repetitions_counts(system: System, device, seconds):
    """A GPU's work is waited for in each."""
    now, took = [100.0], iter((5.0, 2.0, 3.0))

    def advance(by):
        now[0] += by

    system({"time.perf_counter": lambda: now[0], "torch.cuda.synchronize": lambda device: advance(10)})
    assert shortest(lambda: advance(next(took)), device) == seconds
    assert list(took) == []


@pytest.mark.parametrize("engine", ["plain", "batch_last", None])
def test_a_pass_is_measured_in_an_engines_memory_layout(engine):
    """If one is given; of a network that is prepared as a run does it, here with frozen weights."""
    keys = ("model.depth", "1"), ("train.freeze", "[stem.*]"), ("engine.memory_layout", engine or "batch_last")
    recipe, layouts, trained = load_recipe("digits/mixer", keys), set(), set()

    def passed(module, _):
        layouts.update({module.batch_last} if hasattr(module, "batch_last") else ())
        trained.update(name for name, value in module.named_parameters() if value.requires_grad and "stem" in name)

    with register_module_forward_pre_hook(passed):
        seconds, peak = measured_pass(recipe, 4, CPU, recipe.engine if engine else None)
    assert (seconds > 0, peak) == (True, None)
    assert layouts == {engine == "batch_last"}
    assert not {name for name in trained if name.startswith("stem")}


@pytest.mark.parametrize(
    ("keys", "samples"),
    [
        ({}, 64),
        ({"train.grad_accum_steps": "2", "engine.kind": "fsdp", "train.precision": "bf16"}, 32),  # measured as DDP's
    ],
)
def test_a_pass_is_measured_with_its_roofline_on_this_machine(clock, keys, samples):
    """Each product, copy and pass takes a quarter of a second."""
    recipe = load_recipe("digits/mixer", list(keys.items()))
    plain = recipe.model_copy(update={"engine": load_recipe("digits/mixer").engine})
    peak = 2 * 256**3 / 0.25
    roofline = fake_pass(plain, samples, CPU).seconds(Gpu(peak, peak, 0, 2 * 4 * 2**26 / 0.25, 0))
    clock(0.25)
    [row] = module.measured(recipe)
    assert row[:3] == ("measured pass", 0.25, "250 ms")
    note = f"{samples} images on this machine; its roofline is {1e3 * roofline:.0f} ms, {roofline / 0.25:.0%} of it"
    assert row.note == note


@pytest.mark.parametrize(
    ("keys", "samples"),
    [
        ({"model.depth": "12"}, 4),
        ({"model.depth": "2"}, 7),  # of 1.4e10 FLOPs each
        ({"model.depth": "2", "train.global_batch": "2", "augment.mix_group": "2"}, 2),
        (
            {"model.depth": "2", "train.global_batch": "12", "train.grad_accum_steps": "2", "augment.mix_group": "2"},
            6,
        ),
    ],
)
def test_as_many_samples_as_take_a_moment_are_measured(monkeypatch, keys, samples):
    """At least four, at most a micro-batch; on a GPU memory too."""
    recipe, given = load_recipe(B16, list(keys.items())), []
    monkeypatch.setattr(module, "compare", lambda *words: given.append(words) or (0.03, 0.04, 2 * words[1].peak))
    timed, memory = module.measured(recipe)
    [(_, network, count)] = given
    assert count == samples
    if samples > 4 and "train.global_batch" not in keys:
        assert count == int(1e11 / model_cost(recipe.model, 224, 1000).training_flops)
    assert timed[1:] == (0.04, "40 ms", f"{count} images on this machine; its roofline is 30 ms, 75% of it")
    note = f"{count} images on this GPU; the estimate is -50.0% off"
    assert memory == ("measured activations", 2 * network.peak, size(2 * network.peak), note)


def test_nothing_is_rehearsed_or_measured_unless_it_is_asked_for(clock):
    clock(0.25)
    small = load_recipe("digits/mixer", [("model.depth", "1")])
    for options in ({}, {"rehearsed": True}, {"measured": True}, {"rehearsed": True, "measured": True}):
        names = {row.name.partition(" ")[0] for row in estimate(small, Cluster(1), 1437, **options)}
        assert names & {"rehearsed", "measured"} == {*options}
