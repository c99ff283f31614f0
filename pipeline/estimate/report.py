"""What a recipe takes on a cluster, computed without training: what `widemix cost` prints."""

import math
from pathlib import Path
from typing import Literal, NamedTuple

from pipeline.errors import InputError
from pipeline.estimate.hardware import EFFICIENCY, LATENCY, Cluster
from pipeline.estimate.here import compare
from pipeline.estimate.network import Pass, fake_pass
from pipeline.estimate.rehearse import rehearse
from pipeline.estimate.traffic import exposed, step_traffic
from pipeline.estimate.units import short, size
from pipeline.formats.manifest import NAME, read_manifest
from pipeline.models.cost import model_cost
from pipeline.models.memory import STATES, state_bytes
from pipeline.models.named import printed
from pipeline.recipe import Recipe, check_world
from pipeline.recipe.train import EngineSection

ENGINES: tuple[tuple[str, Literal["ddp", "fsdp", "deepspeed"], int], ...] = (
    ("DDP", "ddp", 0),
    ("FSDP", "fsdp", 0),
    *((f"ZeRO {stage}", "deepspeed", stage) for stage in range(4)),
)
# Training pictures by number of classes; the second is what `prep --holdout 0.5%` leaves of 14,197,122.
IMAGENETS = {1000: (1_281_167, "ImageNet-1k"), 21841: (14_126_136, "ImageNet-21k")}
IMAGENET_BYTES = 102_000  # of a picture of the first: the mean of 100 training files, pipeline/bench/README.md
MEASURED = 4  # samples in a pass that is measured here
# That one CPU prepares a second by the ImageNet recipe, from what prep makes of such files (the same page).
IMAGES_PER_CPU = 1348


class Row(NamedTuple):
    name: str
    value: float
    text: str
    note: str = ""


def estimate(
    recipe: Recipe, cluster: Cluster, samples: int | None = None, rehearsed: bool = False, measured: bool = False
) -> list[Row]:
    """Exact counts of the model, then batch, memory, traffic, time and storage.

    With a rehearsal on so many ranks, and with a pass measured on this machine; each says how far the rest is off.
    """
    cluster.check()
    check_world(recipe, cluster.gpus)
    rows = _model(recipe)
    train = recipe.train
    micro = train.global_batch // cluster.gpus // train.grad_accum_steps
    group = recipe.augment.mix_group if recipe.augment.mixing else 1
    parts = f"{cluster.gpus} ranks x {train.grad_accum_steps} micro-batches of {micro}"
    mixed = f", mixed in groups of {group}" if group > 1 else ""
    rows.append(Row("global batch", train.global_batch, f"{train.global_batch:,}", f"{parts}{mixed}"))
    network = fake_pass(recipe, micro)
    rows += _memory(recipe, network, micro, cluster)
    per_step = _step(recipe, network, cluster)
    rows += per_step
    rows += _run(recipe, cluster, next(row.value for row in per_step if row.name == "step"), samples)
    if rehearsed:
        rows += _rehearsal(recipe, network, cluster, next(row.value for row in rows if row.name == "memory"))
    if measured:
        rows += _here(recipe)
    return rows


def _model(recipe: Recipe) -> list[Row]:
    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    sample = _sample(recipe)
    rows = [
        Row("parameters", cost.parameters, f"{cost.parameters:,}"),
        Row(
            "connections", cost.connections, short(cost.connections), "of all mixing layers, as wide sparse matrices"
        ),
        Row("Omega", cost.omega, short(cost.omega), "mean connections of a mixing layer (equation 14)"),
        Row("width m", cost.width, f"{cost.width:,.0f}", "of the features: S x C of a Mixer"),
        Row("hidden width", cost.hidden_width, short(cost.hidden_width), "gamma x m"),
        Row("density p", cost.density, f"{cost.density:.4%}", "nonzero share of the wide matrices"),
        Row("forward FLOPs", cost.forward_flops, short(cost.forward_flops), f"a {sample}, two a multiply-add"),
        Row("training FLOPs", cost.training_flops, short(cost.training_flops), f"a {sample}, forward and backward"),
    ]
    rows = [row for row in rows if not math.isnan(row.value)]  # timm's networks have no wide, sparse twin
    note = printed(recipe.model)
    return [*rows, Row("the paper prints", cost.omega, "", note)] if note else rows


