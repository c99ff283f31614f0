"""`widemix cost`: numbers that follow from the papers' formulas, and that steps on real tensors bear out."""

import itertools
import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.conftest import ROOT, Fork
from tests.forked_popen import ForkedPopen
from tests.forks import Forks
from widemix.cli.machine import add_cost
from widemix.command_line.arguments import Parser
from widemix.command_line.commands import run_command
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.estimate import check, measure, recipe_tables, report
from widemix.estimate import rehearse as rehearse_module
from widemix.estimate import rows as units
from widemix.estimate.fake import fake_inputs
from widemix.estimate.hardware import EFFICIENCY, GPUS, LAUNCH, Cluster, network_bandwidth
from widemix.estimate.network import Pass, fake_pass
from widemix.estimate.rehearsals import HEAD, rehearsal_line, rehearsal_rows
from widemix.estimate.rehearse import Rehearsal
from widemix.estimate.report import IMAGENET_BYTES, IMAGES_PER_CPU, estimate
from widemix.estimate.rows import Row, show
from widemix.estimate.tables import named_rows, pairs_rows, pairs_table
from widemix.estimate.traffic import Ring, Traffic, exposed, step_traffic
from widemix.estimate.utilisation import fraction_of_peak, peak_fraction
from widemix.models.cost import model_cost
from widemix.models.registry import build_model
from widemix.recipe import Recipe, load_recipe
from widemix.recipe.engine import EngineSection
from widemix.recipe.losses import softmax_loss

B16 = ROOT / "recipes/imagenet/mixer_b16.yaml"
TINY = (
    *(("model.depth", "2"), ("model.channels", "96"), ("model.channel_hidden", "384")),
    *(("train.global_batch", "64"), ("augment.mix_group", "2")),
)


def values(*overrides, samples=1_281_167, rehearsed=False, **cluster):
    where = Cluster(**({"gpus": 128} | cluster))
    rows = estimate(load_recipe(B16, overrides), where, samples, rehearsed)
    return {row.name: row.value for row in rows}


def test_counts_hours_and_memory_of_mixer_b16():
    found = values()
    assert found["parameters"] == 59_880_472
    assert found["Omega"] == pytest.approx(196 * 768 * (384 + 3072) / 2)
    assert found["steps"] == 1_281_167 // 4096 * 300
    assert found["hours"] == pytest.approx(found["step"] * found["steps"] / 3600)
    assert found["GPU hours"] == pytest.approx(128 * found["hours"])
    assert found["all-reduce"] == 4 * 59_880_472
    assert found["state, DDP"] == 16 * 59_880_472
    assert found["state, FSDP"] == 16 * 59_880_472 / 128
    assert found["memory"] == found["state, DDP"] + found["activations"]
    assert found["read rate"] == pytest.approx(4096 / found["step"] / 32 * 102_000)


