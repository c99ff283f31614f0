"""Trained networks from checkpoints: measured on a prepared split, or exported for timm."""

from pathlib import Path

import torch
from torch import nn

from pipeline.data.loader import EvalLoader, check_model
from pipeline.data.precision import DTYPES
from pipeline.distributed import topology
from pipeline.engine.loss import autocast
from pipeline.errors import InputError
from pipeline.formats.manifest import NAME, read_manifest
from pipeline.models.export import export_model
from pipeline.models.registry import build_model
from pipeline.recipe import Recipe, parse_recipe
from pipeline.run import checkpoint
from pipeline.training.evaluate import evaluate


def trained(path: Path, ema: bool = False) -> tuple[Recipe, nn.Module]:
    """The recipe and the network of a run's newest checkpoint, or of one checkpoint; with its averaged weights."""
    found = checkpoint.find(path)
    recipe = parse_recipe(found.position.recipe, default_origin=str(found.path))
    module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    state = found.load()
    if ema and not state.ema:
        raise InputError(f"{found.path}: has no averaged weights; its recipe sets no train.ema_decay")
    module.load_state_dict(state.ema if ema else state.model)
    return recipe, module


def measure(
    path: Path, data: Path | None, split: str | None, batch: int | None, ema: bool = False
) -> dict[str, float]:
    """Loss, top1 and top5 (percent) of a checkpoint over a whole split, by default its recipe's own."""
    if batch is not None and batch < 1:
        raise InputError(f"--batch {batch}: must be at least 1")
    recipe, module = trained(path, ema)
    section = recipe.data.model_copy(
        update={"path": str(data or recipe.data.path), "eval_split": split or recipe.data.eval_split}
    )
    here = topology.read_topology()
    topology.start(here, recipe.engine.timeout_s)
    try:
        torch.set_num_threads(topology.share_cpus(here))
        dtype = DTYPES[recipe.train.precision]
        loader = EvalLoader(section, batch or recipe.eval.batch_size, here, dtype)
        check_model(recipe.model, loader)
        return evaluate(module.to(here.device), autocast(here.device, dtype), loader, section.num_classes)
    finally:
        topology.stop()


def export(path: Path, to: Path, ema: bool = False) -> list[str]:
    """Write a checkpoint's network as a folder for timm; the names of its classes.

    They are the prepared folder's, where that is still there; a head wider than the data has numbers for the rest.
    """
    recipe, module = trained(path, ema)
    folder = Path(recipe.data.path)
    known = read_manifest(folder).classes if (folder / NAME).exists() else ()
    labels = [known[i] if i < len(known) else str(i) for i in range(recipe.data.num_classes)]
    export_model(module, recipe.model, to, data=recipe.data, labels=labels)
    return labels
