"""`widemix prep --dry-run`: the estimated size of the output and time to write it, from some of the images."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from widemix.cgroups import usable_cpus
from widemix.data_prep.encoding import Encoding, encoding_for
from widemix.data_prep.prep_dir import check_outside, translate_errors
from widemix.data_prep.prepare import find_prepared, is_outdated, select
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import check_origin, read_source
from widemix.data_prep.subset import Subset
from widemix.data_prep.write import expected_bytes

MAX_ENCODED = 64  # images of a split that are encoded for the estimate
DISK_BYTES_PER_S = 500e6  # assumed speed of writing and flushing: nothing is written to measure it


class Estimate(NamedTuple):
    """The expected output for one split."""

    split: str
    samples: int
    bytes: int
    seconds: float  # to encode with all processes, and to write


@translate_errors()
def dry_run(
    source: str,
    origin: Path | None,
    to: Path,
    settings: PrepSettings,
    *,
    processes: int | None = None,
    force: bool = False,
    extend: bool = False,
) -> tuple[list[Estimate], int]:
    """What `prepare` with the same arguments would write, and the free bytes on that disk. Writes nothing.

    The list is empty if the folder is already prepared. Raises the `InputError` that `prepare` would raise before it
    encodes.
    """
    origin = check_origin(source, origin)
    check_outside(to, origin)
    existing = next(folder for folder in (to.absolute(), *to.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    done = find_prepared(source, origin, to, settings, force, extend)
    dataset = select(read_source(source, origin, settings), settings)
    if done is not None and not is_outdated(to, done, dataset, extend):
        return [], free
    encoding = encoding_for(dataset, origin, settings, processes=1)  # more would mostly measure their start
    workers = (processes or usable_cpus()) if encoding.parallel else 1
    return [
        _estimate(name, samples, encoding, workers, settings.page) for name, samples in dataset.splits.items()
    ], free


def _estimate(name: str, samples: Sequence[Any], encoding: Encoding, workers: int, page: int) -> Estimate:
    chosen = range(0, len(samples), max(1, len(samples) // MAX_ENCODED))[:MAX_ENCODED]
    started = time.perf_counter()
    size = sum(len(part) for record in encoding.records(Subset(samples, chosen), 0) for part in record.parts)
    scale = len(samples) / len(chosen)
    seconds = (time.perf_counter() - started) * scale / workers
    written = expected_bytes(len(samples), size * scale, encoding.layout, page)
    return Estimate(name, len(samples), written, seconds + written / DISK_BYTES_PER_S)
