"""What a preparation would read and write, how large and how long, from a sample of the pictures."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.encoding import Encoding, encoding_for
from data_prep.prepare import already_there, checked_origin, list_samples
from data_prep.settings import PrepSettings
from data_prep.subset import Chosen
from data_prep.workplace import permitted
from data_prep.write import expected_bytes
from pipeline.cgroups import usable_cpus

TRIED = 64  # pictures a split that are encoded to see
DISK = 500e6  # bytes/s that are written and flushed: assumed, since nothing is written to see


class Estimate(NamedTuple):
    """One split, as it would come out."""

    split: str
    samples: int
    bytes: int
    seconds: float  # of encoding, by all processes together, and of writing


@permitted()
def dry_run(
    source: str,
    origin: Path | None,
    to: Path,
    settings: PrepSettings,
    *,
    processes: int | None = None,
    force: bool = False,
) -> tuple[list[Estimate], int]:
    """What `prepare` with the same arguments would write, and the free bytes where it would; nothing is created.

    Empty when the folder is there already. Raises the `InputError` that `prepare` would at its start.
    """
    origin = checked_origin(source, origin)
    place = next(folder for folder in (to.absolute(), *to.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if already_there(source, origin, to, settings, force) is not None:
        return [], free
    dataset = list_samples(source, origin, settings)
    alone = encoding_for(dataset, origin, settings, processes=1)  # starting a pool would be most of the time
    workers = (processes or usable_cpus()) if alone.shared else 1
    return [_estimate(name, samples, alone, workers) for name, samples in dataset.splits.items()], free


def _estimate(name: str, samples: Sequence[Any], encoding: Encoding, workers: int) -> Estimate:
    tried = range(0, len(samples), max(1, len(samples) // TRIED))[:TRIED]
    started = time.perf_counter()
    size = sum(len(part) for record in encoding.records(Chosen(samples, tried), 0) for part in record.parts)
    share = len(samples) / len(tried)
    seconds = (time.perf_counter() - started) * share / workers
    written = expected_bytes(len(samples), size * share, encoding.layout)
    return Estimate(name, len(samples), written, seconds + written / DISK)
