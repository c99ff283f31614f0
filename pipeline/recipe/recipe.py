"""A recipe: its sections, checked, and completed by its prepared folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from widemix.errors import InputError
from widemix.models.hub import HUB, TIMM, WEIGHTS, check_timm_name
from widemix.recipe.error_messages import error_message
from widemix.recipe.plugins import import_plugins
from widemix.recipe.schema import RecipeFields


class Recipe(RecipeFields):
    """A whole experiment, except the machines that it runs on.

    `plugins` are modules to import first: they register model families, optimizers and operations of other people.
    A recipe that is built from its sections, or from their plain values, raises `InputError` for what is wrong; a
    section that is built alone, and `model_validate`, raise pydantic's `ValidationError`.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(error_message(error, values, {}, "recipe")) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # model_validate raises pydantic's own error


def parse_recipe(
    values: Mapping[str, Any], origin: Mapping[str, str] | None = None, default_origin="recipe"
) -> Recipe:
    """Validate plain values; the first mistake becomes an `InputError` of one line.

    values: sections by name, each a mapping of its keys.
    origin: for each `section.key`, the file it comes from or "the command line", for the message.
    default_origin: the same for keys that `origin` omits.
    """
    import_plugins(values, default_origin)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise InputError(error_message(error, values, origin or {}, default_origin)) from None


def fill_classes(recipe: Recipe) -> Recipe:
    """Return the recipe with the prepared folder's number of classes where `data.num_classes` is 0.

    `InputError` if it is 0 and the folder is not prepared. A number that the recipe gives is not compared.
    """
    if recipe.data.num_classes:
        return recipe
    from widemix.formats.manifest import NAME, read_manifest  # imports numpy: recipes load without

    folder = Path(recipe.data.path)
    try:
        return _with_classes(recipe, len(read_manifest(folder).classes))
    except InputError as error:
        if (folder / NAME).exists():
            raise
        raise InputError(f"{error}; or give --data.num_classes N, which is taken from there") from None


def check_batch(global_batch: int, samples: int, split: str, folder: str | Path) -> None:
    """Raise `InputError` if a split has not one whole batch."""
    if global_batch > samples:
        raise InputError(
            f"train.global_batch {global_batch} exceeds the {samples} samples of split {split!r} in {folder}; "
            f"{2 ** (samples.bit_length() - 1)} would do"
        )


def match_folder(recipe: Recipe) -> Recipe:
    """Return the recipe with the prepared folder's number of classes, for training.

    `InputError` if there is no such folder, it lacks a split or has fewer samples than a batch, it has a single
    class, or the recipe gives another number.
    """
    from widemix.formats.manifest import find_split, read_manifest

    folder, manifest = Path(recipe.data.path), read_manifest(Path(recipe.data.path))
    names, given = manifest.classes, recipe.data.num_classes
    if len(names) == 1 and recipe.data.targets == "class":
        raise InputError(f"{recipe.data.path}: has one class, {names[0]!r}, so there is nothing to learn")
    classes = len(names)
    if given not in (0, classes):
        raise InputError(
            f"data.num_classes {given}: {recipe.data.path} has {classes} classes; --data.num_classes 0 takes their "
            "number from there"
        )
    if (recipe.train.keep_best or "").endswith("top5") and classes <= 5:
        raise InputError(f"train.keep_best {recipe.train.keep_best}: {folder} has {classes} classes; take top1")
    samples = find_split(folder, recipe.data.train_split, manifest, "data.train_split").samples
    find_split(folder, recipe.data.eval_split, manifest, "data.eval_split")
    check_batch(recipe.train.global_batch, samples, recipe.data.train_split, folder)
    return recipe if given else _with_classes(recipe, classes)


def check_init_from(recipe: Recipe) -> None:
    """Raise `InputError` if `train.init_from` names a path that is not there, or no network of timm."""
    source = recipe.train.init_from or ""
    check_timm_name(source, f"train.init_from {source}")
    if source and not source.startswith((TIMM, HUB)) and not Path(source).exists():
        raise InputError(f"train.init_from {source}: no such run or checkpoint folder; {WEIGHTS}")


def _with_classes(recipe: Recipe, classes: int) -> Recipe:
    data = recipe.data.model_copy(update={"num_classes": classes})
    return recipe.model_copy(update={"data": data})
