"""Values of a key that solve a constraint, such as the tokens that give a Mixer 2^18 connections a layer."""

from collections.abc import Callable, Mapping, Sequence

from widemix.errors import InputError
from widemix.models.layer_costs import tokens_of
from widemix.models.section import ModelSection
from widemix.recipe import Recipe

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
