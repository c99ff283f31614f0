"""A network by the name that a user gives it: a run, a checkpoint, an export, a recipe, or timm:NAME."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_data_config
from torch import nn

from widemix.errors import InputError
from widemix.evaluation.trained import load_trained
from widemix.formats.manifest import NAME, read_manifest
from widemix.models.names import FORMS, timm_name
from widemix.models.registry import build_model
from widemix.models.section import ModelSection
from widemix.models.timm_registry import load_pretrained
from widemix.recipe import Recipe, fill_classes, load_recipe
from widemix.recipe.data import AnyDataSection, DataSection
from widemix.recipe.files import find_recipe
from widemix.run import checkpoint
from widemix.training.finetune import load_init_weights


@dataclass(frozen=True)
class Network:
    """A network in evaluation mode, and how it reads its inputs.

    section: None for exports and timm's networks. data: its path is "" where the name has no data of its own.
    classes: their names in the order of the logits, empty if unknown; of a run, those of the data it was trained on.
    """

    name: str
    module: nn.Module
    section: ModelSection | None
    data: AnyDataSection
    recipe: Recipe | None = None
    classes: tuple[str, ...] = ()
    step: int | None = None  # of a checkpoint


def load_network(name: str, ema: bool = False) -> Network:
    """Load the network that `name` stands for, one of `names.FORMS`; `InputError` if there is none.

    With `ema` a run's network has the averaged weights.
    """
    path = Path(name)
    exported = (path / "config.json").is_file() and (path / "model.safetensors").is_file()
    known_to_timm = f"local-dir:{path}" if exported else timm_name(name)
    if known_to_timm and ema:
        raise InputError(f"--ema: is for runs and checkpoints; {name} has one set of weights")
    if known_to_timm:
        return _of_timm(name, known_to_timm)
    if path.suffix in (".yaml", ".yml") or (not path.exists() and find_recipe(name).is_file()):
        recipe = fill_classes(load_recipe(name))
        return of_recipe(name, recipe, initial_module(recipe))
    try:
        step = checkpoint.find(path).position.step
        return replace(of_recipe(name, *load_trained(path, ema)), step=step)
    except InputError as error:
        if path.exists():
            raise
        raise InputError(f"{error}; give {FORMS}") from None


def of_recipe(name: str, recipe: Recipe, module: nn.Module) -> Network:
    """Return a recipe's network, in evaluation mode."""
    folder = Path(recipe.data.path)
    try:
        classes = read_manifest(folder).classes if (folder / NAME).exists() else ()
    except InputError:  # the data may be named by another option
        classes = ()
    return Network(name, module.eval(), recipe.model, recipe.data, recipe, classes)


def initial_module(recipe: Recipe) -> nn.Module:
    """Return the recipe's network as training starts with it: of `train.seed`, or of `train.init_from`."""
    torch.manual_seed(recipe.train.seed)
    module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    if recipe.train.init_from:
        load_init_weights(module, recipe.train.init_from, recipe.train.reset_head)
    return module


def _of_timm(name: str, timm_name: str) -> Network:
    """One of timm's pretrained networks, or an export, with the preprocessing of its pretrained_cfg."""
    module: Any = load_pretrained(timm_name, name)
    config = resolve_data_config(pretrained_cfg=module.pretrained_cfg)
    data = DataSection(
        path="",
        num_classes=module.num_classes,
        image_size=config["input_size"][-1],
        crop_pct=config["crop_pct"],
        interpolation="bilinear" if config["interpolation"] == "bilinear" else "bicubic",
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )
    labels = module.pretrained_cfg.get("label_names") or _imagenet_names(module)
    return Network(name, module.eval(), None, data, classes=tuple(labels))


def _imagenet_names(module: Any) -> Sequence[str]:
    """The wnids of a network with as many classes as one of ImageNet's versions, which timm goes by too."""
    version = infer_imagenet_subset(module)
    return ImageNetInfo(version).label_names() if version else ()
