"""What a recipe takes, computed without training: what `widemix cost` prints."""

import math
from pathlib import Path
from typing import NamedTuple

from data_prep.manifest import NAME, read_manifest
from pipeline.errors import InputError
from pipeline.recipe import Recipe, check_world

# Dense peaks from the makers' data sheets, FLOP/s: (16-bit tensor cores, fp32), and memory in GB.
GPUS = {
    "v100": (125e12, 15.7e12, 32),
    "a100": (312e12, 19.5e12, 80),
    "h100": (989e12, 67e12, 80),
    "h200": (989e12, 67e12, 141),
}
UTILISATION = 0.35  # assumed share of the peak; hours scale with its inverse
IMAGENET_SAMPLES = 1_281_167


class Row(NamedTuple):
    name: str
    value: float
    text: str
    note: str = ""


def estimate(recipe: Recipe, gpus: int, gpu: str, samples: int | None = None) -> list[Row]:
    """Exact counts of the model, then memory and time on `gpus` GPUs of a kind, as far as arithmetic goes."""
    from pipeline.models.cost import model_cost
    from pipeline.models.named import printed

    if gpus < 1:
        raise InputError(f"--gpus {gpus}: must be at least 1")
    check_world(recipe, gpus)
    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    train = recipe.train
    rows = [
        Row("parameters", cost.parameters, f"{cost.parameters:,}"),
        Row(
            "connections", cost.connections, _short(cost.connections), "of all mixing layers, as wide sparse matrices"
        ),
        Row("Omega", cost.omega, _short(cost.omega), "mean connections of a mixing layer (equation 14)"),
        Row("width m", cost.width, f"{cost.width:,.0f}", "of the features: S x C of a Mixer"),
        Row("hidden width", cost.hidden_width, _short(cost.hidden_width), "gamma x m"),
        Row("density p", cost.density, f"{cost.density:.4%}", "nonzero share of the wide matrices"),
        Row("forward FLOPs", cost.forward_flops, _short(cost.forward_flops), "a picture, two a multiply-add"),
        Row("training FLOPs", cost.training_flops, _short(cost.training_flops), "a picture, forward and backward"),
    ]
    rows = [row for row in rows if not math.isnan(row.value)]  # timm's networks have no wide, sparse twin
    note = printed(recipe.model)
    if note:
        rows.append(Row("the paper prints", cost.omega, "", note))
    micro = train.global_batch // gpus // train.accumulation
    rows += _memory(recipe, cost.parameters, cost.activation_bytes, micro, gpus, gpu)
    count, origin = _samples(recipe, samples)
    if count:
        steps = count // train.global_batch * train.epochs
        peak = GPUS[gpu][1 if train.precision == "fp32" else 0]
        seconds = steps * train.global_batch * cost.training_flops / (gpus * peak * UTILISATION)
        rows += [
            Row("steps", steps, f"{steps:,}", f"{train.epochs} epochs of {count:,} pictures ({origin})"),
            Row(
                "hours",
                seconds / 3600,
                f"{seconds / 3600:.2f}",
                f"if every {gpu} reaches {UTILISATION:.0%} of its peak",
            ),
            Row(
                "GPU hours", seconds * gpus / 3600, f"{seconds * gpus / 3600:,.1f}", "an estimate, not a measurement"
            ),
        ]
    return rows


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


def named_table() -> str:
    """Every named network's cost as a Markdown table: 1,000 classes at 224 pixels, 10 at 32; RP costs the same."""
    from pipeline.models.cost import model_cost
    from pipeline.models.named import NAMED

    lines = [
        "| name | weights | connections | Omega | width m | gamma m | density p | forward GFLOPs |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (section, side) in NAMED.items():
        if name.startswith("rp_"):
            continue
        cost = model_cost(section, side, 1000 if side == 224 else 10)
        cells = (
            *(f"`{name}`", f"{cost.parameters:,}", _short(cost.connections), f"{cost.omega:.3g}"),
            *(f"{cost.width:,.0f}", f"{cost.hidden_width:,.0f}", f"{cost.density:.3%}"),
            f"{cost.forward_flops / 1e9:.3g}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _memory(recipe: Recipe, parameters: int, activations: int, micro: int, gpus: int, gpu: str) -> list[Row]:
    """Bytes on one GPU: weights, gradients and optimiser by engine; activations in the precision of training."""
    from pipeline.models.memory import state_bytes

    engine, precision = recipe.engine, recipe.train.precision
    state = state_bytes(
        parameters,
        optimizer=recipe.optim.name,
        engine=engine.kind,
        zero_stage=engine.zero_stage,
        world=gpus,
        precision=precision,
    ).total
    kept = activations * micro * (1.0 if precision == "fp32" else 0.5)
    name = {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": f"ZeRO {engine.zero_stage}"}[engine.kind]
    return [
        Row("state memory", state, _bytes(state), f"a GPU; weights, gradients and optimiser under {name}"),
        Row("activation memory", kept, _bytes(kept), f"a GPU, {micro} pictures a micro-batch, no checkpointing"),
        Row("memory", state + kept, _bytes(state + kept), f"a GPU, of {GPUS[gpu][2]} GB, without its workspace"),
    ]


def _samples(recipe: Recipe, given: int | None) -> tuple[int | None, str]:
    if given is not None:
        if given < 1:
            raise InputError(f"--samples {given}: must be at least 1")
        return given, "--samples"
    folder = Path(recipe.data.path)
    if (folder / NAME).exists():
        split = read_manifest(folder).splits.get(recipe.data.train_split)
        return (split.samples if split else None), str(folder)
    return (IMAGENET_SAMPLES, "ImageNet-1k") if recipe.data.num_classes == 1000 else (None, "")


def _short(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def _bytes(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.2f} MiB"