@pytest.mark.parametrize(("gpus", "hosts"), [(1, 1), (4, 1), (5, 2), (6, 2), (8, 2), (10, 3)])
def test_a_node_has_at_most_four_gpus_unless_nodes_are_given(gpus, hosts):
    assert Cluster(gpus).hosts == hosts
    assert Cluster(gpus, nodes=1).hosts == 1
    assert (Cluster(gpus).local, Cluster(gpus, nodes=1).local) == (gpus // hosts, gpus)
    shared = [Cluster(gpus).sharers(kind, "hybrid") for kind in ("fsdp", "ddp", "deepspeed")]
    assert shared == [gpus // hosts, gpus, gpus]


def test_nothing_is_rehearsed_or_measured_unless_it_is_asked_for(monkeypatch):
    for name in ("rehearsed", "measured"):
        monkeypatch.setattr(f"widemix.estimate.check.{name}", lambda *_, name=name: [Row(name, 1.0, "1", "")])
    small = load_recipe("digits/mixer", [("model.depth", "1")])
    asked = [{}, {"rehearsed": True}, {"measured": True}, {"rehearsed": True, "measured": True}]
    for options in asked:
        names = [row.name for row in estimate(small, Cluster(1), 1437, **options)]
        assert [name for name in names if name in ("rehearsed", "measured")] == [*options]


@pytest.mark.long
def test_a_small_network_takes_the_time_of_its_launches():
    small = load_recipe("digits/mixer")
    operators = len(fake_pass(small, 64).operators)
    found = {row.name: row for row in estimate(small, Cluster(1), 1437)}
    assert found["step"].value == pytest.approx(operators * LAUNCH, rel=0.02)  # and the optimizer's memory traffic
    assert f"the host starts {operators} operators" in found["compute"].note
    halves = load_recipe("digits/mixer", [("train.grad_accum_steps", "2")])
    twice = {row.name: row.value for row in estimate(halves, Cluster(1), 1437)}
    assert twice["step"] == pytest.approx(2 * found["step"].value, rel=0.02)
    large = {row.name: row for row in estimate(load_recipe(B16), Cluster(8), 10_000)}
    assert "host" not in large["compute"].note


def test_memory_follows_the_recipes_engine():
    options = [("engine.kind", "deepspeed"), ("engine.zero_stage", "2")]
    found = values(*options)
    assert found["memory"] == found["state, ZeRO 2"] + found["activations"]
    assert found["state, ZeRO 2"] == pytest.approx((2 + 4 / 128 + 12 / 128) * 59_880_472)


@pytest.mark.parametrize("name", ["cifar10/sw_mlp", "cifar10/rp_s_mixer", "cifar10/beta_lasso"])
def test_memory_has_what_is_no_weight_too(name):
    """The positions of masked weights take three quarters of what the weights and their state do."""
    small = {"cifar10/beta_lasso": [("model.base_channels", "4")]}.get(name, [])
    recipe = load_recipe(name, small)
    found = {row.name: row.value for row in estimate(recipe, Cluster(1), 50_000)}
    module = build_model(recipe.model, recipe.data.image_size, 10)
    assert found["buffers"] == sum(buffer.nbytes for buffer in module.buffers())
    assert found["memory"] == found["state, DDP"] + found["buffers"] + found["activations"]


def test_wrong_numbers_are_refused():
    wrong = ({"gpus": 0}, {"gpus": 3}, {"samples": 0}, {"nodes": 3}, {"nodes": 0})
    for one in (*wrong, *({"network": text} for text in ("", "0", "-1", "nan", "inf", "0xhdr", "hd", "3x"))):
        with pytest.raises(InputError):
            values(("model.depth", "1"), **one)
    with pytest.raises(InputError, match="both must be above 0"):
        pairs_table(-1, 1)
    with pytest.raises(InputError, match="--network hd: should be"):
        Cluster(1, network="hd").check()  # though one GPU sends nothing
    Cluster(6, nodes=2).check()


def test_a_link_within_a_node_may_be_slower_than_the_network():
    assert Cluster(8, "rtx3090", nodes=2, network="4xndr").bandwidth == 32e9  # PCIe, of 200 GB/s
    assert Cluster(8, "rtx3090", nodes=2, network="100").bandwidth == 12.5e9


def test_each_precision_has_the_peak_of_its_units():
    """By NVIDIA's data sheets, dense; without bf16 a V100 computes it in fp32."""
    peaks = {kind: [gpu.peak(each) / 1e12 for each in ("fp16", "bf16", "fp32")] for kind, gpu in GPUS.items()}
    assert peaks == {
        "v100": [125, 15.7, 15.7],
        "a100": [312, 312, 19.5],
        "h100": [989, 989, 67],
        "h200": [989, 989, 67],
        "rtx3090": [71, 71, 35.6],
    }
    memory = {kind: gpu.memory / 1e9 for kind, gpu in GPUS.items()}
    assert memory == {"v100": 32, "a100": 80, "h100": 80, "h200": 141, "rtx3090": 24}
    links = {kind: gpu.link / 1e9 for kind, gpu in GPUS.items()}  # of one direction
    assert links == {"v100": 300 / 2, "a100": 600 / 2, "h100": 900 / 2, "h200": 900 / 2, "rtx3090": 32}
    assert (GPUS["h100"].bandwidth, GPUS["h200"].bandwidth) == (3.35e12, 4.8e12)


def test_networks_by_name_by_adapters_and_by_number():
    for speed in (10, 25, 100, 400):
        assert network_bandwidth(f"{speed}gbe") == speed * 1e9 / 8
    assert network_bandwidth("xdr") == 2 * network_bandwidth("ndr") == 4 * network_bandwidth("hdr")
    for text, gigabits in (("hdr", 200), ("4xNDR", 1600), ("2xedr", 200), ("100", 100), ("2x12.5", 25)):
        assert network_bandwidth(text) == gigabits * 1e9 / 8


def test_a_ring_moves_what_it_must_and_hides_it_behind_the_backward_pass():
    sums = Traffic("all-reduce", 1e9, 10, Ring(128, 25e9), hidden=True)
    alone = 2 * 127 / 128 * 1e9 / 25e9 + 10 * 50e-6
    assert sums.seconds == pytest.approx(alone)
    assert sums._replace(ring=Ring(1, 25e9)).seconds == 0
    assert exposed([sums], backward=1) == pytest.approx(alone / 10)  # the last bucket
    assert exposed([sums], backward=alone / 2) == pytest.approx(alone / 2)
    gathers = Traffic("all-gather", 1e9, 1, Ring(2, 1e9), hidden=False)
    assert exposed([gathers], backward=1) == pytest.approx(0.5 + 50e-6)
    of_each = Traffic("all-gather", 4e9, 4 * 2, Ring(2, 1e9), hidden=True, times=4)
    one = 0.5 + 2 * 50e-6
    assert exposed([of_each], backward=0.4) == pytest.approx(3 * (one - 0.4) + one / 2)
    assert exposed([of_each], backward=0.1) == pytest.approx(4 * (one - 0.1))
    assert exposed([of_each, sums], backward=0.1) == pytest.approx(4 * (one - 0.1) + alone)
    assert exposed([of_each, sums], backward=1) == pytest.approx(one / 2 + alone / 10)


@pytest.mark.parametrize(
    ("engine", "micro_batches"),
    [
        ((("engine.kind", "ddp"),), [1]),  # `no_sync` in the others
        ((("engine.kind", "fsdp"),), [4, 1]),
        ((("engine.kind", "deepspeed"), ("engine.zero_stage", "1")), [1, 1]),
        ((("engine.kind", "deepspeed"), ("engine.zero_stage", "2")), [4, 1]),
        ((("engine.kind", "deepspeed"), ("engine.zero_stage", "3")), [1, 4]),
    ],
)
def test_sums_of_the_last_micro_batch_hide_behind_its_backward_pass_alone(engine, micro_batches):
    """They were hidden behind the backward passes of all, which they begin after."""
    recipe = load_recipe(B16, [*engine, ("train.grad_accum_steps", "4")])
    network = Pass([], 0, weights=10**8, trained=10**8, blocks=2, in_blocks=0)
    traffic = step_traffic(recipe.engine, recipe.train, network, Cluster(4))
    assert [each.times for each in traffic] == micro_batches


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_weights_are_gathered_in_the_precision_that_is_computed_in(precision, size):
    network = Pass([], 0, weights=1000, trained=600, blocks=2, in_blocks=900)
    zero = ("engine.kind", "deepspeed")
    for engine, elements in (
        ((("engine.kind", "fsdp"),), 1000 + 900),  # blocks once more for the backward pass
        ((zero, ("engine.zero_stage", "3")), 1000),
        ((zero, ("engine.zero_stage", "2")), 600),
    ):
        recipe = load_recipe(B16, [*engine, ("train.precision", precision)])
        traffic = step_traffic(recipe.engine, recipe.train, network, Cluster(4))
        assert [each.bytes for each in traffic if each.kind == "all-gather"] == [size * elements], engine


def test_what_is_not_trained_takes_no_gradient_and_an_average_takes_a_copy():
    head = 96 * 1000 + 1000
    frozen = ("train.freeze", "[body]"), ("train.ema_decay", "0.999"), ("train.max_steps", "100")
    probe = values(*TINY, *frozen, gpus=4)
    assert probe["all-reduce"] == 4 * head
    assert probe["state, DDP"] == (4 + 4) * probe["parameters"] + (4 + 8) * head  # the average has all
    assert probe["steps"] == 100
    assert probe["hours"] == pytest.approx(100 * probe["step"] / 3600)
    on_host = values(*TINY, ("train.ema_decay", "0.999"), ("train.ema_device", "cpu"), gpus=4)
    assert on_host["state, DDP"] == 16 * on_host["parameters"]


def test_hybrid_shards_are_those_of_a_node_and_only_their_sums_pass_between_nodes():
    fsdp = (*TINY, ("engine.kind", "fsdp"))
    found, full = (values(*fsdp, ("engine.sharding", each), gpus=8) for each in ("hybrid", "full"))
    assert found["state, FSDP"] == 16 * found["parameters"] / 4
    assert full["state, FSDP"] == 16 * found["parameters"] / 8
    assert full["memory"] == full["state, FSDP"] + full["activations"]
    assert found["all-reduce"] == 4 * found["parameters"] / 4
    assert "all-reduce" not in full
    assert found["all-gather"] == full["all-gather"]
    on_host = values(*fsdp, ("engine.cpu_offload", "true"), gpus=8)
    assert (on_host["state, FSDP"], on_host["state, DDP"]) == (0, full["state, DDP"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "deepspeed"])
def test_a_ring_of_all_gpus_is_as_slow_as_what_is_between_its_nodes(kind):
    network = Pass([], 0, weights=10**8, trained=10**8, blocks=2, in_blocks=0)
    recipe = load_recipe(B16, [("engine.kind", kind)])
    for nodes, speed in ((1, 300e9), (2, 12.5e9)):  # NVLink of A100s, 100 Gbit/s
        traffic = step_traffic(recipe.engine, recipe.train, network, Cluster(8, nodes=nodes, network="edr"))
        assert {each.ring for each in traffic} == {Ring(8, speed)}
    hybrid = load_recipe(B16, [("engine.kind", "fsdp"), ("engine.sharding", "hybrid")])
    traffic = step_traffic(hybrid.engine, hybrid.train, network, Cluster(8, nodes=2, network="edr"))
    within, between = Ring(4, 300e9), Ring(2, 12.5e9 / 4)
    assert [each.ring for each in traffic] == [within, within, between]
    alone = step_traffic(hybrid.engine, hybrid.train, network, Cluster(4))  # whose node has no other
    assert [(each.kind, each.ring) for each in alone] == [("all-gather", within), ("reduce-scatter", within)]


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
def test_checkpointing_computes_the_blocks_again_for_less_memory(precision, engine):
    options = (*TINY, ("train.precision", precision), ("engine.kind", engine))
    plain, again = (
        fake_pass(load_recipe(B16, (*options, ("train.activation_checkpointing", each))), 16)
        for each in ("false", "true")
    )
    layers = 2 * 96 * 196 * 384 + 196 * 96 * 384  # of a block; nothing needs what the last one computes
    assert again.flops == plain.flops + 16 * 2 * 2 * layers  # of two blocks, two a multiply-add
    assert again.peak < 0.7 * plain.peak


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "engine",
    [
        (("engine.kind", "ddp"),),
        (("engine.kind", "ddp"), ("engine.reduce_dtype", "bf16"), ("train.grad_accum_steps", "2")),
        (("engine.kind", "fsdp"), ("train.grad_accum_steps", "2")),
        (("engine.kind", "ddp"), ("train.freeze", "[body]"), ("train.ema_decay", "0.99")),
    ],
)
def test_a_rehearsal_sends_and_keeps_what_the_estimate_says(engine):
    found = values(*TINY, *engine, gpus=4, rehearsed=True)
    kinds = [kind for kind in ("all-reduce", "all-gather", "reduce-scatter") if kind in found]
    assert kinds
    for kind in kinds:
        assert found[kind] == found[f"rehearsed {kind}"], kind
    if "all-reduce" in found:  # FSDP's also has what it has just gathered, which is much of so small a network
        assert found["memory"] == pytest.approx(found["rehearsed memory"], rel=0.2)


def test_a_rehearsal_says_how_far_the_estimate_is_off(monkeypatch):
    counts = Rehearsal({"all-reduce": 3}, {"all-reduce": 5 * 2**19}, kept=2**20, peak=2**21, seconds=1.25)
    ranks = []
    monkeypatch.setattr(check, "rehearse", lambda recipe, *given: ranks.append(given) or counts)
    network = Pass([], peak=2**22, weights=2**19, trained=2**19, blocks=1, in_blocks=0)  # its gradients: 2 MiB
    sums, memory, took = check.rehearsed(load_recipe(B16), network, Cluster(4), memory=3 * 2**20)
    note = "a step, in 3 calls; the estimate is -20.0% off"
    assert sums == Row("rehearsed all-reduce", 5 * 2**19, "2.50 MiB", note)
    assert memory[1:3] == (2**21, "2.00 MiB")
    assert memory.note.endswith("counted; the estimate is +50.0% off")
    assert took[:3] == ("rehearsal", 1.25, "1.2 s")
    counts = counts._replace(peak=None)
    _, memory, _ = check.rehearsed(load_recipe(B16), network, Cluster(4), memory=3 * 2**20)
    assert memory[1:3] == (5 * 2**20, "5.00 MiB")  # kept, and the pass's
    assert memory.note.endswith("estimated activations; the estimate is -40.0% off")
    check.rehearsed(load_recipe(B16), network, Cluster(8), memory=1.0)
    assert ranks == [(4, 4), (4, 4), (8, 4)]
    zero = load_recipe(B16, [("engine.kind", "deepspeed"), ("engine.zero_stage", "1")])
    names = [row.name for row in check.rehearsed(zero, network, Cluster(4), memory=1.0)]
    assert names == ["rehearsed all-reduce", "rehearsed memory", "rehearsal"]  # it gathered nothing
    counts = Rehearsal({}, {}, kept=5, peak=2**21, seconds=1.0)  # as on one GPU
    memory, _ = check.rehearsed(load_recipe(B16), network, Cluster(1), memory=2**21)
    assert memory[1:] == (2**21, "2.00 MiB", "peak on a GPU, counted; the estimate is +0.0% off")
    for peak in (80 * 10**9, 80 * 10**9 + 1):  # of an A100
        counts = counts._replace(peak=peak)
        with nullcontext() if peak == 80 * 10**9 else pytest.raises(InputError, match=r"needs 80\.0 GB on each GPU"):
            check.rehearsed(load_recipe(B16), network, Cluster(4), memory=1.0)


@pytest.mark.parametrize(
    ("gpus", "words"), [(1, " or take more --gpus with engine.kind fsdp"), (2, " or engine.kind fsdp")]
)
def test_too_much_memory_has_its_cures(gpus, words):
    recipe = load_recipe(B16, [("train.grad_accum_steps", "4")])
    first = "raise train.grad_accum_steps (now 4), set train.activation_checkpointing"
    assert check.cures(recipe, Cluster(gpus)) == f"{first}{words}"


def test_the_command_rehearses_zero_and_writes_json(tmp_path):
    """In a process of its own: DeepSpeed has one group for good."""
    file = tmp_path / "cost.json"
    tiny = [f"--{name}={value}" for name, value in TINY]
    engine = ("--engine.kind=deepspeed", "--engine.zero_stage=2")
    words = ("cost", B16, *tiny, *engine, "--gpus", "4", "--rehearse", "--json", file)
    code, output = Fork(*words, log=tmp_path / "log").wait()
    assert code == 0, output
    written = json.loads(file.read_text())
    assert written["machine"] == "4 x a100"
    found = {row["name"]: row["value"] for row in written["rows"]}
    for kind in ("all-reduce", "all-gather"):
        assert found[kind] == pytest.approx(found[f"rehearsed {kind}"], rel=1e-4), kind  # it pads


def test_what_cannot_work_on_the_cluster_fails_in_one_line():
    large = [("model.depth", "1"), ("train.global_batch", "1048576")]
    with pytest.raises(InputError, match=r"needs .* GB on each GPU, a v100 has 32; raise train.grad_accum_steps"):
        values(*large, gpu="v100", rehearsed=True)
    with pytest.raises(InputError, match="does not divide by 96 ranks"):
        values(gpus=96, rehearsed=True)


def write_rows(folder: str) -> None:
    """In a fork, whose `widemix cost` are forks too: the rows of a folder's recipes."""
    subprocess.Popen = ForkedPopen
    rows = list(rehearsal_rows(Path(folder), Cluster(128, nodes=32), [("train.epochs", "150")]))
    Path(folder, "rows.json").write_text(json.dumps(rows))


def test_the_table_of_a_folder_has_each_recipe_or_why_it_cannot_run_there(tmp_path):
    good = f"extends: {B16}\nmodel: {{depth: 1, channels: 48, channel_hidden: 96}}\n"
    (tmp_path / "good.yaml").write_text(good)
    (tmp_path / "odd.yaml").write_text(good.replace("depth", "detph"))
    codes, said = Forks(write_rows, str(tmp_path), log=tmp_path / "log").wait()
    assert codes == [0], said
    row, odd = json.loads((tmp_path / "rows.json").read_text())
    lines = [*HEAD.splitlines(), rehearsal_line(row), rehearsal_line(odd)]
    assert {line.count("|") for line in lines} == {10}
    assert "model.depth" in lines[3]
    cells = lines[2].split(" | ")
    assert cells[1] == f"{row['parameters'] / 1e6:.1f} M"
    assert cells[2] == f"{4 * row['parameters'] / 1e6:,.0f} MB"  # DDP sends every gradient once
    assert cells[5] == f"{row['step'] * (1_281_167 // 4096) * 150 / 3600:.1f}"
    with pytest.raises(InputError, match="has no recipes"):
        next(rehearsal_rows(tmp_path / "none", Cluster(128)))
    with pytest.raises(InputError, match="--gpus 0"):  # once, and not by every recipe
        next(rehearsal_rows(tmp_path, Cluster(0)))


@pytest.mark.parametrize(("nodes", "given"), [(None, []), (1, ["--nodes", "1"]), (2, ["--nodes", "2"])])
def test_each_recipe_of_a_folder_gets_the_nodes_that_were_given(nodes, given, tmp_path, monkeypatch):
    """Of ten GPUs the default is three nodes, which as --nodes would be refused."""
    (tmp_path / "one.yaml").touch()
    commands = []
    failed = SimpleNamespace(returncode=1, stderr="error: none")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or failed)
    [row] = rehearsal_rows(tmp_path, Cluster(10, nodes=nodes))
    assert row["error"] == "error: none"
    [command] = commands
    assert command[command.index("--network") + 2 : command.index("--rehearse")] == given
    failed.stderr = " \n"
    cluster = Cluster(10, "h100", nodes=nodes, network="xdr")
    [row] = rehearsal_rows(tmp_path, cluster, [("train.epochs", "150"), ("optim.lr", "0.1")])
    assert (row["name"], row["error"]) == ("one", "failed")
    command = commands[-1]
    file = str(tmp_path / "one.yaml")
    where = ["--gpus", "10", "--gpu", "h100", "--network", "xdr", *given, "--rehearse"]
    start = command.index("cost")
    assert command[start:-2] == ["cost", file, *where, "--train.epochs=150", "--optim.lr=0.1"]
    assert (command[-2], Path(command[-1]).name) == ("--json", "one.json")
    failed.stderr = "first\nerror: last\n"
    (tmp_path / "another.yaml").touch()
    assert [(row["name"], row["error"]) for row in rehearsal_rows(tmp_path, cluster)] == [
        ("another", "error: last"),
        ("one", "error: last"),
    ]


