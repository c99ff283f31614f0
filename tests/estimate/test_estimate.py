"""`widemix cost`: each row of a recipe's plan follows from its operators and weights, and from data sheets."""

import itertools

import pytest
import torch

from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.estimate.hardware import Cluster, find_gpu, peak_fraction
from widemix.estimate.network import fake_pass
from widemix.estimate.report import estimate
from widemix.estimate.tables import size
from widemix.estimate.traffic import exposed, step_traffic
from widemix.formats.manifest import read_manifest
from widemix.models.cost import model_cost
from widemix.models.registry import build_model
from widemix.recipe import load_recipe

B16 = "imagenet/mixer_b16"
SMALL = "model.depth=1 model.channels=96 model.channel_hidden=384"
# Of data sheets: FLOP/s in 16 bits and in fp32, bytes/s of the memory, its bytes.
SHEETS = {
    "a100": (312e12, 19.5e12, 2.039e12, 80),
    "v100": (125e12, 15.7e12, 0.9e12, 32),
    "h100": (989e12, 67e12, 3.35e12, 80),
}
COUNTS = {  # of Mixer-B/16, S = 196, C = 768: section 4 and table 1
    "parameters": (59_880_472, "59,880,472", ""),
    "connections": (48 * 260_112_384, "12.5 G", "of all mixing layers, as wide sparse matrices"),
    "Omega": (196 * 768 * (384 + 3072) / 2, "260 M", "mean connections of a mixing layer (equation 14)"),
    "width m": (196 * 768, "150,528", "of the features: S x C of a Mixer"),
    "max. width": (196 * 3072, "602,112", "of a mixing layer: max(S D_C, C D_S) of a Mixer"),
}


def rows_of(recipe, cluster, samples=None):
    return {row.name: row[1:] for row in estimate(recipe, cluster, samples)}


