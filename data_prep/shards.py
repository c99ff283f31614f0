"""The splits of datasets that are spread over many files, told by words in the files' paths."""

import re
from collections import defaultdict
from pathlib import Path

from data_prep.image_folder import SPLIT_FOLDERS
from pipeline.errors import InputError

WORD = re.compile(r"[a-z]+")
SPLIT_OF = {name: split for split, names in SPLIT_FOLDERS.items() for name in names}


def find_shards(origin: Path, suffix: str) -> dict[str, list[Path]]:
    """The files `*{suffix}` below `origin`, or the file `origin`, sorted, by split: train, val, test.

    A file's split is the first word of its path that names one (train, val, validation, valid, test), otherwise
    train. Raises `InputError` if there are none.
    """
    shards: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(origin.rglob(f"*{suffix}")) if origin.is_dir() else [origin]:
        words = WORD.findall(str(path.relative_to(origin) if origin.is_dir() else path.name).lower())
        shards[next((SPLIT_OF[word] for word in words if word in SPLIT_OF), "train")].append(path)
    if not shards:
        raise InputError(f"{origin}: holds no shards (*{suffix})")
    return {split: shards[split] for split in SPLIT_FOLDERS if split in shards}