def test_names_begin_and_numbers_end_below_each_other(capsys):
    rows = [Row("step", 1, "1 s", "of a batch"), Row("parameters", 2e6, "2,000,000")]
    show(rows, "title")
    printed = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert printed == [[f" {row.name:10} ", f" {row.text:>9} ", f" {row.note:10} "] for row in rows]


def test_the_larger_imagenets_hours_are_known_too():
    found = values(("model.depth", "1"), ("data.num_classes", "21841"), samples=None)
    assert found["steps"] == 14_126_136 // 4096 * 300


def test_images_and_their_speed_are_the_benchs():
    table = (ROOT / "pipeline/bench/README.md").read_text()
    assert f"| **ours, restart markers** | **{IMAGES_PER_CPU:,}** |" in table  # as prep stores them
    assert f"(mean {IMAGENET_BYTES / 1000:.0f} kB)" in table


def test_data_that_nobody_knows_have_no_hours(monkeypatch):
    monkeypatch.setattr(report, "fake_pass", lambda recipe, micro: Pass([("bf16", 10**12, 10**9)], 0, 10, 10, 1, 10))
    other = load_recipe(B16, [("data.num_classes", "7"), ("data.path", "none")])
    names = [row.name for row in estimate(other, Cluster(1))]
    assert not {"steps", "hours", "GPU hours", "storage", "read rate"}.intersection(names)
    named = [row.name for row in estimate(other, Cluster(1), 5000)]
    assert {"steps", "hours", "GPU hours"} <= {*named}
    assert not {"storage", "read rate"}.intersection(named)  # nobody knows how large an image is
    pairs = {row.name: row for row in estimate(load_recipe("mnli/mixer", [("data.path", "none")]), Cluster(1), 10**6)}
    assert pairs["forward FLOPs"].note == "per pair, two a multiply-add"
    assert pairs["step"].note.endswith("pairs/s over all GPUs")


