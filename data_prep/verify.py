"""Check every byte of a prepared folder against its manifest and checksums. FFCV's files contain none."""

import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from widemix.data_prep import adopt
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import from_python
from widemix.errors import InputError
from widemix.formats.beton import Beton, open_beton
from widemix.formats.checksums import Checksums, compute_checksums, open_checksums
from widemix.formats.chunks import CHUNK, hash_bytes, map_chunks
from widemix.formats.manifest import Manifest, Split, check_counts, read_manifest
from widemix.formats.sources import describe_sample
from widemix.formats.text import TOKENIZER, TextBeton, open_text
from widemix.progress_line import track

OpenFunction = Callable[[Path], Beton | TextBeton]
MAX_LINES = 20  # of damaged samples of a split; the others are only counted
MAX_RANGES = 10  # of sample numbers in a line


class _Opened(NamedTuple):
    """A split's file, as far as it can be read."""

    path: Path
    beton: Beton | TextBeton | None
    checksums: Checksums | None


def verify(folder: Path) -> list[str]:
    """One line for each damaged sample and block, and for each missing file.

    An empty list means that the folder is intact. Raises `InputError` without a readable, unchanged manifest, and
    where this user may not read a file, which is no damage.
    """
    manifest = read_manifest(folder)
    for path in sorted(folder.iterdir()):
        if path.exists() and not os.access(path, os.R_OK):
            raise InputError(f"{path}: cannot be read (Permission denied)")
    lines = [line for name in manifest.splits for line in _verify(folder, name, manifest)]
    for name, digest in manifest.files.items():
        path = folder / name
        if not path.is_file():
            lines.append(f"{path}: is missing")
        elif hash_bytes(path.read_bytes()) != digest:
            lines.append(f"{path}: is damaged")
    return lines


def repair_command(folder: Path) -> str:
    """The command that prepares a folder again, from the source and with the settings in its manifest."""
    manifest = read_manifest(folder)
    if manifest.source == adopt.SOURCE:
        return f"widemix adopt in a new folder, after FFCV has written {manifest.origin} again"
    if manifest.source == from_python.SOURCE:
        return f"widemix.prepare(..., {str(folder)!r}, force=True) in Python, with the samples that it was given"
    settings = manifest.settings
    words = ["widemix", "prep", manifest.source]
    if manifest.origin != manifest.source:
        words += ["--from", manifest.origin]
    size = "--short-side" if settings.get("side") == "shortest" else "--max-size"
    defaults = PrepSettings().as_json() | {"shuffle": True}  # those of the command
    for name, value in settings.items():
        option = size if name == "max_size" else f"--{name.replace('_', '-')}"
        if name == "side" or (value == defaults.get(name) and option != "--short-side"):
            continue
        words += [f"--{'' if value else 'no-'}{option[2:]}"] if isinstance(value, bool) else [option, str(value)]
    return shlex.join([*words, "--to", str(folder), "--force"])


def open_prepared(folder: Path, manifest: Manifest, split: Split) -> Beton | TextBeton:
    """A split's file. Raises `InputError` if it is damaged."""
    open_file: OpenFunction = open_text if TOKENIZER in manifest.files else open_beton
    return open_file(folder / split.file)


def _verify(folder: Path, name: str, manifest: Manifest) -> list[str]:
    split = manifest.splits[name]
    path = folder / split.file
    if not path.is_file():
        return [f"{path}: is missing"]
    size = path.stat().st_size
    lines = [f"{path}: has {size} bytes, the manifest says {split.bytes}"] if size != split.bytes else []
    opened = _Opened(path, None, None)
    try:
        beton = open_prepared(folder, manifest, split)
        opened = opened._replace(beton=beton)
        check_counts(path, beton.label, split)
        opened = opened._replace(checksums=open_checksums(beton))
    except InputError as error:
        lines.append(str(error))
    wrong: list[int] = []
    with map_chunks(lambda block: _check(opened, block), len(split.blocks)) as checked:
        for block, (digest, damaged) in enumerate(track(checked, name, len(split.blocks), "blocks")):
            wrong += damaged
            if digest != split.blocks[block]:
                lines.append(_describe_block(opened, block, digest, np.array(wrong, np.int64)))
    lines += [f"{path}: {describe_sample(path, sample)} is damaged" for sample in wrong[:MAX_LINES]]
    if len(wrong) > MAX_LINES:
        lines.append(f"{path}: {len(wrong)} samples are damaged in all: {_ranges(np.array(wrong))}")
    return lines


def _check(opened: _Opened, block: int) -> tuple[str, list[int]]:
    """The block's hash, or an error message, which equals no hash; and the damaged samples that begin in it."""
    start, stop = block * CHUNK, (block + 1) * CHUNK
    beton, samples = opened.beton, np.zeros(0, np.int64)
    if beton is not None and opened.checksums is not None:
        samples = np.flatnonzero((beton.offset >= start) & (beton.offset < stop))
        stop = max(stop, int(beton.stop[samples].max(initial=0)))
    try:
        with opened.path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
    except OSError as error:
        return f"cannot be read: {error.strerror}", samples.tolist()
    digest = hash_bytes(data[:CHUNK])
    if beton is None or opened.checksums is None:
        return digest, []
    wrong = compute_checksums(beton, samples, data, start) != opened.checksums.samples[samples]
    return digest, samples[wrong].tolist()


def _describe_block(opened: _Opened, block: int, digest: str, wrong: np.ndarray) -> str:
    """The line about a damaged block. `wrong` are the damaged samples up to its end, int [n]."""
    start, stop = block * CHUNK, (block + 1) * CHUNK
    reason = f" ({digest})" if digest.startswith("cannot") else ""
    line = f"{opened.path}: block {block} (bytes {start} to {stop - 1}) is damaged{reason}"
    beton = opened.beton
    if beton is None:
        return f"{line}; its samples are unknown, because the tables cannot be read"
    samples = np.arange(len(beton)) if opened.checksums is None else wrong
    touched = samples[(beton.offset[samples] < stop) & (beton.stop[samples] > start)]
    places = [f"samples {_ranges(touched)}"] if len(touched) else []
    if start < beton.offset.min() or stop > beton.stop.max():
        places.append("the tables (labels, sizes, positions) or the space between them")
    return f"{line}; it holds {' and '.join(places) or 'unused space'}"


def _ranges(numbers: np.ndarray) -> str:
    """Numbers as text such as `0 to 4, 9`: at most ten runs of consecutive numbers."""
    runs: Iterable[np.ndarray] = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    more = len(texts) - MAX_RANGES
    return ", ".join(texts[:MAX_RANGES]) + (f" and {more} more run{'s' * (more > 1)}" if more > 0 else "")
