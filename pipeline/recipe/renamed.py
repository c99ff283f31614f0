"""Recipe keys that were renamed: for one release the old spelling is read too, with a line of warning."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from widemix.errors import InputError
from widemix.terminal import print

# The old name of each, and its name now. Both are in one section and take the same values. No hash of an experiment
# may depend on such a key, or runs and tables of studies made before would be those of another experiment.
RENAMED = {
    "engine.kernels": "engine.memory_layout",
    "train.accumulation": "train.grad_accum_steps",
    "train.checkpointing": "train.activation_checkpointing",
    "train.save_every": "train.save_every_steps",
    "train.keep": "train.keep_last",
    "train.keep_every": "train.keep_every_steps",
    "data.on_bad": "data.on_corrupt",
    "data.batches_ahead": "data.prefetch_batches",
    "data.ahead_mib": "data.prefetch_mib",
    "data.memory": "data.memory_gib",
    "data.window": "data.shuffle_window_mib",
    "engine.timeout": "engine.timeout_s",
    "engine.bucket_view": "engine.gradient_as_bucket_view",
    "engine.bucket_mb": "engine.bucket_cap_mb",
    "engine.overlap": "engine.overlap_comm",
    "engine.offload": "engine.cpu_offload",
    "faults.hang": "faults.hang_timeout_s",
    "faults.skips": "faults.max_skipped_steps",
    "faults.rollbacks": "faults.max_rollbacks",
    "faults.spike": "faults.loss_spike_std",
    "eval.every": "eval.every_epochs",
    "eval.batch": "eval.batch_size",
}
_WARNED = "WIDEMIX_RENAMED_KEYS"  # a variable, so that the ranks that a command starts do not warn again


def current_name(name: str) -> str:
    """The name that a `section.key` has now."""
    return RENAMED.get(name, name)


def rename_keys(values: Mapping[str, Any], place: str | None) -> dict[str, Any]:
    """Return the values of a recipe with renamed keys under their names of now.

    place: where the values come from, for the warning; None of what was stored by a run, which needs none.
    Raises `InputError` where a key stands there under both names.
    """
    renamed = dict(values)
    for old, new in RENAMED.items():
        section, leaf = old.split(".")
        keys = renamed.get(section)
        if isinstance(keys, dict) and leaf in keys:
            now = new.partition(".")[2]
            if now in keys:
                raise InputError(f"{place or 'recipe'}: {old} and {new} are one key; remove {old}, its old name")
            renamed[section] = {now if name == leaf else name: value for name, value in keys.items()}
            if place is not None:
                warn_renamed(old, new, place)
    return renamed


def warn_renamed(old: str, new: str, place: str) -> None:
    """Print once in this process and those that it starts, on rank 0, that a key has another name now, if it has."""
    warned = os.environ.get(_WARNED, "").split()
    if old != new and old not in warned:
        os.environ[_WARNED] = " ".join([*warned, old])
        if os.environ.get("RANK", "0") == "0":
            print(
                f"warning: {place}: {old} is now called {new}; the next release does not read the old name",
                file=sys.stderr,
            )