def test_memory_that_just_fills_a_gpu_is_too_much(monkeypatch):
    for peak, fits in ((32 * 10**9 - 161, True), (32 * 10**9 - 160, False)):  # besides ten weights and their state
        network = Pass([("fp16", 10**12, 10**9)], peak, 10, 10, 1, 10)
        monkeypatch.setattr(report, "fake_pass", lambda recipe, micro, network=network: network)
        recipe = load_recipe(B16, [("train.precision", "fp16")])
        rows = {row.name: row for row in estimate(recipe, Cluster(1, "v100"), 5000)}
        assert ("too much" in rows["memory"].note) != fits
        assert "no bf16" not in rows["compute"].note


def test_state_without_shards_is_updated_whole(monkeypatch):
    """By ZeRO 0 as by DDP; the larger stages and FSDP divide the optimizer's work by the ranks."""
    network = Pass([("bf16", 10**12, 10**9)], 0, 10**9, 10**9, 1, 10**8)
    monkeypatch.setattr(report, "fake_pass", lambda recipe, micro: network)
    shards = {"ddp": 1, "fsdp": 8, "hybrid": 4, 0: 1, 1: 8, 2: 8, 3: 8}
    compute = {}
    for name, number in shards.items():
        engine = [("engine.kind", "deepspeed" if isinstance(name, int) else name.replace("hybrid", "fsdp"))]
        engine += [("engine.zero_stage", str(name))] if isinstance(name, int) else []
        engine += [("engine.sharding", "hybrid")] if name == "hybrid" else []
        for optimizer, states in (("adamw", 2), ("sgd", 1)):
            recipe = load_recipe(B16, [*engine, ("optim.name", optimizer), ("train.precision", "fp32")])
            rows = estimate(recipe, Cluster(8, nodes=2), 5000)
            compute = next(row.value for row in rows if row.name == "compute")
            update = 4 * (3 + 2 * states) * 1e9 / number / 2.039e12 / 0.82
            assert compute == pytest.approx(1e12 / 312e12 / 0.82 + update), name


def test_a_network_beyond_any_machine_is_refused_and_dense_copies_are_told():
    huge = [("model.channels", "8000000"), ("model.channel_hidden", "8000000")]
    with pytest.raises(InputError, match=r"weights, where costs end at 1e\+14; take smaller sizes"):
        report._model(load_recipe(B16, huge))
    rows = {row.name: row for row in report._model(load_recipe("cifar10/sw_mlp"))}
    sparse = load_recipe("cifar10/sw_mlp")
    copies = model_cost(sparse.model, sparse.data.image_size, sparse.data.num_classes).dense_bytes
    assert rows["dense copies"].value == copies > 0
    assert "dense copies" not in {row.name for row in report._model(load_recipe("digits/mixer"))}
    noted = next(row for row in report._model(load_recipe(B16)) if row.name == "the paper prints")
    assert noted.note == "table 1: 786 channels for 768"


def test_pairs_end_where_tables_do():
    with pytest.raises(InputError, match=r"the widest such Mixer has 1\.26e\+06 channels, and tables end at 1e\+06"):
        pairs_rows(2e18, 1)
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(InputError, match="both must be above 0"):
            pairs_rows(*wrong)
    rows = pairs_rows(2**18, 2)
    assert list(rows[0]) == ["C", "S", "width m = S C", "Omega"]
    for row in rows:
        channels, tokens = row["C"], row["S"]
        assert row["width m = S C"] == channels * tokens
        assert row["Omega"] == 2 * (channels * tokens**2 + channels**2 * tokens) / 2
    assert min(row["S"] for row in rows) in (1, 2)  # one step further there would be less than one
    assert pairs_table(2**18, 2).endswith("(Omega / gamma)^(1/3) = 50.8")


