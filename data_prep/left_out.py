"""How many of a split's images may be left out because they cannot be decoded."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from widemix.data_prep.written import Written
from widemix.errors import RunError
from widemix.tally import print_status

LISTED = 20  # images that are left out, in the list before an error
ADVICE = "repair or remove them and add --force, or allow more of them with --max-bad"


def check_fraction(split: str, written: Written, samples: int, max_bad: float, *, finished: bool) -> None:
    """Raise `RunError`, after a list of them, if more than the fraction `max_bad` of the samples are left out.

    Before the split is `finished`, only if they fill the list, so that it names as many as are to be repaired.
    """
    bad = written.taken - written.count
    if bad > max_bad * samples and (finished or bad >= LISTED):
        _list(written)
        so_far = "" if written.taken == samples else f" of the first {written.taken}"
        fraction = f"more than {100 * max_bad:.3g} % of {samples}"
        raise RunError(f"{split}: {bad} images{so_far} cannot be decoded, {fraction}; {ADVICE}")


def check_classes(
    split: str, written: Written, samples: Sequence[Any], classes: Sequence[str], max_bad: float
) -> None:
    """Raise `RunError`, after a list, if all images of a class are left out, unless all may be."""
    out = np.setdiff1d(np.arange(written.taken), written.stored[: written.count])
    if not len(out) or max_bad >= 1:
        return
    kept = {samples[number].label for number in written.stored[: written.count].tolist()}
    lost = sorted({samples[number].label for number in out.tolist()} - kept)
    if lost:
        _list(written)
        names = ", ".join(classes[label] for label in lost)
        raise RunError(f"{split}: not one image of {names} can be decoded; {ADVICE} 100%")


def _list(written: Written) -> None:
    lines = [
        f"{entry['file']}: {entry['rule']}" for entry in written.exceptions if entry["rule"].startswith("left out")
    ]
    for line in lines[:LISTED]:
        print_status(line)
    if len(lines) > LISTED:
        print_status(f"... and {len(lines) - LISTED} more")
