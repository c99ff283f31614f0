"""Hashes and differences of recipes, and which keys make another experiment."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from widemix.recipe.recipe import Recipe

# Keys that may differ between two starts of one run: they change no loss by more than rounding.
_CHANGEABLE = re.compile(
    r"engine\.(?!reduce_dtype$)|faults\.|log\.|eval\."
    r"|data\.(path|workers|checksums|prefetch_batches|prefetch_mib|on_corrupt)$"
    r"|train\.(max_steps|profile|save_every_steps|save_minutes|keep_last|keep_best|patience_epochs|patience_gain"
    r"|keep_every_steps|grad_accum_steps)$"
    r"|train\.(activation_checkpointing|compile|deterministic|ema_device)$"
)
# Of these, keys that a run may change when it continues, but that make another experiment from its start.
_RESULT_DEPENDS = ("data.path", "data.on_corrupt", "train.max_steps", "train.patience_epochs", "train.patience_gain")


def flat_recipe(recipe: Recipe, exclude_defaults: bool = False) -> dict[str, Any]:
    """All `section.key` of a recipe with their values; with `exclude_defaults` only those that are changed."""
    dump = recipe.model_dump(mode="json", exclude={"plugins"}, exclude_defaults=exclude_defaults)
    return {f"{section}.{name}": value for section, keys in dump.items() for name, value in keys.items()}


def recipe_hash(recipe: Recipe) -> str:
    """Return 16 hexadecimal digits that depend on the values of all keys."""
    canonical = json.dumps(recipe.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def differences(one: Recipe, other: Recipe) -> list[str]:
    """Return the `section.key` names whose values differ between two recipes."""
    a, b = one.model_dump(mode="json"), other.model_dump(mode="json")
    return [name for name in dict.fromkeys([*leaves(a), *leaves(b)]) if _get(a, name) != _get(b, name)]


def run_differences(one: Recipe, other: Recipe) -> list[str]:
    """Return the `section.key` names for which a run of one recipe can't be continued with the other."""
    unknown = 0 in (one.data.num_classes, other.data.num_classes)  # the prepared folder's number
    changed = [name for name in differences(one, other) if not _CHANGEABLE.match(name)]
    return [name for name in changed if not (unknown and name == "data.num_classes")]


def experiment_hash(recipe: Recipe) -> str:
    """Return 10 hexadecimal digits that depend on every key that the result depends on.

    Keys at their defaults are left out, so that a new key, whose default is what was done before, changes no hash.
    """
    values = {
        name: value
        for name, value in flat_recipe(recipe, exclude_defaults=True).items()
        if not _CHANGEABLE.match(name) or name in _RESULT_DEPENDS
    }
    if recipe.plugins:
        values["plugins"] = list(recipe.plugins)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]


def leaves(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the names of plain values: `section.key`, and those of values outside a section."""
    names = []
    for name, value in values.items():
        if isinstance(value, dict) and not prefix:
            names += leaves(value, f"{name}.")
        else:
            names.append(f"{prefix}{name}")
    return names


def _get(values: Mapping[str, Any], name: str) -> Any:
    section, _, leaf = name.partition(".")
    return values.get(section, {}).get(leaf) if leaf else values.get(section)