def test_pairs_have_the_omega_asked_for_and_the_widest_is_in_the_middle():
    lines = [line.strip("| ").split(" | ") for line in pairs_table(2**18, 1).splitlines()[2:-2]]
    rows = [[float(cell.replace(",", "")) for cell in line] for line in lines]
    widths = [width for _, _, width, _ in rows]
    assert widths.index(max(widths)) == len(rows) // 2
    assert [64, 64, 4096, 262_144] in rows
    assert all(omega == pytest.approx(2**18, rel=0.05) for *_, omega in rows)  # tokens are whole


def test_the_tables_are_written_as_json_too(tmp_path):
    file = tmp_path / "named.json"
    commands = Parser(prog="widemix")
    add_cost(commands.add_subparsers(required=True))
    assert run_command(commands, argv=["cost", "--named", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["rows"] == named_rows()


@pytest.mark.parametrize(("seconds", "side"), [(lambda side: 1.0, 256), (lambda side: (side / 1024) ** 3 / 8, 1024)])
def test_a_peak_is_measured_by_matrices_whose_product_takes_a_moment(monkeypatch, seconds, side):
    """PyTorch's products in bf16 take a minute on a CPU without instructions for them."""
    monkeypatch.setattr(measure, "_product_seconds", lambda side, *_: seconds(side))
    assert measure.product_side(torch.bfloat16, torch.device("cpu")) == side
    monkeypatch.setattr(measure, "_product_seconds", lambda *_: 0.0)
    assert measure.product_side(torch.bfloat16, torch.device("cpu")) == 2048
    assert measure.product_side(torch.bfloat16, torch.device("cuda")) == 8192


def test_the_shortest_of_the_repetitions_counts(monkeypatch):
    clock, took = [100.0], iter((5.0, 2.0, 3.0))
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def work():
        clock[0] += next(took)

    assert measure._shortest(work, torch.device("cpu")) == 2


def test_the_pass_and_the_peaks_of_its_roofline_are_measured_on_this_process_device(monkeypatch):
    monkeypatch.setattr(measure, "read_topology", lambda: SimpleNamespace(device="cuda:3"))
    monkeypatch.setattr(measure, "measured_peaks", lambda device: f"peaks of {device}")
    monkeypatch.setattr(measure, "measured_pass", lambda *given: given[1:])
    network = SimpleNamespace(seconds={"peaks of cuda:3": 0.25}.get)
    assert measure.compare(load_recipe("digits/mixer"), network, 6) == (0.25, 6, "cuda:3")


def test_a_measured_pass_says_how_far_the_estimate_is_off(monkeypatch):
    """Memory on a GPU alone: elsewhere no peak is measured."""
    peaks = [1_000_000, None]
    monkeypatch.setattr(check, "fake_pass", lambda *_: SimpleNamespace(peak=800_000))
    monkeypatch.setattr(check, "compare", lambda recipe, network, samples: (0.03, 0.04, peaks.pop(0)))
    digits = load_recipe("digits/mixer", [("train.grad_accum_steps", "2")])
    timed, memory = check.measured(digits)
    assert timed == Row("measured pass", 0.04, "40 ms", "32 images on this machine; its roofline is 30 ms, 75% of it")
    assert memory[:2] == ("measured activations", 1_000_000)
    assert memory.note == "32 images on this GPU; the estimate is -20.0% off"
    assert check.measured(digits) == [timed]


@pytest.mark.parametrize(
    ("flops", "batch", "samples"), [(1e12, 64, 4), (1e12, 2, 2), (1e10, 64, 10), (0.9e10, 64, 11), (1e9, 64, 64)]
)
def test_as_many_samples_as_take_a_moment_are_measured_by_ddp(monkeypatch, flops, batch, samples):
    """At least four, at most a micro-batch."""
    passes, fake = [], SimpleNamespace(peak=1)

    def passed(recipe, *given):
        passes.append((recipe.engine.kind, *given))
        return fake

    def compared(recipe, network, micro):
        assert network is fake
        passes.append((recipe.engine.kind, micro))
        return 0.03, 0.04, None

    monkeypatch.setattr(check, "model_cost", lambda *_: SimpleNamespace(training_flops=flops))
    monkeypatch.setattr(check, "fake_pass", passed)
    monkeypatch.setattr(check, "compare", compared)
    digits = load_recipe(
        "digits/mixer", [("engine.kind", "fsdp"), ("train.global_batch", str(batch)), ("augment.mix_group", "2")]
    )
    assert check.measured(digits)[0].note.startswith(f"{samples} images on this machine")
    assert passes == [("ddp", samples, torch.device("cpu")), ("ddp", samples)]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999, "999"),
        (1000, "1 k"),
        (59_880_472, "59.9 M"),
        (10**6, "1 M"),
        (2 * 10**9, "2 G"),
        (10**12, "1 T"),
        (0.5, "0.5"),
    ],
)
def test_numbers_have_three_digits_and_a_prefix(number, text):
    assert units.short(number) == text


def test_bytes_are_gib_from_one_on():
    assert units.size(2**30) == "1.00 GiB"
    assert units.size(2**30 - 2**20) == "1023.00 MiB"


def test_a_fake_pass_has_the_flops_of_the_cost_in_the_precision_of_the_recipe():
    """And counts its weights, those that train, and those of blocks."""
    for precision, frozen in (("fp32", "[stem.*]"), ("bf16", "[]"), ("fp16", "[]")):
        options = ("train.precision", precision), ("train.freeze", frozen), ("model.depth", "2")
        recipe = load_recipe("digits/mixer", options)
        found, cost = fake_pass(recipe, 3), model_cost(recipe.model, 8, 10)
        module = build_model(recipe.model, 8, 10)
        spared = module.stem.proj.weight.numel() if frozen != "[]" else 0  # whose gradient is not computed
        assert found.flops == 3 * (cost.training_flops - 2 * recipe.model.tokens * spared)
        assert {kind for kind, flops, _ in found.operators if flops} == {precision}
        still = sum(p.numel() for p in module.stem.parameters()) if spared else 0
        assert (found.weights, found.trained) == (cost.parameters, cost.parameters - still)
        assert (found.blocks, found.in_blocks) == (2, sum(p.numel() for p in module.blocks.parameters()))
    images = fake_inputs(recipe, 3)
    assert images.shape == (3, 3, 8, 8)
    assert images.is_contiguous(memory_format=torch.channels_last)
    text = load_recipe("mnli/mixer")
    assert (fake_inputs(text, 3).dtype, fake_inputs(text, 3).ndim) == (torch.long, 2)


def test_a_rehearsal_that_fails_leaves_no_group(monkeypatch):
    monkeypatch.setattr(rehearse_module, "build_engine", lambda *_: 1 / 0)
    recipe = load_recipe(B16, TINY)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            rehearse_module.rehearse(recipe, 4, 2)
    assert not torch.distributed.is_initialized()


