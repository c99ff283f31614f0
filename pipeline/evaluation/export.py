"""Exports of checkpoints for timm, with a README.md: how to load them, where they come from, how good they are."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3
from huggingface_hub import EvalResult, ModelCardData

from widemix.errors import InputError
from widemix.evaluation.networks import load_trained
from widemix.formats.manifest import NAME, read_manifest
from widemix.markdown import code, escaped, fenced
from widemix.metrics import MEASURED, METRICS
from widemix.models.export import PROGRAM, export_model, loading_lines, loads_in_timm
from widemix.models.program import check_packages
from widemix.progress_line import announce
from widemix.recipe import Recipe, dump_recipe
from widemix.recipe.data import DataSection
from widemix.run import checkpoint
from widemix.run.checkpoint import Checkpoint
from widemix.run.listing import evaluated, metrics

LICENCE = "apache-2.0"  # as timm writes where it is given none
_BY_TIMM = "timm loads the network, without widemix:"
_BY_TORCH = "torch alone runs the network, without widemix and timm; `model.pt2` takes {what}:"
_BY_US = "widemix, in whose clone `pip install .` installs it, and timm load the network to be trained further:"
_PROGRAM = f"""import torch

model = torch.export.load("{PROGRAM}").module()"""
_IMAGE = """

import numpy as np
from PIL import Image

image = Image.open("image.jpg").convert("RGB")
image = image.resize([int(length * {shorter} / min(image.size)) for length in image.size], Image.{interpolation})
left, top = (round((length - {side}) / 2) for length in image.size)
pixels = np.asarray(image.crop((left, top, left + {side}, top + {side})), np.float32) / 255
pixels = (pixels - np.array({mean}, np.float32)) / np.array({std}, np.float32)
logits = model(torch.from_numpy(pixels).permute(2, 0, 1)[None])"""


def model_card(
    origin: Checkpoint, recipe: Recipe, folder: str, ema: bool = False, licence: str = LICENCE, program: bool = False
) -> str:
    """Return the card as Markdown: evaluations until the checkpoint, the data's hashes, and the whole recipe.

    Its head has what the Hub reads: library, licence, and the metrics of these weights if they were evaluated.

    folder: the name of the export, which the lines that load it have. program: whether it has a model.pt2.
    """
    weights = "averaged weights" if ema else "weights"
    run = origin.path.resolve().parent.parent
    rows = [row for row in evaluated(run, metrics(run), recipe, ema) if row["step"] <= origin.position.step]
    measured = [row for row in rows if row["step"] == origin.position.step]
    head = _head(recipe, measured[-1] if measured else None, licence)
    parts = [
        f"---\n{head}\n---\n\n# {escaped(recipe.model.summary(recipe.data.image_size))}\n",
        f"The {weights} after {origin.position.step} steps of the recipe below, trained by widemix.\n",
        _loading(folder, recipe, program),
        f"## Evaluations\n\n{_table(rows, recipe)}\n",
        f"## Data\n\n{_data(Path(recipe.data.path))}\n",
        f"## Recipe\n\n{fenced(dump_recipe(recipe), 'yaml')}\n",
    ]
    return "\n".join(parts)


def _loading(folder: str, recipe: Recipe, program: bool) -> str:
    """Which of the ways to load the network there are, the one that needs least first."""
    stock, images = loads_in_timm(recipe.model, recipe.data.image_size), recipe.model.takes == "images"
    parts = []
    if program:
        what, code = "token numbers [B, T]", _PROGRAM
        if isinstance(recipe.data, DataSection):
            what, code = "float32 images [B, 3, H, W]", _PROGRAM + _image_code(recipe.data)
        parts += [_BY_TORCH.format(what=what), fenced(code, "python")]
    lines = loading_lines(folder, recipe.plugins, stock)
    if images:
        lines.append("transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))")
    parts += [_BY_TIMM if stock else _BY_US, fenced("\n".join(lines), "python")]
    return "\n\n".join(parts) + "\n"


def _image_code(data: DataSection) -> str:
    """Lines by which a file becomes the program's input, as timm's transform has it: the centre of the image."""
    return _IMAGE.format(
        side=data.image_size,
        shorter=math.floor(data.image_size / data.crop_pct),
        interpolation="BILINEAR" if data.interpolation == "bilinear" else "BICUBIC",
        mean=list(data.mean),
        std=list(data.std),
    )


def _head(recipe: Recipe, measured: Mapping[str, Any] | None, licence: str) -> str:
    """The card's metadata, as YAML."""
    what = "text" if recipe.model.takes == "text" else "image"
    task = {"class": f"{what}-classification", "multilabel": f"{what}-classification"}.get(recipe.data.targets)
    results = []
    for name in MEASURED[recipe.data.targets]:
        if measured and measured.get(name) is not None:
            kind = "accuracy" if name == "top1" else name
            title, data = METRICS[name].title, Path(measured["data"]).name
            results.append(
                EvalResult(
                    task or f"{what}-regression", data, data, kind, round(measured[name], 4), metric_name=title
                )
            )
            results[-1].dataset_split = measured["split"]
    card = ModelCardData(
        library_name="timm" if loads_in_timm(recipe.model, recipe.data.image_size) else "widemix",
        license=licence,
        tags=[*([task] if task else []), "widemix"],
        pipeline_tag=task,
        model_name=recipe.model.summary(recipe.data.image_size) if results else None,
        eval_results=results or None,
    )
    return card.to_yaml()


