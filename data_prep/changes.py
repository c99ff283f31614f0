"""Whether a source is what it was when an earlier process read it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from widemix.data_prep.samples import IN_MEMORY, Status
from widemix.errors import InputError
from widemix.formats.checksums import crc32c

NAMED = 3  # samples in a message


def check_unchanged(samples: Sequence[Any], origins: np.ndarray, to: Path) -> None:
    """Raise `InputError` with the samples whose source has changed since `origins`, ORIGIN [taken], were written.

    A file of another size has changed. One of another time is read again, and has changed if its checksum has. So are
    samples that are read with their listing.
    """
    taken = (samples[number] for number in range(len(origins)))
    changed = [sample.name for sample, origin in zip(taken, origins, strict=True) if _has_changed(sample, origin)]
    if changed:
        raise InputError(
            f"{name_some(changed)}: changed since the interrupted preparation in {to}; restore what was there, "
            "or add --force to start again"
        )


def name_some(names: Sequence[str]) -> str:
    """The first names, and how many there are in all if there are more."""
    return ", ".join(names[:NAMED]) + (f", ... ({len(names):,} in all)" if len(names) > NAMED else "")


def _has_changed(sample: Any, origin: np.void) -> bool:
    then, now = Status(*origin.tolist()[1:]), sample.status()
    if now == then and now != IN_MEMORY:
        return False
    return now.size != then.size or crc32c(sample.content()) != origin["checksum"]
