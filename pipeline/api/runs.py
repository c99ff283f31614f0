"""The commands `widemix prep`, `train` and `eval` as functions, and networks."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, InstanceOf, SkipValidation

from widemix.arguments import FilePath, Size, build_section, check_arguments
from widemix.data_prep.from_python import Pairs, collect
from widemix.data_prep.prepare import prepare as prepare_folder
from widemix.data_prep.settings import PrepSettings
from widemix.distributed.launchers import export_torchrun_env
from widemix.distributed.topology import read_topology, usual_defaults
from widemix.engine.kernels import choose_kernels as select_kernels
from widemix.engine.kernels import use_kernels
from widemix.errors import Exit, InputError
from widemix.evaluation.assessment import evaluate_checkpoint
from widemix.formats.manifest import Manifest
from widemix.models import registry
from widemix.models.mixer.network import Mixer
from widemix.recipe import Recipe, fill_classes, load_recipe
from widemix.recipe.train import EngineSection, TrainSection
from widemix.section import Fraction
from widemix.trainer import train as train_rank

AnyRecipe = InstanceOf[Recipe] | FilePath


@check_arguments
def prepare(
    source: Annotated[str | Pairs | Mapping[str, Pairs], SkipValidation],
    to: FilePath,
    origin: FilePath | None = None,
    *,
    processes: Annotated[int, Field(ge=1, le=4096)] | None = None,
    force: bool = False,
    extend: bool = False,
    max_bad: Fraction = 0.01,
    **settings: Any,
) -> Manifest:
    """Prepare a dataset in the folder `to`, once, and return its manifest; as `widemix prep`.

    source: one that `widemix prep --help` lists, such as "imagenet" or "image-folder", read from the folder `origin`;
    or pairs (image, label) of train, or {split: pairs}, without `origin`. An image is a path, or the bytes of a file;
    a label is an integer from 0, or a class name; or a float or several numbers, the sample's targets, which
    `targets="age,height"` names.
    max_bad: share of a split's images that may be left out. extend: whether to take over what the source gained.
    settings: fields of `widemix.data_prep.settings.PrepSettings`, such as `max_size=512`;
    `shuffle` is on by default.
    """
    settings = {"shuffle": True} | settings
    options: dict[str, Any] = {"processes": processes, "force": force, "extend": extend, "max_bad": max_bad}
    chosen = PrepSettings(**settings)
    if isinstance(source, str):
        folder = None if origin is None else Path(origin)
        return prepare_folder(source, folder, Path(to), chosen, **options)
    if isinstance(source, bytes) or not isinstance(source, Iterable):
        raise InputError(
            f"source {source!r:.80}: must be the name of one, or pairs (image, label), or {{split: pairs}}"
        )
    if origin is not None:
        raise InputError(f"origin {origin}: pairs are not read from a folder; leave it out")
    with collect(source if isinstance(source, Mapping) else {"train": source}, Path(to), chosen.targets) as dataset:
        return prepare_folder(dataset, None, Path(to), chosen, **options)


@check_arguments
def build_model(recipe: AnyRecipe) -> torch.nn.Module:
    """Return the network of a recipe, or of the file or shipped recipe of that name, with new weights.

    It takes float images [B, 3, image_size, image_size], or token ids int64 [B, T], and gives logits [B, classes].
    """
    loaded = fill_classes(_load(recipe))
    return registry.build_model(loaded.model, loaded.data.image_size, loaded.data.num_classes)


@check_arguments
def choose_kernels(model: torch.nn.Module, batch_size: Size, precision: str = "fp32", kernels: str = "auto") -> str:
    """Let a Mixer in training compute its blocks in the faster way, for a loop of your own; returns which.

    That is "plain", as they are written, or "batch_last", with the same weights and, but for rounding, numbers: as
    `engine.kernels` in a recipe. "auto" times both on one block, on the model's device. A network that is no Mixer
    stays as it is. Call it before DDP or FSDP wrap the model. For torch.compile, `torch.func` and hooks on layers the
    blocks are computed as they are written; second derivatives need "plain".
    batch_size: that of each process.
    precision: "fp32", or the type of autocast, "bf16" or "fp16".
    """
    engine = build_section(EngineSection, kernels=kernels)
    section = build_section(TrainSection, epochs=1, global_batch=batch_size, precision=precision)
    device = next((weights.device for weights in model.parameters()), torch.device("cpu"))
    chosen = select_kernels(model, engine, section, batch_size, device)
    if isinstance(model, Mixer):
        use_kernels(model, chosen)
    return chosen


@check_arguments
@usual_defaults()
def train(recipe: AnyRecipe, run_dir: FilePath, *, resume: str = "auto") -> dict[str, Any] | None:
    """Train a recipe in this process and return the figures of done.json; as `widemix train --ranks 1`.

    In processes that a launcher started, such as torchrun, every rank calls it, and those above 0 get no figures: {}.
    A run in `run_dir` is continued. None if a signal stopped it: the same call continues it.
    """
    export_torchrun_env()
    name = Path("recipe.yaml") if isinstance(recipe, Recipe) else Path(recipe)
    if train_rank(_load(recipe), Path(run_dir), resume, name) == Exit.REQUEUE:
        return None
    figures: dict[str, Any] = json.loads((Path(run_dir) / "done.json").read_text()) if read_topology().is_main else {}
    return figures


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
    return evaluate_checkpoint(Path(path), None if data is None else Path(data), split, batch_size, ema)


def _load(recipe: AnyRecipe) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