def _memory(recipe: Recipe, network: Pass, micro: int, cluster: Cluster) -> list[Row]:
    """Bytes on one GPU: weights, gradients and optimiser by engine; what a pass keeps, from fake tensors."""
    engine = recipe.engine
    taken = (engine.kind, engine.zero_stage if engine.kind == "deepspeed" else 0)
    rows, total = [], float(network.peak)
    for name, kind, stage in ENGINES:
        held = state_bytes(
            network.weights,
            optimizer=recipe.optim.name,
            engine=kind,
            zero_stage=stage,
            world=cluster.gpus,
            precision=recipe.train.precision,
        ).total
        note = "a GPU; weights, gradients and optimiser" if kind == "ddp" else ""
        if (kind, stage) == taken:
            total, note = total + held, f"{note}; the recipe's engine".removeprefix("; ")
        rows.append(Row(f"state, {name}", held, size(held), note))
    blocks = ", blocks computed again" if recipe.train.activation_checkpointing else ""
    of = cluster.kind.memory
    short_of = (
        ""
        if total < of
        else ": too much; see engine.kind fsdp, train.grad_accum_steps, train.activation_checkpointing"
    )
    return [
        *rows,
        Row("activations", network.peak, size(network.peak), f"a GPU, micro-batches of {micro}{blocks}"),
        Row(
            "memory",
            total,
            size(total),
            f"a GPU, of {of / 1e9:g} GB, without CUDA's own and the engine's buffers{short_of}",
        ),
    ]


def _step(recipe: Recipe, network: Pass, cluster: Cluster) -> list[Row]:
    """Bytes that ranks send, and seconds: computing on a roofline, communication that it does not hide."""
    train, gpu, engine = recipe.train, cluster.kind, recipe.engine
    traffic = step_traffic(recipe, network.weights, network.blocks, network.in_blocks) if cluster.gpus > 1 else []
    rows = []
    for part in traffic:
        seconds = part.seconds(cluster.gpus, cluster.bandwidth)
        note = f"a step, in {part.calls} calls, {1e3 * seconds:.1f} ms at {cluster.bandwidth / 1e9:g} GB/s"
        rows.append(Row(part.kind, part.bytes, size(part.bytes), note))
    whole = engine.kind == "ddp" or (engine.kind == "deepspeed" and engine.zero_stage == 0)
    # The optimiser reads weight and gradient, reads and writes its states, writes the weight, all in fp32.
    moved = 4 * (3 + 2 * STATES[recipe.optim.name]) * network.weights / (1 if whole else cluster.gpus)
    compute = train.grad_accum_steps * network.seconds(gpu) / EFFICIENCY
    update = moved / gpu.bandwidth / EFFICIENCY
    # Two thirds of a pass are its backward half, during which gradients travel.
    waits = exposed(traffic, cluster.gpus, cluster.bandwidth, compute * 2 / 3)
    step = compute + update + waits
    share = train.grad_accum_steps * network.flops / gpu.half / step
    emulated = "" if gpu.has_bf16 or train.precision != "bf16" else f"; a {cluster.gpu} has no bf16: take fp16"
    roof = f"operator by operator, {EFFICIENCY:.0%} of its roofline, {share:.0%} of the 16-bit peak{emulated}"
    return [
        *rows,
        Row("compute", compute + update, f"{1e3 * (compute + update):.1f} ms", roof),
        Row("exposed communication", waits, f"{1e3 * waits:.1f} ms", f"{LATENCY * 1e6:g} us a call assumed"),
        Row(
            "step",
            step,
            f"{1e3 * step:.1f} ms",
            f"{train.global_batch / step:,.0f} {_sample(recipe)}s/s over all GPUs",
        ),
    ]