def _table(rows: list[dict[str, Any]], recipe: Recipe) -> str:
    if not rows:
        return "None; `widemix eval` of the run measures it, and the next export has it here."
    names = [n for n in ("loss", *MEASURED[recipe.data.targets]) if any(row.get(n) is not None for row in rows)]
    titles = [METRICS[name].title for name in names]
    lines = [f"| step | data | split | {' | '.join(titles)} |", f"|---:|---|---|{'---:|' * len(names)}"]
    for row in rows:
        cells = ("-" if row.get(name) is None else METRICS[name].form.format(row[name]) for name in names)
        lines.append(
            f"| {row['step']} | {escaped(Path(row['data']).name)} | {escaped(row['split'])} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _data(folder: Path) -> str:
    """The splits of the prepared folder, each with a BLAKE3 of its blocks' hashes."""
    try:
        manifest = read_manifest(folder)
    except InputError:
        return f"{code(str(folder))}, which was not there when this was exported."
    lines = [f"{code(manifest.source)}, prepared by `widemix prep`; {NAME} has the hashes of all blocks.\n"]
    lines.append("| split | samples | BLAKE3 of the hashes of its blocks |\n|---|---:|---|")
    for name, split in manifest.splits.items():
        lines.append(
            f"| {escaped(name)} | {split.samples} | `{blake3(' '.join(split.blocks).encode()).hexdigest(16)}` |"
        )
    return "\n".join(lines)


def export_checkpoint(
    path: Path, to: Path, ema: bool = False, onnx: bool = False, licence: str = LICENCE
) -> tuple[list[str], str]:
    """Write a checkpoint's model as a folder that timm loads; return the class names, and the Python line to load it.

    With `onnx` the folder has model.onnx too, see `write_onnx`. Reading and writing are announced on stderr.

    Classes are named as in the prepared folder that it was trained on; those beyond its classes are numbered.
    """
    if onnx:
        check_packages()
    with announce(f"{path}: reading the network"):
        recipe, module = load_trained(path, ema)
    if isinstance(recipe.data, DataSection) and recipe.data.pixel_order != "original":
        raise InputError(
            f"{path}: was trained with data.pixel_order {recipe.data.pixel_order}, and timm would give an export "
            "images in the original order; `widemix eval` evaluates the run itself"
        )
    origin = checkpoint.find(path)
    prepared = origin.position.prepared
    known = prepared.classes
    labels = [known[i] if i < len(known) else str(i) for i in range(recipe.data.num_classes)]
    stock = loads_in_timm(recipe.model, recipe.data.image_size)
    parts = ["model.safetensors", *([] if stock else [PROGRAM])]
    parts += ["model.onnx, which onnxruntime checks"] if onnx else []
    with announce(f"{to}: writing {', '.join(parts)}"):
        export_model(
            module,
            recipe.model,
            to,
            data=recipe.data,
            labels=labels,
            loss=recipe.train.loss,
            prepared=prepared,
            card=partial(model_card, origin, recipe, to.name, ema, licence),
            onnx=onnx,
        )
    lines = loading_lines(to, recipe.plugins, stock)
    if (to / PROGRAM).exists():  # which needs less
        lines = ["import torch", f"model = torch.export.load({str(to / PROGRAM)!r}).module()"]
    return labels, "; ".join(lines)
