"""Check every byte of a prepared folder against its manifest. FFCV's files contain no checksums."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from data_prep.progress import progress
from pipeline.errors import InputError
from pipeline.formats.beton import Beton, open_beton
from pipeline.formats.blocks import BLOCK, hash_block, hash_bytes, map_blocks
from pipeline.formats.manifest import Split, check_counts, read_manifest
from pipeline.formats.text import TOKENIZER, TextBeton, open_text

OpenFunction = Callable[[Path], Beton | TextBeton]
MAX_RANGES = 10  # of sample numbers in a line


def verify(folder: Path) -> list[str]:
    """One line for each damaged block, with the samples in it, and for each missing file.

    An empty list means that the folder is intact. Raises `InputError` without a readable manifest.
    """
    manifest = read_manifest(folder)
    open_file = open_text if TOKENIZER in manifest.files else open_beton
    splits = manifest.splits.items()
    lines = [line for name, split in splits for line in _verify(folder / split.file, name, split, open_file)]
    for name, digest in manifest.files.items():
        path = folder / name
        if not path.is_file():
            lines.append(f"{path}: is missing")
        elif hash_bytes(path.read_bytes()) != digest:
            lines.append(f"{path}: is damaged")
    return lines


def _verify(path: Path, name: str, split: Split, open_file: OpenFunction) -> list[str]:
    if not path.is_file():
        return [f"{path}: is missing"]
    size = path.stat().st_size
    lines = [f"{path}: has {size} bytes, the manifest says {split.bytes}"] if size != split.bytes else []
    beton = None
    try:
        beton = open_file(path)
        check_counts(path, beton.label, split)
    except InputError as error:
        lines.append(str(error))
    with map_blocks(lambda block: _hash(path, block), len(split.blocks)) as digests:
        for block, digest in enumerate(progress(digests, len(split.blocks), name, "blocks")):
            if digest != split.blocks[block]:
                lines.append(_damage(path, block, digest, beton))
    return lines


def _hash(path: Path, block: int) -> str:
    """The block's hash, or an error message, which equals no hash."""
    try:
        return hash_block(path, block)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _damage(path: Path, block: int, digest: str, beton: Beton | TextBeton | None) -> str:
    start, stop = block * BLOCK, (block + 1) * BLOCK
    reason = f" ({digest})" if digest.startswith("cannot") else ""
    line = f"{path}: block {block} (bytes {start} to {stop - 1}) is damaged{reason}"
    if beton is None:
        return f"{line}; its samples are unknown, because the tables cannot be read"
    touched = np.flatnonzero((beton.offset < stop) & (beton.stop > start))
    places = [f"samples {_ranges(touched)}"] if len(touched) else []
    if start < beton.offset.min() or stop > beton.stop.max():
        places.append("the tables (labels, sizes, positions) or the space between them")
    return f"{line}; it holds {' and '.join(places) or 'unused space'}"


def _ranges(numbers: np.ndarray) -> str:
    """Numbers as text such as `0 to 4, 9`: at most ten runs of consecutive numbers."""
    runs: Iterable[np.ndarray] = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(texts[:MAX_RANGES]) + (
        f" and {len(texts) - MAX_RANGES} more runs" if len(texts) > MAX_RANGES else ""
    )