def _run(recipe: Recipe, cluster: Cluster, step: float, given: int | None) -> list[Row]:
    """The whole run: steps, hours, price; the disk and the CPUs that keep up with it."""
    train, sample = recipe.train, _sample(recipe)
    count, of_one, origin = _data(recipe, given)
    rate = train.global_batch / step / cluster.hosts
    rows = []
    if count:
        steps = count // train.global_batch * train.epochs
        hours = steps * step / 3600
        whole = "without evaluation, checkpoints and the start"
        rows += [
            Row("steps", steps, f"{steps:,}", f"{train.epochs} epochs of {count:,} {sample}s ({origin})"),
            Row("hours", hours, f"{hours:.2f}", whole),
            Row("GPU hours", hours * cluster.gpus, f"{hours * cluster.gpus:,.1f}", "an estimate, not a measurement"),
        ]
    if count and of_one:
        rows.append(
            Row(
                "storage",
                count * of_one,
                f"{count * of_one / 1e9:,.3g} GB",
                f"a node; {of_one / 1e3:,.3g} kB a {sample}",
            )
        )
        rows.append(
            Row("read rate", rate * of_one, f"{rate * of_one / 1e6:,.0f} MB/s", "a node, until memory holds the file")
        )
    if sample == "picture" and recipe.data.image_size == 224:
        cpus = rate / IMAGES_PER_CPU
        note = f"a node, of {IMAGES_PER_CPU} {sample}s/s each (measured on one CPU: `widemix bench augment`)"
        rows.append(Row("decoding CPUs", cpus, f"{cpus:.1f}", note))
    return rows


def _rehearsal(recipe: Recipe, network: Pass, cluster: Cluster, memory: float) -> list[Row]:
    """A step on fake ranks, and how far the figures above are from what was counted in it."""
    found = rehearse(recipe, cluster.gpus, cluster.local)
    rows = []
    for part in step_traffic(recipe, network.weights, network.blocks, network.in_blocks):
        if counted := found.bytes.get(part.kind):
            error = f"the estimate is {part.bytes / counted - 1:+.1%} off"
            note = f"a step, in {found.calls[part.kind]} calls; {error}"
            rows.append(Row(f"rehearsed {part.kind}", counted, size(counted), note))
    peak, how = (found.peak, "counted") if found.peak else (found.kept + network.peak, "what is kept, and a pass")
    error = f"the estimate is {memory / peak - 1:+.1%} off"
    took = f"{cluster.gpus} ranks, of which this process was one"
    rows += [
        Row("rehearsed memory", peak, size(peak), f"a GPU, at most, {how}; {error}"),
        Row("rehearsal", found.seconds, f"{found.seconds:.1f} s", took),
    ]
    if peak > cluster.kind.memory:
        raise InputError(_too_much(recipe, peak, cluster))
    return rows


def _here(recipe: Recipe) -> list[Row]:
    """A pass in DDP's precision on this machine, and its roofline."""
    plain = recipe.model_copy(update={"engine": EngineSection()})
    micro = min(MEASURED, recipe.train.global_batch)
    network = fake_pass(plain, micro)
    roofline, seconds, peak = compare(plain, network, micro)
    error = f"the roofline says {1e3 * roofline:.0f} ms, {roofline / seconds:.0%} of it"
    rows = [
        Row(
            "measured pass",
            seconds,
            f"{1e3 * seconds:.0f} ms",
            f"{micro} {_sample(recipe)}s on this machine; {error}",
        )
    ]
    if peak:
        error = f"the estimate is {network.peak / peak - 1:+.1%} off"
        rows.append(Row("measured activations", peak, size(peak), f"{micro} {_sample(recipe)}s on this GPU; {error}"))
    return rows


def _too_much(recipe: Recipe, peak: float, cluster: Cluster) -> str:
    train = recipe.train
    needs = f"a step needs {peak / 1e9:.1f} GB on each GPU, a {cluster.gpu} has {cluster.kind.memory / 1e9:g}"
    cures = f"raise train.grad_accum_steps (now {train.grad_accum_steps}), set train.activation_checkpointing"
    return f"{needs}; {cures} or engine.kind fsdp"


def _sample(recipe: Recipe) -> str:
    return "pair" if recipe.data.kind == "text" else "picture"


def _data(recipe: Recipe, given: int | None) -> tuple[int | None, float | None, str]:
    """Training samples, bytes of one in the prepared file, and how that is known."""
    if given is not None and given < 1:
        raise InputError(f"--samples {given}: must be at least 1")
    folder = Path(recipe.data.path)
    split = read_manifest(folder).splits.get(recipe.data.train_split) if (folder / NAME).exists() else None
    of_one = split.bytes / split.samples if split else IMAGENET_BYTES if recipe.data.num_classes == 1000 else None
    if given is not None:
        return given, of_one, "--samples"
    if split:
        return split.samples, of_one, str(folder)
    samples, name = IMAGENETS.get(recipe.data.num_classes, (None, ""))
    return samples, of_one, name


def show(rows: list[Row], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in rows:
        table.add_row(row.name, row.text, row.note)
    Console().print(table)
