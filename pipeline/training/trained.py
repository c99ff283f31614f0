"""Trained models from checkpoints: evaluated on a prepared split, or exported for timm."""

from pathlib import Path

import torch
from torch import nn

from pipeline.data.loader import EvalLoader, check_model
from pipeline.data.precision import DTYPES
from pipeline.distributed.topology import process_group, read_topology, share_cpus
from pipeline.engine.loss import autocast
from pipeline.errors import InputError
from pipeline.formats.manifest import NAME, read_manifest
from pipeline.models.export import export_model
from pipeline.models.registry import build_model
from pipeline.recipe import Recipe, parse_recipe
from pipeline.run import checkpoint
from pipeline.training.evaluate import evaluate


def load_trained(path: Path, ema: bool = False) -> tuple[Recipe, nn.Module]:
    """Return the recipe and the model of a checkpoint folder, or of a run folder's newest checkpoint.

    With `ema` the model has the averaged weights; `InputError` if there are none, or no checkpoint.
    """
    origin = checkpoint.find(path)
    recipe = parse_recipe(origin.position.recipe, default_origin=str(origin.path))
    module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    state = origin.load()
    if ema and not state.ema:
        raise InputError(f"{origin.path}: has no averaged weights; its recipe sets no train.ema_decay")
    module.load_state_dict(state.ema if ema else state.model)
    return recipe, module


def evaluate_checkpoint(
    path: Path, data: Path | None, split: str | None, batch: int | None, ema: bool = False
) -> dict[str, float]:
    """Return loss, top1 and top5 (percent) of a checkpoint over a whole split.

    Prepared folder, split and batch size are by default those of its recipe. Every rank calls it.
    """
    if batch is not None and batch < 1:
        raise InputError(f"--batch {batch}: must be at least 1")
    recipe, module = load_trained(path, ema)
    section = recipe.data.model_copy(
        update={"path": str(data or recipe.data.path), "eval_split": split or recipe.data.eval_split}
    )
    topology = read_topology()
    with process_group(topology, recipe.engine.timeout_s):
        torch.set_num_threads(share_cpus(topology))
        dtype = DTYPES[recipe.train.precision]
        loader = EvalLoader(section, batch or recipe.eval.batch_size, topology, dtype)
        check_model(recipe.model, loader)
        device = topology.device
        return evaluate(module.to(device), autocast(device, dtype), loader, section.num_classes)


def export_checkpoint(path: Path, to: Path, ema: bool = False) -> list[str]:
    """Write a checkpoint's model as a folder that timm loads; return the class names.

    Classes are named as in the prepared folder, if it still exists; those beyond its classes are numbered.
    """
    recipe, module = load_trained(path, ema)
    folder = Path(recipe.data.path)
    known = read_manifest(folder).classes if (folder / NAME).exists() else ()
    labels = [known[i] if i < len(known) else str(i) for i in range(recipe.data.num_classes)]
    export_model(module, recipe.model, to, data=recipe.data, labels=labels)
    return labels
