"""The splits of datasets that are spread over many files, recognised by words in the files' paths."""

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from widemix.data_prep.samples import FileSlice
from widemix.data_prep.sources.image_folder import SPLIT_FOLDERS, SPLIT_OF
from widemix.data_prep.sources.labels import check_names
from widemix.data_prep.sources.listing import walk
from widemix.errors import InputError
from widemix.progress_line import print_status

COMPRESSED = re.compile(r"\.(tgz|tbz2?|txz|tar\.(gz|bz2|xz|zst|lz4))$")
WORD = re.compile(r"[a-z]+")


def split_of(path: str) -> str | None:
    """The split that a path names by a word (train, val, validation, valid, test); None without one.

    It is the first such word of the file's name, else of the folder that is nearest to it.
    """
    return next(iter(_splits_of(path)), None)


def _splits_of(path: str) -> list[str]:
    """The splits that a path names, of the file's name first."""
    parts = (WORD.findall(part) for part in reversed(path.lower().split("/")))
    return [SPLIT_OF[word] for words in parts for word in words if word in SPLIT_OF]


def find_shards(origin: Path, suffix: str) -> dict[str, list[Path]]:
    """The files `*{suffix}` below `origin`, or the file `origin`, sorted, by split: train, val, test.

    A file's split is that of its path, as in `split_of`, otherwise train. A line says where that may be wrong. Hidden
    files are none. Raises `InputError` if there are none.
    """
    shards: dict[str, list[Path]] = defaultdict(list)
    names = [Path(name) for name in walk(str(origin))] if origin.is_dir() else [Path(origin.name)]
    unnamed, unclear = [], []
    for name in sorted(name for name in names if name.name.lower().endswith(suffix) or not origin.is_dir()):
        named = _splits_of(str(name)) or ["train"]
        shards[named[0]].append(origin / name if origin.is_dir() else origin)
        unnamed += [] if _splits_of(str(name)) else [name]
        unclear += [(name, named)] if len(set(named)) > 1 else []
    packed = [str(name) for name in names if COMPRESSED.search(name.name.lower())] if suffix == ".tar" else []
    cure = f"{len(packed)} compressed shards such as {packed[0]}; decompress them" if packed else ""
    if not shards:
        raise InputError(f"{origin}: holds no shards (*{suffix}){f', but {cure}' if packed else ''}")
    if packed:
        print_status(f"warning: {origin}: left out {cure}, since images are read in place")
    if unclear:
        name, named = unclear[0]
        splits = " and ".join(sorted(set(named)))
        print_status(f"warning: {origin}: the path of {name} names {splits}; it is read as {named[0]}")
    if unnamed:
        print_status(f"warning: {origin}: {len(unnamed)} shards name no split, such as {unnamed[0]}; read as train")
    _check_links([shard for paths in shards.values() for shard in paths])
    return {split: shards[split] for split in SPLIT_FOLDERS if split in shards}


def _check_links(shards: Sequence[Path]) -> None:
    """Raise `InputError` for a shard that is another one by a link: its samples would be read twice."""
    found: dict[str, Path] = {}
    for shard in shards:
        first = found.setdefault(os.path.realpath(shard), shard)
        if first != shard:
            raise InputError(f"{shard}: is the same file as {first}, by a link; remove one of them")


def read_names(path: Path) -> tuple[str, ...]:
    """The lines of a file of class names, in label order.

    Raises `InputError` if it cannot be read, and for an empty line or a name that comes twice.
    """
    try:
        lines = FileSlice(str(path)).read().decode("utf-8-sig").rstrip().split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read as UTF-8 ({error})") from None
    names = tuple(line.strip() for line in lines)
    if "" in names and names != ("",):
        raise InputError(f"{path}: line {1 + names.index('')} is empty, and each line names a class")
    check_names(path, names)
    return tuple(filter(None, names))