def test_a_rehearsal_asks_as_the_first_rank_and_takes_fp16_for_bf16(monkeypatch):
    asked = []

    def built(engine, module, optim, train, topology):
        asked.append((train.precision, topology.rank, topology.world, topology.local_rank, topology.local_world))
        return SimpleNamespace(step=lambda batches, lr: asked.append((len(batches), len(batches[0]), lr)))

    monkeypatch.setattr(rehearse_module, "build_engine", built)
    monkeypatch.setattr(rehearse_module, "check_engine", lambda *given: asked.append(given[2].precision))
    options = (("train.precision", "fp16"), ("train.grad_accum_steps", "2"), ("optim.lr", "0.125"))
    found = rehearse_module.rehearse(load_recipe(B16, (*TINY, *options)), 8, 4)
    assert asked == ["bf16", ("bf16", 0, 8, 0, 4), *[(2, 4, 0.125)] * 2]
    assert (found.calls, found.bytes) == ({}, {})
    module = build_model(load_recipe(B16, TINY).model, 224, 1000)
    assert (found.peak, found.kept) == (0, 4 * sum(p.numel() for p in module.parameters()))


def test_a_short_run_has_its_time_in_seconds_or_minutes_and_a_small_network_a_whole_batch_measured(monkeypatch):
    monkeypatch.setattr(measure, "_MOST_S", 0.01)  # small products, whose peak is not that of the machine

    def texts(*overrides, samples, measured=False):
        digits = load_recipe(ROOT / "recipes/digits/mixer.yaml", [*overrides, ("data.path", "none")])
        rows = estimate(digits, Cluster(gpus=1), samples, measured=measured)
        return {row.name: (row.value, row.text, row.note) for row in rows}

    found = texts(samples=1437, measured=True)
    hours, text, _ = found["hours"]
    assert text == f"{hours:.1g} ({3600 * hours:.1f} s)"
    assert found["measured pass"][2].startswith("64 images on this machine")
    hours, text, _ = texts(samples=100_000)["hours"]
    assert text == f"{hours:.1g} ({60 * hours:.1f} min)"


COUNTS = {  # of Mixer-B/16, S = 196, C = 768: section 4 and table 1
    "parameters": (59_880_472, "59,880,472", ""),
    "connections": (48 * 260_112_384, "12.5 G", "of all mixing layers, as wide sparse matrices"),
    "Omega": (196 * 768 * (384 + 3072) / 2, "260 M", "mean connections of a mixing layer (equation 14)"),
    "width m": (196 * 768, "150,528", "of the features: S x C of a Mixer"),
    "max. width": (196 * 3072, "602,112", "of a mixing layer: max(S D_C, C D_S) of a Mixer"),
}
ROOFLINE = "operator by operator, 82% of its roofline, "


def printed(monkeypatch, network, cluster, *overrides, samples=None):
    """All rows but the counts of the network, which are checked: value, text and note by name."""
    monkeypatch.setattr(report, "fake_pass", lambda recipe, micro: network)
    recipe = load_recipe(B16, overrides)
    rows = {row.name: row[1:] for row in estimate(recipe, cluster, samples)}
    assert {name: rows[name] for name in COUNTS} == COUNTS
    return dict(itertools.dropwhile(lambda item: item[0] != "global batch", rows.items()))


def test_the_whole_table_follows_from_the_operators_and_the_data_sheets(monkeypatch):
    """Eight A100s on two nodes by 200 Gbit/s, two micro-batches of DDP: each number by hand."""
    half, single, bandwidth, wire = 312e12, 19.5e12, 2.039e12, 25e9
    operators = [("bf16", 6 * 10**12, 10**9), ("fp32", 10**9, 4 * 10**9), ("bf16", 10**9, 2 * 10**9)]
    network = Pass(operators, 3 << 30, 59_880_472, 59_880_472, blocks=12, in_blocks=56_000_000)
    one_pass = (6e12 / half + 4e9 / bandwidth + 2e9 / bandwidth) / 0.82  # the first computes, the others move bytes
    assert 1e9 / single < 4e9 / bandwidth
    update = 4 * 7 * 59_880_472 / bandwidth / 0.82  # w, g, and two moments are read, w and these are written
    calls = 10  # of 25 MiB: 228.4 MiB
    sums = 2 * 7 / 8 * 4 * 59_880_472 / wire + calls * 50e-6
    exposed_s = sums / calls  # the last: the others hide behind two thirds of 33.5 ms
    assert sums * 9 / 10 < one_pass * 2 / 3
    compute, images_per_s = 2 * one_pass + update, 4096 / (2 * one_pass + update + exposed_s)
    step = compute + exposed_s
    of_peak = (2 * (6e12 + 2e9)) / half / step
    hours = 93_600 * step / 3600
    found = printed(monkeypatch, network, Cluster(8), ("train.grad_accum_steps", "2"))
    states = {  # bytes of a weight: fp32 with two moments; in bf16 with sums and a copy in fp32
        "state, DDP": (16, "913.70 MiB", "a GPU; weights, gradients and optimizer state; the recipe's engine"),
        "state, FSDP": (16 / 8, "114.21 MiB", ""),
        "state, ZeRO 0": (2 + 6 + 12, "1.12 GiB", ""),
        "state, ZeRO 1": (2 + 6 + 12 / 8, "542.51 MiB", ""),
        "state, ZeRO 2": (2 + (4 + 12) / 8, "228.43 MiB", ""),
        "state, ZeRO 3": ((2 + 4 + 12) / 8, "128.49 MiB", ""),
    }
    memory = 16 * 59_880_472 + (3 << 30)
    expected = {
        "global batch": (4096, "4,096", "8 ranks x 2 micro-batches of 256, mixed in groups of 32"),
        **{name: (59_880_472 * size, *words) for name, (size, *words) in states.items()},
        "activations": (3 << 30, "3.00 GiB", "a GPU, micro-batches of 256"),
        "memory": (memory, "3.89 GiB", "a GPU, of 80 GB, without what CUDA and the engine reserve"),
        "all-reduce": (4 * 59_880_472, "228.43 MiB", f"a step, in 10 calls, {1e3 * sums:.1f} ms at 25 GB/s"),
        "compute": (compute, f"{1e3 * compute:.1f} ms", f"{ROOFLINE}{of_peak:.0%} of the 16-bit peak"),
        "exposed communication": (exposed_s, f"{1e3 * exposed_s:.1f} ms", "50 us a call, assumed"),
        "step": (step, f"{1e3 * step:.1f} ms", f"{images_per_s:,.0f} images/s over all GPUs"),
        "steps": (93_600, "93,600", "300 epochs of 1,281,167 images (ImageNet-1k)"),
        "hours": (hours, f"{hours:.2f}", "without start, evaluation and checkpoints"),
        "GPU hours": (8 * hours, f"{8 * hours:.1f}", "an estimate, not a measurement"),
        "storage": (1_281_167 * 102_000, "131 GB", "a node; 102 kB per image"),
        "read rate": (
            images_per_s / 2 * 102_000,
            f"{images_per_s * 0.051:,.0f} MB/s",
            "a node, until the file is in the page cache",
        ),
        "decoding CPUs": (
            images_per_s / 2 / 1610,
            f"{images_per_s / 3220:.1f}",
            "a node; one decodes 1610 images/s (measured by `widemix bench augment`)",
        ),
    }
    assert list(found) == list(expected)
    for name, (value, *words) in expected.items():
        assert (found[name][0], [*found[name][1:]]) == (pytest.approx(value), words), name


