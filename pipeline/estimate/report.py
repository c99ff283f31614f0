"""Memory, traffic, time and storage of a recipe on a cluster, without training: what `widemix cost` prints."""

import math
from pathlib import Path
from typing import Literal

from widemix.errors import InputError
from widemix.estimate import rehearse
from widemix.estimate.hardware import EFFICIENCY, LATENCY, LAUNCH, Cluster
from widemix.estimate.network import Pass, fake_pass
from widemix.estimate.rehearse import cures
from widemix.estimate.tables import Row, sample_of, short, size
from widemix.estimate.traffic import exposed, state_bytes, step_traffic
from widemix.formats.manifest import NAME, read_manifest
from widemix.models.cost import model_cost
from widemix.models.section import ModelSection
from widemix.recipe import Recipe, check_world

ENGINES: tuple[tuple[str, Literal["ddp", "fsdp", "deepspeed"], int], ...] = (
    ("DDP", "ddp", 0),
    ("FSDP", "fsdp", 0),
    *((f"ZeRO {stage}", "deepspeed", stage) for stage in range(4)),
)
# Training images by number of classes; of 14,197,122 in the second, `prep --holdout 0.5%` leaves these.
IMAGENETS = {1000: (1_281_167, "ImageNet-1k"), 21841: (14_126_136, "ImageNet-21k")}
IMAGENET_BYTES = 102_000  # of an image of ImageNet-1k: the mean of 100 training files, docs/notes/benchmarks.md
# Images per second that one CPU decodes and augments by the ImageNet recipe, as prep stores them (same page).
IMAGES_PER_CPU = 1610


def estimate(
    recipe: Recipe, cluster: Cluster, samples: int | None = None, rehearsed: bool = False, measured: bool = False
) -> list[Row]:
    """Return rows with exact counts of the model, then batch, memory, traffic, time and storage.

    samples: training samples (default: from the prepared folder, or ImageNet's by number of classes).
    rehearsed: also count a step on fake ranks; the rows say how far the estimate is off.
    measured: also time a pass on this machine, and compare it with its roofline.

    Raises `InputError` if the recipe cannot run on the cluster.
    """
    cluster.check()
    check_world(recipe, cluster.gpus)
    rows = _model(recipe)
    train = recipe.train
    micro = train.micro_batch_size(cluster.gpus)
    group = recipe.augment.mix_group if recipe.augment.mixes_images else 1
    batch = f"{cluster.gpus} ranks x {train.grad_accum_steps} micro-batches of {micro}"
    mixed = f", mixed in groups of {group}" if group > 1 else ""
    rows.append(Row("global batch", train.global_batch, f"{train.global_batch:,}", f"{batch}{mixed}"))
    network = fake_pass(recipe, micro)
    rows += _memory(recipe, network, micro, cluster)
    per_step = _step(recipe, network, cluster)
    rows += per_step
    rows += _run(recipe, cluster, next(row.value for row in per_step if row.name == "step"), samples)
    if rehearsed:
        rows += rehearse.rehearsed(recipe, network, cluster, next(row.value for row in rows if row.name == "memory"))
    if measured:
        rows += rehearse.measured(recipe)
    return rows


def _model(recipe: Recipe) -> list[Row]:
    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    sample = sample_of(recipe)
    if cost.parameters > 1e14:
        raise InputError(f"model: {cost.parameters:.3g} weights, where costs end at 1e+14; take smaller sizes")
    rows = [
        Row("parameters", cost.parameters, f"{cost.parameters:,}"),
        Row(
            "connections", cost.connections, short(cost.connections), "of all mixing layers, as wide sparse matrices"
        ),
        Row("Omega", cost.omega, short(cost.omega), "mean connections of a mixing layer (equation 14)"),
        Row("width m", cost.width, f"{cost.width:,.0f}", "of the features: S x C of a Mixer"),
        Row("hidden width", cost.hidden_width, short(cost.hidden_width), "gamma x m"),
        Row(
            "max. width", cost.max_width, f"{cost.max_width:,.0f}", "of a mixing layer: max(S D_C, C D_S) of a Mixer"
        ),
        Row("density p", cost.density, f"{cost.density:.4%}", "nonzero fraction of the wide matrices"),
        Row("forward FLOPs", cost.forward_flops, short(cost.forward_flops), f"per {sample}, two a multiply-add"),
        Row("training FLOPs", cost.training_flops, short(cost.training_flops), f"per {sample}, forward and backward"),
    ]
    if cost.dense_bytes:
        copies = "of masked weights, which a GPU multiplies by dense matrices; counted in the activations below"
        rows.append(Row("dense copies", cost.dense_bytes, size(cost.dense_bytes), copies))
    rows += structure_rows(recipe.model, recipe.data.image_size)
    rows = [row for row in rows if not math.isnan(row.value)]  # timm's networks have no wide, sparse equivalent
    note = recipe.model.published_note(recipe.data.image_size)
    return [*rows, Row("the paper prints", cost.omega, "", note)] if note else rows


