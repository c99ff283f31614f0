"""Which keys make a recipe another experiment, and which only change how a run of it is carried out."""

import hashlib
import json
import re

from widemix.recipe.files import differences, flat_recipe
from widemix.recipe.schema import Recipe

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