def test_a_step_of_many_small_operators_takes_the_time_of_their_starts(monkeypatch):
    """On 64 GPUs without bf16, by FSDP, in a run of 300 short epochs that is ended early."""
    network = Pass([("bf16", 10**6, 9 * 10**5)] * 1000, 40 << 30, 59_880_472, 59_880_472, 12, 56_000_000)
    words = ("engine.kind", "fsdp"), ("train.activation_checkpointing", "true"), ("train.max_steps", "250")
    found = printed(monkeypatch, network, Cluster(64, "v100"), *words, samples=5000)
    update = 4 * 7 * 59_880_472 / 64 / 0.9e12 / 0.82
    rings = 63 / 64 / 25e9
    gathers, sums = rings * 2 * (59_880_472 + 56_000_000) + 25 * 50e-6, rings * 4 * 59_880_472 + 13 * 50e-6
    exposed_s = gathers / 25 + sums / 13
    step = 1000 * 40e-6 + update + exposed_s
    assert found["step"][0] == pytest.approx(step)
    assert found["exposed communication"][:2] == (pytest.approx(exposed_s), f"{1e3 * exposed_s:.1f} ms")
    started = "the host starts 1000 operators, 40 us each (measured on that of an H100), while the GPU computes for "
    computing = 1000 * 1e6 / 15.7e12 / 0.82
    assert found["compute"][2] == (
        f"{started}{1e3 * max(computing, 1000 * 9e5 / 0.9e12 / 0.82):.2g} ms, 0% of the 16-bit peak; a v100 has no "
        "bf16: use fp16"
    )
    state = 16 * 59_880_472 / 64
    note = "a GPU, of 32 GB, without what CUDA and the engine reserve: too much; raise train.grad_accum_steps (now 1)"
    assert found["memory"][0] == state + (40 << 30)
    assert found["memory"][2].startswith(note)
    assert found["state, FSDP"] == (state, "14.28 MiB", "the recipe's engine")
    assert found["activations"][2] == "a GPU, micro-batches of 64, activation checkpointing"
    times = "a step, in {} calls, {:.1f} ms at 25 GB/s"
    assert found["all-gather"][2] == times.format(25, 1e3 * gathers)
    assert found["reduce-scatter"][2] == times.format(13, 1e3 * sums)
    assert found["steps"] == (250, "250", "300 epochs of 5,000 images (--samples); train.max_steps ends it")
    assert found["GPU hours"][:2] == (pytest.approx(64 * 250 * step / 3600), f"{64 * 250 * step / 3600:.1g}")
    assert found["storage"][:2] == (5000 * 102_000, "0.51 GB")


def test_prepared_data_has_its_own_samples_and_bytes(monkeypatch, tmp_path):
    splits = {"train": SimpleNamespace(samples=8192, bytes=8192 * 2500), "val": SimpleNamespace(samples=9, bytes=9)}
    monkeypatch.setattr(report, "read_manifest", lambda folder: SimpleNamespace(splits=splits))
    (tmp_path / "manifest.json").touch()
    network, where = Pass([("bf16", 10**12, 10**9)], 0, 10, 10, 1, 10), ("data.path", str(tmp_path))
    found = printed(monkeypatch, network, Cluster(1), where, ("augment.mixup", "0"), ("augment.cutmix", "0"))
    assert found["global batch"][2] == "1 ranks x 1 micro-batches of 4096"  # of which none are mixed
    assert found["steps"] == (600, "600", f"300 epochs of 8,192 images ({tmp_path})")
    assert found["storage"][:3] == (8192 * 2500, "0.0205 GB", "a node; 2.5 kB per image")
    assert "all-reduce" not in found
    found = printed(monkeypatch, network, Cluster(1), where, samples=4096)
    assert found["steps"] == (300, "300", "300 epochs of 4,096 images (--samples)")
    assert found["storage"][0] == 4096 * 2500
    long = ("train.max_steps", "301"), ("data.image_size", "112"), ("model.patch_size", "8")
    recipe = load_recipe(B16, [where, *long])
    found = {row.name: row for row in estimate(recipe, Cluster(1), 4096)}
    assert found["steps"][1:] == (300, "300", "300 epochs of 4,096 images (--samples)")  # which end before that
    assert "decoding CPUs" not in found  # measured of images of 224
    with pytest.raises(
        InputError, match=r"^train.global_batch 4096 exceeds the 4095 samples \(--samples\): an epoch"
    ):
        printed(monkeypatch, network, Cluster(1), where, samples=4095)


