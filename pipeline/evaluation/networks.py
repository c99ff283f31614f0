"""A network by the name that a user gives it: a run, a checkpoint, an export, a recipe, or timm:NAME."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_data_config
from torch import nn

from widemix.engine import set_head_bias
from widemix.errors import InputError
from widemix.formats.manifest import Prepared, read_manifest
from widemix.models.export import Usage, read_usage
from widemix.models.hub import FORMS, HUB, timm_name
from widemix.models.mixer.network import from_timm
from widemix.models.registry import build_model
from widemix.models.section import ModelSection
from widemix.models.timm_registry import load_pretrained
from widemix.recipe import Recipe, fill_classes, load_recipe, parse_recipe
from widemix.recipe.data import AnyDataSection, DataSection
from widemix.recipe.files import find_recipe
from widemix.run import checkpoint
from widemix.terminal import print
from widemix.training.finetune import check_indices, load_init_weights


@dataclass(frozen=True)
class Network:
    """A network in evaluation mode, and how it reads its inputs.

    section: None for exports and timm's networks. data: its path is "" where the name has no data of its own.
    prepared: what it was trained on. loss: that of its training, empty if unknown.
    """

    name: str
    module: nn.Module
    section: ModelSection | None
    data: AnyDataSection
    recipe: Recipe | None = None
    prepared: Prepared = field(default_factory=Prepared)
    loss: str = ""
    step: int | None = None  # of a checkpoint

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names in the order of the logits, empty if unknown; of a run, those of the data it was trained on."""
        return self.prepared.classes


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
        return _of_timm(name, known_to_timm, path if exported else None)
    if path.suffix in (".yaml", ".yml") or (not path.exists() and find_recipe(name).is_file()):
        recipe = fill_classes(load_recipe(name))
        return of_recipe(name, recipe, initial_module(recipe))
    try:
        origin = checkpoint.find(path)
        recipe, module = load_trained(origin.path, ema)
        return replace(of_recipe(name, recipe, module, origin.position.prepared), step=origin.position.step)
    except InputError as error:
        if path.exists():
            raise
        raise InputError(f"{error}; give {FORMS}") from None


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
    try:
        check_indices(module)
    except ValueError as error:
        raise InputError(f"{origin.path}: {error}") from None
    return recipe, module


def of_recipe(name: str, recipe: Recipe, module: nn.Module, prepared: Prepared | None = None) -> Network:
    """Return a recipe's network, in evaluation mode. prepared: what it was trained on (default: as it is now)."""
    if prepared is None:
        try:
            prepared = Prepared.of(read_manifest(Path(recipe.data.path)))
        except InputError:  # the data may be named by another option
            prepared = Prepared()
    loss = recipe.train.loss
    return Network(name, module.eval(), recipe.model, recipe.data, recipe, prepared, loss)


def initial_module(recipe: Recipe) -> nn.Module:
    """Return the recipe's network as training starts with it: of `train.seed`, or of `train.init_from`."""
    torch.manual_seed(recipe.train.seed)
    module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    set_head_bias(module, recipe.train)
    if recipe.train.init_from:
        load_init_weights(module, recipe.train.init_from, recipe.train.reset_head)
    return module


def _usage(name: str, folder: Path | None) -> Usage:
    """Return what an export's config.json has for us beside timm's keys; timm has fetched that of the Hub."""
    if folder is not None:
        return read_usage(folder / "config.json")
    if not name.startswith(HUB):
        return Usage()
    from huggingface_hub import hf_hub_download

    repository, _, revision = name.removeprefix(HUB).partition("@")
    return read_usage(Path(hf_hub_download(repository, "config.json", revision=revision or None)))


def _of_timm(name: str, timm_name: str, folder: Path | None) -> Network:
    """One of timm's pretrained networks, or an export, with the preprocessing of its pretrained_cfg.

    The size and crop are those with which timm's validate.py found the accuracies that timm lists.
    """
    loaded: Any = load_pretrained(timm_name, name)
    module, pretrained_cfg = from_timm(loaded), loaded.pretrained_cfg
    config = resolve_data_config(pretrained_cfg=pretrained_cfg, use_test_size=True)
    usage = _usage(name, folder)
    try:
        data = DataSection(
            path="",
            targets=usage.targets,
            num_classes=module.num_classes,
            image_size=config["input_size"][-1],
            crop_pct=config["crop_pct"],
            interpolation="bilinear" if config["interpolation"] == "bilinear" else "bicubic",
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        value = config.get(key)
        raise InputError(f"{name}: {key} {value}: is no preprocessing of RGB images ({first['msg']})") from None
    if (mode := config["crop_mode"]) != "center":
        text = f"timm evaluates it with crop_mode {mode}, widemix on centre crops, where its accuracy is another"
        print(f"warning: {name}: {text}", file=sys.stderr)
    labels = pretrained_cfg.get("label_names") or _imagenet_names(loaded)
    if not (isinstance(labels, list | tuple) and all(isinstance(label, str) for label in labels)):
        raise InputError(f"{name}: its label_names are no list of texts; export it again")
    prepared = Prepared(classes=tuple(labels), **usage.model_dump(exclude={"targets", "loss"}))
    return Network(name, module.eval(), None, data, None, prepared, usage.loss)


def _imagenet_names(module: Any) -> Sequence[str]:
    """The wnids of a network with as many classes as one of ImageNet's versions, which timm goes by too."""
    version = infer_imagenet_subset(module)
    return ImageNetInfo(version).label_names() if version else ()
