"""Quantities on a figure's axes: keys, sizes of the network, results; and the values of a key that give a size."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widemix.errors import InputError
from widemix.models.layer_costs import tokens_of
from widemix.models.section import ModelSection
from widemix.recipe import Recipe

if TYPE_CHECKING:  # importing torch takes seconds
    from widemix.models.cost import ModelCost


def _model(recipe: Recipe, leaf: str) -> float:
    value = recipe.model.model_dump().get(leaf)
    if not isinstance(value, (int, float)):
        raise InputError(f"model.{leaf}: a model of kind {recipe.model.kind} has none")
    return value


def _tokens(recipe: Recipe) -> float:
    """Tokens that the blocks mix."""
    cost = recipe.model.layer_costs(recipe.data.image_size, recipe.data.num_classes)
    if cost is None:
        raise InputError(f"a model of kind {recipe.model.kind} has no tokens")
    return cost.tokens


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
        lambda recipe, _: _model(recipe, "channels") / _tokens(recipe),
    ),
    "s_over_c": (
        "tokens over channels, S / C",
        lambda recipe, _: _tokens(recipe) / _model(recipe, "channels"),
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
    "model.project_tokens": "tokens",
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
    """Return the cost of the recipe's network, counted once: runs of other seeds and rates have the same."""
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


_WIDEST = 2**20


def solve(keys: Sequence[str], constraint: str, target: float, recipe: Recipe) -> int | float | None:
    """Return the value of the keys `model.LEAF`, the same for all, at which the recipe's network has the target.

    constraint: one of `CONSTRAINTS`.
    recipe: has the run's other keys, and any value of these.

    None if there is no such value.
    """
    leaves = []
    for key in keys:
        section, _, leaf = key.partition(".")
        if section != "model" or leaf not in type(recipe.model).model_fields:
            raise InputError(
                f"{key}: {constraint} is solved for a key of the model, of kind {recipe.model.kind} here"
            )
        leaves.append(leaf)
    if len(leaves) > 1 and constraint != "forward_mflops":
        raise InputError(f"{', '.join(keys)}: {constraint} is solved for one key")
    return CONSTRAINTS[constraint](leaves, target, recipe)


def _omega(leaves: Sequence[str], target: float, recipe: Recipe) -> int | float | None:
    """Omega, mean connections of a mixing layer: gamma (C S^2 + S C^2) / 2 of a Mixer, gamma p m^2 of an SW-MLP.

    Hayase & Karakida 2024, equations 13 and 14. Tokens, channels and widths are rounded to the nearest.
    """
    (leaf,), own = leaves, recipe.model.model_dump()
    gamma = own.get("expansion") or 1.0
    if leaf == "project_tokens" and "channels" in own:
        value: int | float = round(tokens_of(own["channels"], target, gamma))
    elif leaf == "channels" and "project_tokens" in own:
        value = round(tokens_of(_tokens(recipe), target, gamma))
    elif leaf == "width" and "density" in own:
        value = round((target / gamma / own["density"]) ** 0.5)
    elif leaf == "density" and "width" in own:
        value = target / gamma / own["width"] ** 2
    elif leaf == "expansion" and "project_tokens" in own:
        tokens, channels = _tokens(recipe), own["channels"]
        value = 2 * target / (tokens * channels * (tokens + channels))
    else:
        raise InputError(f"model.{leaf}: omega can't be solved for this key of a model of kind {recipe.model.kind}")
    if isinstance(value, int):
        return value if value >= 1 else None
    return value if leaf != "density" or value <= 1 else None


def _weights(leaves: Sequence[str], target: float, recipe: Recipe) -> int | None:
    """The greatest whole number (of a transformer, multiple of its heads) whose blocks have at most so many."""
    (leaf,) = leaves
    unit = getattr(recipe.model, "width_multiple", 1)

    def fits(value: int) -> bool:
        section = recipe.model.model_copy(update={leaf: value * unit})
        try:
            section.check_image_size(recipe.data.image_size)
        except ValueError as error:
            raise InputError(f"model.{leaf}: weights can't be solved for this key: {error}") from None
        return block_weights(section, recipe) <= target

    if not fits(1):
        return None
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high > _WIDEST:
            raise InputError(f"model.{leaf}: the weights of the blocks do not grow with this key")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def block_weights(section: ModelSection, recipe: Recipe) -> int:
    """Return the weights of all blocks of a network on the recipe's data: depth times what one more block adds."""
    from widemix.models.cost import model_cost

    one, two = (
        model_cost(section.model_copy(update={"depth": depth}), recipe.data.image_size, recipe.data.num_classes)
        for depth in (1, 2)
    )
    depth: int = section.model_dump()["depth"]
    return depth * (two.parameters - one.parameters)


def _forward_mflops(leaves: Sequence[str], target: float, recipe: Recipe) -> int | None:
    """The greatest whole number that the network may have, of those that take at most so many MFLOPs for an image."""
    from widemix.models.cost import model_cost

    own, side = recipe.model.model_dump(), recipe.data.image_size

    def fits(value: int) -> bool | None:
        try:
            section = type(recipe.model).model_validate(own | dict.fromkeys(leaves, value))
            section.check_image_size(side)
        except ValueError:
            return None  # a width that the matrices cannot have
        return model_cost(section, side, recipe.data.num_classes).forward_flops <= target * 1e6 * (1 + 1e-9)

    # Matrices of two factors cost least where the width is a square, and no wider one is cheaper than those of 4^k.
    limit = own.get("blocks") or 1
    while fits(limit) is not False:
        limit *= 4
        if limit > _WIDEST:
            raise InputError(f"{', '.join(f'model.{leaf}' for leaf in leaves)}: the FLOPs do not grow with this")
    return next((value for value in range(limit - 1, 0, -1) if fits(value)), None)


CONSTRAINTS: Mapping[str, Callable[[Sequence[str], float, Recipe], int | float | None]] = {
    "omega": _omega,
    "weights": _weights,
    "forward_mflops": _forward_mflops,
}
