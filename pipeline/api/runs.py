"""The commands `widemix train` and `eval` as functions, and networks."""

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import InstanceOf

from widemix.arguments import FilePath, Size, build_section, check_arguments
from widemix.distributed.launchers import export_torchrun_env
from widemix.distributed.topology import read_topology, usual_defaults
from widemix.engine.memory_layout import choose_memory_layout as select_memory_layout
from widemix.engine.memory_layout import use_memory_layout
from widemix.errors import Exit
from widemix.evaluation.assessment import assess
from widemix.models import registry
from widemix.recipe import Recipe, fill_classes, load_recipe, match_folder
from widemix.recipe.sections import EngineSection, TrainSection
from widemix.trainer import train as train_rank

AnyRecipe = InstanceOf[Recipe] | FilePath


@check_arguments
def build_model(recipe: AnyRecipe) -> torch.nn.Module:
    """Return the network of a recipe, or of the file or shipped recipe of that name, with new weights.

    It takes float images [B, 3, image_size, image_size], or token ids int64 [B, T], and gives logits [B, classes].
    """
    loaded = fill_classes(_load(recipe))
    return registry.build_model(loaded.model, loaded.data.image_size, loaded.data.num_classes)


@check_arguments
def choose_memory_layout(
    model: torch.nn.Module, batch_size: Size, precision: str = "fp32", memory_layout: str = "auto"
) -> str:
    """Let a Mixer in training compute its blocks in the faster memory layout, for a loop of your own; returns which.

    That is "plain", as they are written, or "batch_last", with the same weights and, but for rounding, numbers: as
    `engine.memory_layout` in a recipe. "auto" times both on one block, on the model's device. A network that is no
    Mixer stays as it is. Call it before DDP or FSDP wrap the model. For torch.compile, `torch.func` and hooks on
    layers the blocks are computed as they are written; second derivatives need "plain".
    batch_size: that of each process.
    precision: "fp32", or the type of autocast, "bf16" or "fp16".
    """
    engine = build_section(EngineSection, memory_layout=memory_layout)
    section = build_section(TrainSection, epochs=1, global_batch=batch_size, precision=precision)
    device = next((weights.device for weights in model.parameters()), torch.device("cpu"))
    chosen = select_memory_layout(model, engine, section, batch_size, device)
    use_memory_layout(model, chosen)
    return chosen


@check_arguments
@usual_defaults()
def train(recipe: AnyRecipe, run_dir: FilePath, *, resume: str = "auto") -> dict[str, Any] | None:
    """Train a recipe in this process and return the metrics of done.json; as `widemix train --ranks 1`.

    In processes that a launcher started, such as torchrun, every rank calls it, and those above 0 get no metrics: {}.
    A run in `run_dir` is continued. None if a signal stopped it: the same call continues it.
    """
    export_torchrun_env()
    name = Path("recipe.yaml") if isinstance(recipe, Recipe) else Path(recipe)
    if train_rank(match_folder(_load(recipe)), Path(run_dir), resume, name) == Exit.REQUEUE:
        return None
    metrics: dict[str, Any] = json.loads((Path(run_dir) / "done.json").read_text()) if read_topology().is_main else {}
    return metrics


@check_arguments
def evaluate(
    path: FilePath,
    data: FilePath | None = None,
    split: str | None = None,
    batch_size: Size | None = None,
    *,
    ema: bool = False,
) -> dict[str, float]:
    """Return loss, top1 and top5 (percent) of a run's newest checkpoint, or of one checkpoint; as `widemix eval`.

    Prepared folder, split and batch size are by default those of its recipe.
    """
    return assess(str(Path(path)), None if data is None else Path(data), split, batch_size, ema).metrics


def _load(recipe: AnyRecipe) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
