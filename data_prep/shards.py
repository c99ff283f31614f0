"""The splits of datasets that are spread over many files, told by words in the files' paths."""

import re
from collections import defaultdict
from pathlib import Path

from data_prep.image_folder import SPLIT_FOLDERS
from data_prep.samples import FileSlice
from pipeline.errors import InputError

WORD = re.compile(r"[a-z]+")
SPLIT_OF = {name: split for split, names in SPLIT_FOLDERS.items() for name in names}


def split_of(path: str) -> str | None:
    """The split that the first such word of a path names (train, val, validation, valid, test); None without one."""
    return next((SPLIT_OF[word] for word in WORD.findall(path.lower()) if word in SPLIT_OF), None)


def find_shards(origin: Path, suffix: str) -> dict[str, list[Path]]:
    """The files `*{suffix}` below `origin`, or the file `origin`, sorted, by split: train, val, test.

    A file's split is that of its path, as in `split_of`, otherwise train. Raises `InputError` if there are none.
    """
    shards: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(origin.rglob(f"*{suffix}")) if origin.is_dir() else [origin]:
        shards[split_of(str(path.relative_to(origin) if origin.is_dir() else path.name)) or "train"].append(path)
    if not shards:
        raise InputError(f"{origin}: holds no shards (*{suffix})")
    return {split: shards[split] for split in SPLIT_FOLDERS if split in shards}


def read_names(path: Path) -> tuple[str, ...]:
    """The lines of a file of class names, in label order. Raises `InputError` if it cannot be read."""
    lines = FileSlice(str(path)).read().decode("utf-8", "replace").splitlines()
    return tuple(line.strip() for line in lines if line.strip())
