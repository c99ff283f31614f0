"""The number of classes of a recipe that leaves `data.num_classes` to the prepared folder."""

from pathlib import Path

from widemix.errors import InputError
from widemix.recipe.schema import Recipe


def fill_classes(recipe: Recipe) -> Recipe:
    """Return the recipe with the prepared folder's number of classes where `data.num_classes` is 0.

    `InputError` if it is 0 and the folder is not prepared. A number that the recipe gives is not compared.
    """
    if recipe.data.num_classes:
        return recipe
    from widemix.formats.manifest import NAME, read_manifest  # imports numpy: recipes load without

    folder = Path(recipe.data.path)
    if not (folder / NAME).exists():
        raise InputError(
            f"data.num_classes is that of the prepared folder, and {folder} is not prepared; prepare it, name "
            "another with --data.path, or give --data.num_classes N"
        )
    return _with_classes(recipe, len(read_manifest(folder).classes))


def match_folder(recipe: Recipe) -> Recipe:
    """Return the recipe with the prepared folder's number of classes, for training.

    `InputError` if there is no such folder, it has a single class, or the recipe gives another number.
    """
    from widemix.formats.manifest import read_manifest

    names, given = read_manifest(Path(recipe.data.path)).classes, recipe.data.num_classes
    if len(names) == 1 and recipe.data.targets == "class":
        raise InputError(f"{recipe.data.path}: has one class, {names[0]!r}, so there is nothing to learn")
    classes = len(names)
    if given not in (0, classes):
        raise InputError(
            f"data.num_classes {given}: {recipe.data.path} has {classes} classes; --data.num_classes 0 takes their "
            "number from there"
        )
    return recipe if given else _with_classes(recipe, classes)


def _with_classes(recipe: Recipe, classes: int) -> Recipe:
    data = recipe.data.model_copy(update={"num_classes": classes})
    return recipe.model_copy(update={"data": data})
