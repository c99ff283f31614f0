"""Measure a checkpoint on a prepared split: what `widemix eval` does."""

from pathlib import Path

import torch

from pipeline import checkpoint, topology
from pipeline.data.loader import EvalLoader
from pipeline.engine.contract import DTYPES
from pipeline.errors import InputError
from pipeline.evaluate import evaluate
from pipeline.models.registry import build_model
from pipeline.recipe import parse_recipe


def measure(path: Path, data: Path | None, split: str | None, batch: int | None) -> dict[str, float]:
    """Loss, top1 and top5 (percent) of a run's newest checkpoint, or of one checkpoint, over a whole split."""
    found = checkpoint.find(path)
    recipe = parse_recipe(found.position.recipe, default_origin=str(found.path))
    if batch is not None and batch < 1:
        raise InputError(f"--batch {batch}: must be at least 1")
    section = recipe.data.model_copy(
        update={
            "path": str(data) if data else recipe.data.path,
            "eval_split": split or recipe.data.eval_split,
        }
    )
    here = topology.read_topology()
    topology.start(here, recipe.engine.timeout)
    try:
        torch.set_num_threads(topology.share_cpus(here))
        loader = EvalLoader(section, batch or recipe.eval.batch, here)
        module = build_model(recipe.model, section.image_size, section.num_classes)
        module.load_state_dict(found.load().model)
        dtype = DTYPES[recipe.train.precision]
        precision = torch.autocast(here.device.type, dtype, enabled=dtype is not torch.float32)
        return evaluate(module.to(here.device), precision, loader, section.num_classes)
    finally:
        topology.stop()