def plan(recipe, cluster, data):
    """The rows from the batch on, by hand. data: samples, their bytes if these are known, and where they are from."""
    train, engine, net = recipe.train, recipe.engine, fake_pass(recipe, recipe.train.micro_batch_size(cluster.gpus))
    half, single, bandwidth, memory = SHEETS[cluster.gpu]
    micro, gpus, sharers = train.micro_batch_size(cluster.gpus), cluster.gpus, cluster.gpus
    batch = f"{gpus} ranks x {train.grad_accum_steps} micro-batches of {micro}"
    mixes = recipe.augment.mixup or recipe.augment.cutmix
    mixed = f", mixed in groups of {recipe.augment.mix_group}" if mixes else ""
    yield "global batch", train.global_batch, f"{train.global_batch:,}", batch + mixed

    if engine.sharding == "hybrid":
        sharers = gpus // cluster.hosts
    w, t, moments = net.weights, net.trained, {"adamw": 2, "sgd": 1}[recipe.optim.name]
    ema = w if train.ema_decay and train.ema_device == "same" else 0
    plain = 4 * w + 4 * (1 + moments) * t + 4 * ema
    states = {"DDP": plain, "FSDP": (0 if engine.cpu_offload else plain) / sharers}
    own = {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": f"ZeRO {engine.zero_stage}"}[engine.kind]
    if not ema and t == w and moments == 2 and not engine.cpu_offload:
        wide = (16, 8 + 8 / gpus, 4 + 12 / gpus, 16 / gpus)
        half_wide = (2 + 6 + 12, 2 + 6 + 12 / gpus, 2 + (4 + 12) / gpus, (2 + 4 + 12) / gpus)  # and sums in fp32
        each = wide if train.precision == "fp32" else half_wide
        states |= {f"ZeRO {stage}": w * count for stage, count in enumerate(each)}
    for name, state in states.items():
        what = "a GPU; weights, gradients and optimizer state" if name == "DDP" else ""
        chosen = "the recipe's engine" if name == own else ""
        yield f"state, {name}", state, size(state), "; ".join(filter(None, [what, chosen]))
    if net.buffers:
        yield (
            "buffers",
            net.buffers,
            size(net.buffers),
            "a GPU; positions of masked weights, permutations, statistics of batch norms",
        )
    again = ", activation checkpointing" if train.activation_checkpointing else ""
    yield "activations", net.peak, size(net.peak), f"a GPU, micro-batches of {micro}{again}"
    total = states[own] + net.peak + net.buffers
    full = (
        f": too much; raise train.grad_accum_steps (now {train.grad_accum_steps}), set"
        if total > memory * 1e9
        else ""
    )
    yield "memory", total, size(total), f"a GPU, of {memory} GB, without what CUDA and the engine reserve{full}"

    traffic = step_traffic(engine, train, net, cluster) if gpus > 1 else []
    for each in traffic:
        note = f"a step, in {each.calls} calls, {1e3 * each.seconds:.1f} ms at {each.ring.bandwidth / 1e9:g} GB/s"
        yield each.kind, each.bytes, size(each.bytes), note
    fast = {"fp32": single, "fp16": half, "bf16": single if cluster.gpu == "v100" else half}
    computing = sum(max(flops / fast[kind], moved / bandwidth) for kind, flops, moved in net.operators) / 0.82
    starting = 40e-6 * len(net.operators)
    update = 4 * (3 + 2 * moments) * t / bandwidth / 0.82 / (1 if own in ("DDP", "ZeRO 0") else sharers)
    compute = train.grad_accum_steps * max(computing, starting) + update
    exposed_s = exposed(traffic, max(computing, starting) * 2 / 3)
    step = compute + exposed_s
    how = "operator by operator, 82% of its roofline"
    if starting > computing:
        how = (
            f"the host starts {len(net.operators)} operators, 40 us each (measured on that of an H100), "
            f"while the GPU computes for {1e3 * computing:.2g} ms"
        )
    flops = train.grad_accum_steps * sum(flops for _, flops, _ in net.operators)
    lacks = "; a v100 has no bf16: use fp16" if cluster.gpu == "v100" and train.precision == "bf16" else ""
    yield "compute", compute, f"{1e3 * compute:.1f} ms", f"{how}, {flops / half / step:.0%} of the 16-bit peak{lacks}"
    yield "exposed communication", exposed_s, f"{1e3 * exposed_s:.1f} ms", "50 us a call, assumed"
    rate, kind = train.global_batch / step, "pair" if recipe.data.kind == "text" else "image"
    yield "step", step, f"{1e3 * step:.1f} ms", f"{rate:,.0f} {kind}s/s over all GPUs"

    samples, each, origin = data
    if samples:
        steps = min(samples // train.global_batch * train.epochs, train.max_steps or 10**9)
        ended = "; train.max_steps ends it" if steps == train.max_steps else ""
        yield "steps", steps, f"{steps:,}", f"{train.epochs} epochs of {samples:,} {kind}s ({origin}){ended}"
        hours = steps * step / 3600
        short = f"{60 * hours:.1f} min" if hours >= 1 / 60 else f"{3600 * hours:.1f} s"
        text = f"{hours:.2f}" if hours >= 0.1 else f"{hours:.1g} ({short})"
        yield "hours", hours, text, "without start, evaluation and checkpoints"
        total = gpus * hours
        yield "GPU hours", total, f"{total:,.1f}" if total >= 1 else f"{total:.1g}", "an estimate, not a measurement"
    rate /= cluster.hosts
    if samples and each:
        yield "storage", samples * each, f"{samples * each / 1e9:,.3g} GB", f"a node; {each / 1e3:,.3g} kB per {kind}"
        note = "a node, until the file is in the page cache"
        yield "read rate", rate * each, f"{rate * each / 1e6:,.0f} MB/s", note
    if recipe.data.image_size == 224:
        note = "a node; one decodes 1610 images/s (measured by `widemix bench augment`)"
        yield "decoding CPUs", rate / 1610, f"{rate / 1610:.1f}", note


IMAGENET = (1_281_167, 102_000, "ImageNet-1k")


@pytest.mark.parametrize(
    ("name", "keys", "cluster", "samples", "data"),
    [
        (B16, "train.grad_accum_steps=2", Cluster(8, network="40"), None, IMAGENET),  # hidden by two thirds of a pass
        (B16, f"{SMALL} engine.kind=fsdp train.activation_checkpointing=true train.max_steps=250",
         Cluster(64, "v100"), 5000, (5000, 102_000, "--samples")),
        (B16, f"{SMALL} engine.kind=fsdp engine.sharding=hybrid optim.name=sgd train.precision=fp32",
         Cluster(8, nodes=2, network="edr"), None, IMAGENET),
        (B16, f"{SMALL} engine.kind=fsdp engine.cpu_offload=true", Cluster(8), None, IMAGENET),
        (B16, f"{SMALL} engine.kind=deepspeed engine.zero_stage=0 train.precision=fp32", Cluster(8), None, IMAGENET),
        *((B16, f"{SMALL} engine.kind=deepspeed engine.zero_stage={stage}", Cluster(8), None, IMAGENET)
          for stage in range(1, 4)),
        (B16, f"{SMALL} train.freeze=[body] train.ema_decay=0.999 train.max_steps=100", Cluster(4), None, IMAGENET),
        (B16, f"{SMALL} train.ema_decay=0.999 train.ema_device=cpu train.precision=fp16", Cluster(4, "v100"), None,
         IMAGENET),
        (B16, f"{SMALL} augment.mixup=0 augment.cutmix=0 data.num_classes=21841", Cluster(1), None,
         (14_126_136, None, "ImageNet-21k")),
        (B16, f"{SMALL} data.num_classes=7 data.path=none", Cluster(1), None, (None, None, "")),
        (B16, f"{SMALL} data.num_classes=7 data.path=none", Cluster(1), 5000, (5000, None, "--samples")),
        (B16, "train.global_batch=65536", Cluster(8, "v100"), 65_536, (65_536, 102_000, "--samples")),
        ("digits/mixer", "data.path=none", Cluster(1), 1437, (1437, None, "--samples")),
        ("digits/mixer", "data.path=none train.grad_accum_steps=2", Cluster(1), 10**5, (10**5, None, "--samples")),
        ("mnli/mixer", "data.path=none", Cluster(1, "h100"), 10**6, (10**6, None, "--samples")),
        ("cifar10/sw_mlp", "data.path=none", Cluster(1), 50_000, (50_000, None, "--samples")),
    ],
)  # fmt: skip
def test_a_plan_follows_from_the_recipe_and_the_data_sheets(name, keys, cluster, samples, data):
    recipe = load_recipe(name, [tuple(key.split("=")) for key in keys.split()])
    found = rows_of(recipe, cluster, samples)
    found = dict(itertools.dropwhile(lambda item: item[0] != "global batch", found.items()))
    expected = {name: row for name, *row in plan(recipe, cluster, data)}
    assert [name for name in found if not name.startswith("state, ZeRO")] == [
        name for name in expected if not name.startswith("state, ZeRO")
    ]
    for name, (value, text, note) in expected.items():
        assert found[name][:2] == (pytest.approx(value), text), name
        assert found[name][2] == note or (note.endswith(", set") and found[name][2].startswith(note)), name


def test_counts_are_those_of_the_paper():
    recipe = load_recipe(B16)
    rows = rows_of(recipe, Cluster(128))
    assert {name: rows[name] for name in COUNTS} == COUNTS
    assert rows["forward FLOPs"][2] == "per image, two a multiply-add"
    assert rows["the paper prints"][2] == "table 1: 786 channels for 768"
    assert "dense copies" not in rows


@pytest.mark.parametrize("name", ["cifar10/sw_mlp", "cifar10/rp_s_mixer", "cifar10/beta_lasso"])
def test_memory_has_what_is_no_weight_too(name):
    """The positions of masked weights take three quarters of what the weights and their state do."""
    recipe = load_recipe(name, {"cifar10/beta_lasso": [("model.base_channels", "4")]}.get(name, []))
    found = rows_of(recipe, Cluster(1), 50_000)
    module = build_model(recipe.model, recipe.data.image_size, 10)
    assert found["buffers"][0] == sum(buffer.nbytes for buffer in module.buffers())
    copies = model_cost(recipe.model, recipe.data.image_size, 10).dense_bytes
    assert found.get("dense copies", [0])[0] == copies
    assert (copies > 0) == (name == "cifar10/sw_mlp")


def test_prepared_data_has_its_own_samples_and_bytes(digits):
    recipe = load_recipe("digits/mixer", [("data.path", str(digits)), ("train.epochs", "10")])
    split = read_manifest(digits).splits["train"]
    each = split.bytes / split.samples
    for samples, origin in ((None, str(digits)), (128, "--samples")):
        found, count = rows_of(recipe, Cluster(1), samples), samples or split.samples
        steps = count // 64 * 10
        assert found["steps"] == (steps, f"{steps:,}", f"10 epochs of {count:,} images ({origin})")
        assert found["storage"][0] == pytest.approx(count * each)
    with pytest.raises(InputError, match=r"^train.global_batch 64 exceeds the 63 samples \(--samples\): an epoch"):
        estimate(recipe, Cluster(1), 63)
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_steps": 21})})
    assert rows_of(longer, Cluster(1), 128)["steps"][2] == "10 epochs of 128 images (--samples)"  # which end before


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        *((f"NVIDIA {name}", None) for name in ("A100-PCIE-40GB", "H100 PCIe", "H100 NVL", "GeForce RTX 3090 Ti")),
        *((f"NVIDIA {name}", None) for name in ("A100-SXM4-40GB MIG 3g.20gb", "L4", "B200", "GH200 480GB")),
    ],
)
def test_peaks_are_of_gpus_by_their_whole_names(name, peak):
    found = find_gpu(name)
    assert (found and found.half) == peak
    assert find_gpu("Tesla V100-SXM2-32GB").single == 15.7e12