def _memory(recipe: Recipe, network: Pass, micro: int, cluster: Cluster) -> list[Row]:
    """Bytes on one GPU: weights, gradients and optimizer state by engine, and activations from fake tensors."""
    engine, train = recipe.engine, recipe.train
    chosen = (engine.kind, engine.zero_stage if engine.kind == "deepspeed" else 0)
    rows, total = [], float(network.peak + network.buffers)
    for name, kind, stage in ENGINES:
        state = state_bytes(
            network.weights,
            trained=network.trained,
            optimizer=recipe.optim.name,
            engine=kind,
            zero_stage=stage,
            world=cluster.sharers(kind, engine.sharding),
            precision=train.precision,
            reduce_dtype=engine.reduce_dtype,
            ema=train.ema_decay is not None and train.ema_device == "same",
            offload=engine.cpu_offload,
        ).total
        note = "a GPU; weights, gradients and optimizer state" if kind == "ddp" else ""
        if (kind, stage) == chosen:
            total, note = total + state, f"{note}; the recipe's engine".removeprefix("; ")
        rows.append(Row(f"state, {name}", state, size(state), note))
    blocks = ", activation checkpointing" if train.activation_checkpointing else ""
    available = cluster.kind.memory
    warning = "" if total < available else f": too much; {cures(recipe, cluster)}"
    if network.buffers:  # all ranks have them whole
        note = "a GPU; positions of masked weights, permutations, statistics of batch norms"
        rows.append(Row("buffers", network.buffers, size(network.buffers), note))
    whole = f"a GPU, of {available / 1e9:g} GB, without what CUDA and the engine reserve{warning}"
    return [
        *rows,
        Row("activations", network.peak, size(network.peak), f"a GPU, micro-batches of {micro}{blocks}"),
        Row("memory", total, size(total), whole),
    ]


def _step(recipe: Recipe, network: Pass, cluster: Cluster) -> list[Row]:
    """Bytes of collectives, and seconds of computing by the roofline and of communication that does not overlap."""
    train, gpu, engine = recipe.train, cluster.kind, recipe.engine
    traffic = step_traffic(engine, train, network, cluster) if cluster.gpus > 1 else []
    rows = []
    for collective in traffic:
        seconds, bandwidth = collective.seconds, collective.ring.bandwidth
        note = f"a step, in {collective.calls} calls, {1e3 * seconds:.1f} ms at {bandwidth / 1e9:g} GB/s"
        rows.append(Row(collective.kind, collective.bytes, size(collective.bytes), note))
    replicated = engine.kind == "ddp" or (engine.kind == "deepspeed" and engine.zero_stage == 0)
    # The optimizer reads weights and gradients, reads and writes its states and writes weights, all in fp32.
    sharers = 1 if replicated else cluster.sharers(engine.kind, engine.sharding)
    moved = 4 * (3 + 2 * recipe.optim.spec.states) * network.trained / sharers
    computing, launching = network.seconds(gpu) / EFFICIENCY, len(network.operators) * LAUNCH
    pass_s = max(computing, launching)  # of a micro-batch, forward and backward
    compute = train.grad_accum_steps * pass_s
    update = moved / gpu.bandwidth / EFFICIENCY
    # The backward pass, which communication overlaps with, takes two thirds of the time.
    exposed_s = exposed(traffic, pass_s * 2 / 3)
    step = compute + update + exposed_s
    fraction = train.grad_accum_steps * network.flops / gpu.half / step
    emulated = "" if gpu.has_bf16 or train.precision != "bf16" else f"; a {cluster.gpu} has no bf16: use fp16"
    how = f"operator by operator, {EFFICIENCY:.0%} of its roofline"
    if launching > computing:
        how = (
            f"the host starts {len(network.operators)} operators, {LAUNCH * 1e6:.0f} us each (measured on that of an "
            f"H100), while the GPU computes for {1e3 * computing:.2g} ms"
        )
    roofline = f"{how}, {fraction:.0%} of the 16-bit peak{emulated}"
    speed = f"{train.global_batch / step:,.0f} {sample_of(recipe)}s/s over all GPUs"
    return [
        *rows,
        Row("compute", compute + update, f"{1e3 * (compute + update):.1f} ms", roofline),
        Row("exposed communication", exposed_s, f"{1e3 * exposed_s:.1f} ms", f"{LATENCY * 1e6:g} us a call, assumed"),
        Row("step", step, f"{1e3 * step:.1f} ms", speed),
    ]


