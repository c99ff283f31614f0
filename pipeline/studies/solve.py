"""Values of a key that solve a constraint, such as the tokens that give a Mixer 2^18 connections a layer."""

from collections.abc import Callable, Mapping

from widemix.errors import InputError
from widemix.models.section import ModelSection
from widemix.models.width import tokens_of
from widemix.recipe import Recipe

_WIDEST = 2**20


def solve(key: str, constraint: str, target: float, recipe: Recipe) -> int | float | None:
    """Return the value of the key `model.LEAF` at which the recipe's network has the target; None if there is none.

    constraint: one of `CONSTRAINTS`.
    recipe: has the run's other keys, and any value of this one.
    """
    section, _, leaf = key.partition(".")
    if section != "model" or leaf not in type(recipe.model).model_fields:
        raise InputError(f"{key}: {constraint} is solved for a key of the model, of kind {recipe.model.kind} here")
    return CONSTRAINTS[constraint](leaf, target, recipe)


def _omega(leaf: str, target: float, recipe: Recipe) -> int | float | None:
    """Omega, mean connections of a mixing layer: gamma (C S^2 + S C^2) / 2 of a Mixer, gamma p m^2 of an SW-MLP.

    Hayase & Karakida 2024, equations 13 and 14. Tokens, channels and widths are rounded to the nearest.
    """
    own = recipe.model.model_dump()
    gamma = own.get("expansion") or 1.0
    other = {"tokens": "channels", "channels": "tokens"}.get(leaf)
    if other in own:
        value: int | float = round(tokens_of(own[other], target, gamma))
    elif leaf == "width" and "density" in own:
        value = round((target / gamma / own["density"]) ** 0.5)
    elif leaf == "density" and "width" in own:
        value = target / gamma / own["width"] ** 2
    elif leaf == "expansion" and "tokens" in own:
        value = 2 * target / (own["tokens"] * own["channels"] * (own["tokens"] + own["channels"]))
    else:
        raise InputError(f"model.{leaf}: omega can't be solved for this key of a model of kind {recipe.model.kind}")
    if isinstance(value, int):
        return value if value >= 1 else None
    return value if leaf != "density" or value <= 1 else None


def _weights(leaf: str, target: float, recipe: Recipe) -> int | None:
    """The greatest whole number (of a transformer, multiple of its heads) whose blocks have at most so many."""
    unit = getattr(recipe.model, "width_multiple", 1)

    def fits(value: int) -> bool:
        return block_weights(recipe.model.model_copy(update={leaf: value * unit}), recipe) <= target

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


CONSTRAINTS: Mapping[str, Callable[[str, float, Recipe], int | float | None]] = {
    "omega": _omega,
    "weights": _weights,
}