@pytest.mark.parametrize(
    ("options", "gpu", "peak"),
    [
        ({"precision": "fp32"}, "A100-SXM4-80GB", 19.5e12),
        ({"precision": "bf16", "matmul_precision": "high"}, "A100-SXM4-80GB", 312e12),
        ({"precision": "fp16"}, "A100-SXM4-80GB", 312e12),
        ({"precision": "fp32", "matmul_precision": "high"}, "A100-SXM4-80GB", None),  # TF32, whose peak is another
        # Of which the peak is twice as high, and most of the backward pass is left out.
        ({"precision": "bf16", "fp8": "true"}, "H200", None),
        ({"precision": "bf16", "freeze": "[body]"}, "A100-SXM4-80GB", None),
    ],
)
def test_utilisation_is_of_the_peak_of_the_precision(options, gpu, peak, system):
    system({"torch.cuda.get_device_name": lambda device: f"NVIDIA {gpu}"})
    recipe = load_recipe(B16, [(f"train.{name}", value) for name, value in options.items()])
    flops = model_cost(recipe.model, 224, 1000).training_flops
    expected = None if peak is None else pytest.approx(flops / (4 * peak))
    found = [peak_fraction(recipe, Topology(0, 4, 0, 4, torch.device(kind))) for kind in ("cuda", "cpu")]
    assert found == [expected, None]