@pytest.mark.parametrize(("reduce_dtype", "reduced"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize(
    ("engine", "collectives"),
    [  # kind, bytes a weight, calls, whether hidden; in lists what each of three micro-batches has
        ({"kind": "ddp"}, [("all-reduce", "R", 12, True)]),
        ({"zero_stage": 0}, [("all-reduce", "R", 12, True)]),
        ({"zero_stage": 1}, [("all-reduce", "R", 12, True), ("all-gather", 2, 12, False)]),
        ({"zero_stage": 2}, [("all-reduce", ["R"], [12], True), ("all-gather", 2, 12, False)]),
        ({"zero_stage": 3}, [("all-gather", 2, 12, True), ("reduce-scatter", ["R"], [12], True)]),
        ({"zero_stage": 3, "overlap_comm": False},
         [("all-gather", 2, 12, False), ("reduce-scatter", ["R"], [12], False)]),
        ({"kind": "fsdp"}, [("all-gather", [3.8], [9], True), ("reduce-scatter", "R", 5, True)]),
        ({"kind": "fsdp", "sharding": "hybrid"},
         [("all-gather", [3.8], [9], True), ("reduce-scatter", "R", 5, True), ("all-reduce", "R/4", 5, True)]),
    ],
)  # fmt: skip
def test_each_engine_sends_what_its_collectives_have(engine, collectives, reduce_dtype, reduced):
    """Buckets of 2 MiB of gradients in fp32, a twelfth begun; R: the bytes that gradients are added up in."""
    weights = 11 * 2**19 + 1
    network = Pass([], 0, weights=weights, trained=weights, blocks=4, in_blocks=0.9 * weights)  # type: ignore[arg-type]
    values = {"kind": "deepspeed", "bucket_cap_mb": 2, "reduce_dtype": reduce_dtype, **engine}
    train = load_recipe(B16).train.model_copy(update={"grad_accum_steps": 3})
    found = step_traffic(EngineSection().model_copy(update=values), train, network, Cluster(8))
    sizes = {"R": reduced, "R/4": reduced / 4}
    for each, (kind, size, calls, hidden) in zip(found, collectives, strict=True):
        times, of_each, of_calls = (3, size[0], calls[0]) if isinstance(size, list) else (1, size, calls)
        assert (each.kind, each.calls, each.hidden, each.times) == (kind, times * of_calls, hidden, times)
        assert each.bytes == pytest.approx(times * sizes.get(of_each, of_each) * weights)


def test_a_row_of_the_table_of_rehearsals_has_units_and_sums():
    row = {"name": "a", "parameters": 59_880_472, "rehearsed memory": 4.179e9, "step": 0.0568, "hours": 1.46}
    row |= {"rehearsed all-reduce": 239e6, "rehearsed all-gather": 1e9, "rehearsed reduce-scatter": 2e9}
    row |= {"GPU hours": 1460.4, "seconds": 12.6, "CPU seconds": 25.4}
    line = "| `a` | 59.9 M | 3,239 MB | 4.18 GB | 57 ms | 1.5 | 1,460 | 13 s | 25 s |"
    assert rehearsal_line(row) == line
    del row["hours"]
    assert rehearsal_line(row) == line.replace("1.5 | 1,460", " | ")
    bad = {"name": "b", "error": "error: a|b", "seconds": 1.0, "CPU seconds": 2.0}
    assert rehearsal_line(bad) == "| `b` | error: a\\|b |  |  |  |  |  | 1 s | 2 s |"


def test_the_peaks_of_this_machine_are_those_of_products_and_of_a_copy(monkeypatch):
    monkeypatch.setattr(measure, "_shortest", lambda action, device: (action().shape, action().dtype))
    cpu = torch.device("cpu")
    assert measure._product_seconds(6, torch.bfloat16, cpu) == ((6, 6), torch.bfloat16)
    copied = []
    monkeypatch.setattr(measure.torch, "zeros", lambda count, device: copied.append((count, device)) or torch.ones(8))
    monkeypatch.setattr(measure, "_shortest", lambda action, device: copied.append(action()) or 0.5)
    monkeypatch.setattr(measure, "product_side", lambda dtype, device: {torch.bfloat16: 10, torch.float32: 6}[dtype])
    monkeypatch.setattr(measure, "_product_seconds", lambda side, *_: side / 40)
    found = measure.measured_peaks(cpu)
    # Products of n rows take 2 n^3 FLOPs; 32 bytes are read and written in half a second.
    assert (found.half, found.single, found.bandwidth) == (2000 / 0.25, 432 / 0.15, 128)
    assert copied[0] == (2**26, cpu)
    torch.testing.assert_close(copied[1], torch.ones(8))


def test_a_gpus_work_is_waited_for_in_each_of_three_repetitions(monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def advance(seconds):
        calls.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: advance(10))
    assert measure._shortest(lambda: advance(1), torch.device("cuda")) == 11
    assert calls == [1, 10] * 3
    assert measure._shortest(lambda: advance(1), torch.device("cpu")) == 1


def test_a_pass_is_measured_in_the_memory_layout_of_the_engine_if_one_is_given(monkeypatch):
    layouts = []

    def choose(module, engine, train, micro, device):
        return engine.kind, train.global_batch, micro, device.type

    monkeypatch.setattr(measure, "_shortest", lambda action, device: action() or 1.5)
    monkeypatch.setattr(measure, "choose_memory_layout", choose)
    monkeypatch.setattr(measure, "use_memory_layout", lambda module, layout: layouts.append(layout))
    recipe = load_recipe("digits/mixer", [("model.depth", "1"), ("engine.kind", "fsdp")])
    cpu = torch.device("cpu")
    assert measure.measured_pass(recipe, 4, cpu) == (1.5, None)
    assert layouts == []
    assert measure.measured_pass(recipe, 4, cpu, recipe.engine) == (1.5, None)
    assert layouts == [("fsdp", 64, 4, "cpu")]
    prepared = []
    monkeypatch.setattr(measure, "prepare_to_train", lambda module, *given: prepared.append(given))
    monkeypatch.setattr(measure, "unused_of", lambda recipe, module: {"of this network"})
    measure.measured_pass(recipe, 4, cpu)
    assert prepared == [(recipe.train, cpu, {"of this network"})]


def test_a_roofline_is_compared_with_the_pass_of_as_many_samples(monkeypatch):
    peaks = GPUS["a100"]
    monkeypatch.setattr(measure, "measured_peaks", lambda device: peaks)
    monkeypatch.setattr(measure, "measured_pass", lambda recipe, micro, device: (recipe, (micro, device.type)))
    network = SimpleNamespace(seconds=lambda gpu: ("roofline", gpu))
    assert measure.compare("recipe", network, 7) == (("roofline", peaks), "recipe", (7, "cpu"))


@pytest.mark.parametrize(
    ("options", "peak"),
    [
        ({"precision": "fp32"}, 19.5e12),
        ({"precision": "bf16", "matmul_precision": "high"}, 312e12),
        ({"precision": "fp16"}, 312e12),
        ({"precision": "fp32", "matmul_precision": "high"}, None),  # TF32, whose peak is another
    ],
)
def test_utilisation_is_of_the_peak_of_the_precision(options, peak):
    recipe = load_recipe(B16, [(f"train.{name}", value) for name, value in options.items()])
    flops = model_cost(recipe.model, 224, 1000).training_flops
    expected = None if peak is None else pytest.approx(flops / (4 * peak))
    assert fraction_of_peak(recipe, "NVIDIA A100-SXM4-80GB", 4) == expected
    assert peak_fraction(recipe, Topology(0, 4, 0, 4, torch.device("cpu"))) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0099, "under 0.01"), (0.01, "0.01"), (0.0149, "0.015"), (9.94, "9.9"), (10.4, "10"), (1234.4, "1,234")],
)
def test_hours_of_the_table_are_those_of_one_gpu_and_the_headers_samples(monkeypatch, tmp_path, value, text):
    asked = []

    def estimated(recipe, cluster, samples):
        asked.append((cluster, samples))
        return [Row("steps", 7.0, ""), Row("hours", value, ""), Row("GPU hours", 8.0, "")]

    monkeypatch.setattr(recipe_tables, "estimate", estimated)
    path = tmp_path / "one.yaml"
    lines = [f"#   {name}   of {name}" for name in ("prepare", "command", "expected", "source")]
    for options, samples in (("--samples 1437 --gpus 8", 1437), ("--gpus 8", None)):
        path.write_text("\n".join([*lines, f"#   cost   widemix cost {options}", f"extends: {B16}"]))
        assert recipe_tables.hours(path) == text
        assert asked.pop() == (Cluster(1, "a100"), samples)


def test_a_header_has_all_fields_but_a_measurement(tmp_path):
    path = tmp_path / "one.yaml"
    names = ("prepare", "command", "expected", "source", "cost")
    lines = [f"#   {name}   of {name}" for name in names]
    lines.insert(3, "#    and more")
    path.write_text("# A recipe\n" + "\n".join(lines) + "\ndata: {}\n#   measured   too late\n")
    fields = recipe_tables.header(path)
    assert fields == {name: f"of {name}" for name in names} | {"expected": "of expected and more"}
    for name in names:
        path.write_text("\n".join(line for line in lines if f"   {name} " not in line))
        with pytest.raises(InputError, match=f"one.yaml: its header has no line `#   {name}   ...`"):
            recipe_tables.header(path)


def test_recipes_that_others_extend_and_studies_are_no_rows(tmp_path):
    for name in ("b/two.yaml", "a/one.yaml", "base/c.yaml", "studies/d.yaml", "a/notes.md", "top.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert recipe_tables.shipped(tmp_path) == [tmp_path / "a/one.yaml", tmp_path / "b/two.yaml"]


@pytest.mark.parametrize("text", ["BEGIN\n", "END\n", "END\nBEGIN\n", None])
def test_a_file_without_its_lines_is_refused(tmp_path, text):
    path = tmp_path / "README.md"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"README\.md: needs the lines BEGIN and END, in this order"):
        recipe_tables.split_between(path, "BEGIN\n", "END\n")
    path.write_text("a\nBEGIN\nb\nEND\nc\n")
    assert recipe_tables.split_between(path, "BEGIN\n", "END\n") == ("a\nBEGIN\n", "END\nc\n")