def _run(recipe: Recipe, cluster: Cluster, step: float, samples: int | None) -> list[Row]:
    """The whole run: steps, hours and GPU hours; the storage, read rate and CPUs that it needs."""
    train, sample = recipe.train, sample_of(recipe)
    count, bytes_each, origin = _data(recipe, samples)
    rate = train.global_batch / step / cluster.hosts
    rows = []
    if count and count < train.global_batch:
        raise InputError(
            f"train.global_batch {train.global_batch} exceeds the {count} samples ({origin}): an epoch has no step"
        )
    if count:
        whole = count // train.global_batch * train.epochs
        steps = min(whole, train.max_steps or whole)
        ended = "; train.max_steps ends it" if steps < whole else ""
        hours = steps * step / 3600
        total = hours * cluster.gpus
        short_total = f"{total:,.1f}" if total >= 1 else f"{total:.1g}"
        omitted = "without start, evaluation and checkpoints"
        rows += [
            Row("steps", steps, f"{steps:,}", f"{train.epochs} epochs of {count:,} {sample}s ({origin}){ended}"),
            Row("hours", hours, f"{hours:.2f}" if hours >= 0.1 else f"{hours:.1g} ({_minutes(hours)})", omitted),
            Row("GPU hours", total, short_total, "an estimate, not a measurement"),
        ]
    if count and bytes_each:
        stored, read = count * bytes_each, rate * bytes_each
        each = f"a node; {bytes_each / 1e3:,.3g} kB per {sample}"
        rows.append(Row("storage", stored, f"{stored / 1e9:,.3g} GB", each))
        cached = "a node, until the file is in the page cache"
        rows.append(Row("read rate", read, f"{read / 1e6:,.0f} MB/s", cached))
    if sample == "image" and recipe.data.image_size == 224:
        cpus = rate / IMAGES_PER_CPU
        note = f"a node; one decodes {IMAGES_PER_CPU} {sample}s/s (measured by `widemix bench augment`)"
        rows.append(Row("decoding CPUs", cpus, f"{cpus:.1f}", note))
    return rows


def _minutes(hours: float) -> str:
    return f"{60 * hours:.1f} min" if hours >= 1 / 60 else f"{3600 * hours:.1f} s"


def _data(recipe: Recipe, samples: int | None) -> tuple[int | None, float | None, str]:
    """Number of training samples, bytes of one in the prepared file, and where the number comes from."""
    if samples is not None and samples < 1:
        raise InputError(f"--samples {samples}: must be at least 1")
    folder = Path(recipe.data.path)
    split = read_manifest(folder).splits.get(recipe.data.train_split) if (folder / NAME).exists() else None
    imagenet_bytes = IMAGENET_BYTES if recipe.data.num_classes == 1000 else None
    bytes_each = split.bytes / split.samples if split else imagenet_bytes
    if samples is not None:
        return samples, bytes_each, "--samples"
    if split:
        return split.samples, bytes_each, str(folder)
    count, name = IMAGENETS.get(recipe.data.num_classes, (None, ""))
    return count, bytes_each, name


def structure_rows(section: ModelSection, image_size: int) -> list[Row]:
    """A row for each structured matrix of an inner block: sharing, rank and cost beside a dense matrix of its sizes.

    The three are what Potapczynski et al. 2024 ("Searching for Efficient Linear Layers over a Continuous Space of
    Structured Matrices") find to decide how a structure scales.
    """
    rows = []
    for key, structure, inputs, outputs in section.structured_matrices(image_size):
        factors = structure.factors(inputs, outputs)
        weights = sum(factor.parameters for factor in factors)
        products = sum(factor.multiply_adds for factor in factors)
        rank, full = structure.full_rank(inputs, outputs), min(inputs, outputs)
        sized = f" of rank {structure.rank_for(inputs, outputs)}" if structure.kind in ("low_rank", "btt") else ""
        text = f"{structure.kind}{sized}, {inputs} to {outputs}"
        note = f"{weights:,} weights, each used {products / weights:.3g} times a row; rank {rank} of {full}; "
        note += f"{products / inputs:.3g} multiply-adds an input, {products / (inputs * outputs):.1%} of dense"
        rows.append(Row(key.replace("_", " "), products, text, note))
    return rows
