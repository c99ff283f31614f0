"""What a figure's axes can show: keys of the recipe, sizes of the network, and results of the run."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widemix.errors import InputError
from widemix.recipe import Recipe

if TYPE_CHECKING:  # importing torch takes seconds
    from widemix.models.cost import ModelCost


def _model(recipe: Recipe, leaf: str) -> float:
    value = recipe.model.model_dump().get(leaf)
    if not isinstance(value, (int, float)):
        raise InputError(f"model.{leaf}: a model of kind {recipe.model.kind} has none")
    return value


def _depth_to_width(recipe: Recipe, _: None) -> float:
    ratio = recipe.model.depth_to_width()
    if ratio is None:
        raise InputError(f"depth_to_width: a model of kind {recipe.model.kind} has no such ratio")
    return ratio


def _permuted_block(recipe: Recipe, _: None) -> str:
    """The numbers of the random-permuted blocks, from 1; none, all, or some."""
    values = recipe.model.model_dump()
    if values.get("permutation") != "random":
        return "none"
    blocks = values.get("permuted_blocks")
    return "all" if blocks is None else ", ".join(str(block + 1) for block in blocks) or "none"


# Sizes of a network: label of the axis, and how it is computed, from the recipe and the network's cost.
COMPUTED: dict[str, tuple[str, Callable[[Recipe, Any], float | str]]] = {
    "width": ("effective width m", lambda _, cost: cost.width),
    "hidden_width": ("effective width γm", lambda _, cost: cost.hidden_width),
    "depth_to_width": ("depth over log2 width, p / log2 d: two layers p a Mixer block", _depth_to_width),
    "c_over_s": (
        "channels over tokens, C / S",
        lambda recipe, _: _model(recipe, "channels") / _model(recipe, "tokens"),
    ),
    "s_over_c": (
        "tokens over channels, S / C",
        lambda recipe, _: _model(recipe, "tokens") / _model(recipe, "channels"),
    ),
    "sparsity": ("inverse density, 1 / p", lambda _, cost: 1 / cost.density),
    "density": ("density p", lambda _, cost: cost.density),
    "omega": ("connections a layer Ω", lambda _, cost: cost.omega),
    "parameters": ("parameters", lambda _, cost: cost.parameters),
    "memory_mb": ("parameters, MB in fp32", lambda _, cost: cost.parameters * 4 / 1e6),
    "forward_mflops": ("forward MFLOPs of an image", lambda _, cost: cost.forward_flops / 1e6),
    "patch_size": ("patch size P", lambda recipe, _: _model(recipe, "patch_size")),
    "permuted_block": ("random-permuted block", _permuted_block),
    "patch_features": ("features of a patch, C0 = 3 P²", lambda recipe, _: 3 * _model(recipe, "patch_size") ** 2),
}

# Those that a recipe says without its cost, which takes seconds to count; the others are numbers above 0.
OF_RECIPE = ("depth_to_width", "c_over_s", "s_over_c", "patch_size", "permuted_block", "patch_features")

# Results of a run: label of the axis, with the split that was evaluated, and the column of the results.
MEASURED = {
    "error": "{split} error (%)",
    "top1": "top-1 (%)",
    "loss": "{split} loss",
    "train_loss": "train loss",
    "zero_weights": "weights that are zero (%)",
    "epoch_seconds": "seconds an epoch",
}

_KEYS = {
    "data.path": "data",
    "optim.lr": "learning rate",
    "optim.l1": "penalty λ of beta-LASSO",
}  # label of the axis, where the key's name is none

_COSTS: "dict[tuple[type, str, int, int], ModelCost]" = {}

CURVES = ("error", "top1", "loss", "train_loss")  # of these, what has a value for each epoch


def value_of(name: str, recipe: Recipe) -> float | str:
    """Return a computed quantity or the value of a recipe key."""
    if name in COMPUTED:
        return COMPUTED[name][1](recipe, None if name in OF_RECIPE else _cost(recipe))
    if name == "data.path":
        return Path(recipe.data.path).name
    section, _, leaf = name.partition(".")
    return as_quantity(getattr(recipe, section).model_dump().get(leaf))


def as_quantity(value: object) -> float | str:
    """A key's value as a number or text, by which points are told apart and named."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _cost(recipe: Recipe) -> "ModelCost":
    """Of the recipe's network, which runs of other seeds and rates have too: to count it can take a second."""
    from widemix.models.cost import model_cost

    model, data = recipe.model, recipe.data
    key = (type(model), model.model_dump_json(), data.image_size, data.num_classes)
    if key not in _COSTS:
        _COSTS[key] = model_cost(model, data.image_size, data.num_classes)
    return _COSTS[key]


def label_of(name: str, split: str = "test") -> str:
    """Return the text of a quantity's axis; `split` is what the samples that runs were evaluated on are called."""
    if name in COMPUTED:
        return COMPUTED[name][0]
    if name in MEASURED:
        return MEASURED[name].format(split=split)
    return _KEYS.get(name) or name.rpartition(".")[2].replace("_", " ")


def is_number(value: float | str) -> bool:
    """Whether a value has a place on a numeric axis."""
    return isinstance(value, (int, float)) and math.isfinite(value)
