"""Trained models from checkpoints, and their export for timm."""

from functools import partial
from pathlib import Path

from torch import nn

from widemix.errors import InputError
from widemix.evaluation.model_card import LICENCE, model_card
from widemix.models.export import export_model, loading_lines, loads_in_timm
from widemix.models.program import check_packages
from widemix.models.registry import build_model
from widemix.recipe import Recipe, parse_recipe
from widemix.recipe.data import DataSection
from widemix.run import checkpoint
from widemix.tally import announce
from widemix.training.finetune import check_indices


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
    parts = ["model.safetensors", *([] if stock else ["model.pt2"])]
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
    return labels, "; ".join(loading_lines(to, recipe.plugins, stock))
