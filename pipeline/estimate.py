"""What a recipe takes, computed without training: what `widemix cost` prints."""

import math
from pathlib import Path
from typing import Literal, NamedTuple

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
ENGINES: tuple[tuple[str, Literal["ddp", "fsdp", "deepspeed"], int], ...] = (
    ("DDP", "ddp", 0),
    ("FSDP", "fsdp", 0),
    *((f"ZeRO {stage}", "deepspeed", stage) for stage in range(3)),
)
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
    train, sample = recipe.train, "pair" if recipe.data.kind == "text" else "picture"
    rows = [
        Row("parameters", cost.parameters, f"{cost.parameters:,}"),
        Row(
            "connections", cost.connections, _short(cost.connections), "of all mixing layers, as wide sparse matrices"
        ),
        Row("Omega", cost.omega, _short(cost.omega), "mean connections of a mixing layer (equation 14)"),
        Row("width m", cost.width, f"{cost.width:,.0f}", "of the features: S x C of a Mixer"),
        Row("hidden width", cost.hidden_width, _short(cost.hidden_width), "gamma x m"),
        Row("density p", cost.density, f"{cost.density:.4%}", "nonzero share of the wide matrices"),
        Row("forward FLOPs", cost.forward_flops, _short(cost.forward_flops), f"a {sample}, two a multiply-add"),
        Row("training FLOPs", cost.training_flops, _short(cost.training_flops), f"a {sample}, forward and backward"),
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
            Row("steps", steps, f"{steps:,}", f"{train.epochs} epochs of {count:,} {sample}s ({origin})"),
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


def pairs_table(omega: float, gamma: float) -> str:
    """Mixers of equal Omega from few channels to few tokens, the widest in the middle, as a Markdown table."""
    from pipeline.models.width import pairs, tokens_of, widest

    if not (omega > 0 and gamma > 0):
        raise InputError(f"--omega {omega:g}, --gamma {gamma:g}: both must be above 0")
    best = widest(omega, gamma)
    most = next(k for k in range(64) if tokens_of(best * 2 ** ((k + 1) / 2), omega, gamma) < 1)
    channels = sorted({max(1, round(best * 2 ** (k / 2))) for k in range(-most, most + 1)})
    lines = ["| C | S | width m = S C | Omega |", "|---:|---:|---:|---:|"]
    for count, tokens in pairs(omega, gamma, channels):
        exact = gamma * (count * tokens**2 + count**2 * tokens) / 2
        lines.append(f"| {count:,} | {tokens:,} | {count * tokens:,} | {exact:,.0f} |")
    return "\n".join([*lines, "", f"widest at C = S = (Omega / gamma)^(1/3) = {best:.1f}"])


def _memory(recipe: Recipe, parameters: int, activations: int, micro: int, gpus: int, gpu: str) -> list[Row]:
    """Bytes on one GPU: weights, gradients and optimiser by engine; activations in the precision of training."""
    from pipeline.models.memory import state_bytes

    engine, precision = recipe.engine, recipe.train.precision
    taken = (engine.kind, engine.zero_stage if engine.kind == "deepspeed" else 0)
    kept = activations * micro * (1.0 if precision == "fp32" else 0.5)
    rows, total = [], kept
    for name, kind, stage in ENGINES:
        size = state_bytes(
            parameters,
            optimizer=recipe.optim.name,
            engine=kind,
            zero_stage=stage,
            world=gpus,
            precision=precision,
        ).total
        note = "a GPU; weights, gradients and optimiser" if kind == "ddp" else ""
        if (kind, stage) == taken:
            total, note = total + size, f"{note}; the recipe's engine".removeprefix("; ")
        rows.append(Row(f"state, {name}", size, _bytes(size), note))
    return [
        *rows,
        Row("activations", kept, _bytes(kept), f"a GPU, micro-batches of {micro}, no checkpointing"),
        Row("memory", total, _bytes(total), f"a GPU, of {GPUS[gpu][2]} GB, without its workspace"),
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
