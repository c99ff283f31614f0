"""WebDataset shards: plain tars in which the members `KEY.jpg` and `KEY.cls`, or `KEY.json`, are one sample."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from posixpath import normpath

import numpy as np

from widemix.data_prep.samples import Dataset, FileSlice, TarImages
from widemix.data_prep.sources.labels import check_label, parse_json
from widemix.data_prep.sources.listing import HEAD, SUFFIXES, begins_as_image
from widemix.data_prep.sources.shards import find_shards, read_names
from widemix.data_prep.sources.tar_listing import Members, list_tar
from widemix.errors import InputError

MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")  # key and extension: from the first dot of the file name on
CLASSES = "classes.txt"
ENDS = "; a key ends at the first dot of a file's name"


def read(origin: Path) -> Dataset:
    """The splits whose shards are in `origin`, in the order of the shards' names and of their members.

    A shard's split follows from its path, as in `split_of`. Class names are the lines of `classes.txt`, by default
    the labels. Raises `InputError` for damaged shards.
    """
    splits = {split: _images(origin, tars) for split, tars in find_shards(origin, ".tar").items()}
    return Dataset(_classes(origin, splits), splits)


def _classes(origin: Path, splits: dict[str, TarImages]) -> tuple[str, ...]:
    count = 1 + max(int(split.labels.max(initial=0)) for split in splits.values())
    path = origin / CLASSES
    if not path.is_file():
        return tuple(map(str, range(count)))
    names = read_names(path)
    if len(names) < count:
        raise InputError(f"{path}: names {len(names)} classes, and the shards have labels up to {count - 1}")
    return names


def _images(origin: Path, tars: Sequence[Path]) -> TarImages:
    rows = [(number, *row) for number, tar in enumerate(tars) for row in _samples(tar)]
    if not rows:
        raise InputError(f"{tars[0]}: holds no samples (KEY.jpg with KEY.cls or KEY.json)")
    number, names, labels, offsets, sizes = zip(*rows, strict=True)
    columns = (np.array(column, np.int64) for column in (labels, offsets, sizes))
    places = [str(tar.relative_to(origin)) if origin.is_dir() else tar.name for tar in tars]
    return TarImages(tars, places, np.array(number, np.int64), np.array(names, np.bytes_), *columns)


def _samples(tar: Path) -> Iterator[tuple[bytes, int, int, int]]:
    """Name, label, offset and size of each image of a shard."""
    members = list_tar(tar)
    keys: dict[str, dict[str, int]] = defaultdict(dict)  # member numbers by extension, of each key
    for number in range(len(members.names)):
        name = members.name(number)
        match = MEMBER.fullmatch(name)
        if match:
            key = normpath(match[1])  # ./a is a
            other = keys[key].setdefault(match[2].lower(), number)
            if other != number:
                raise InputError(f"{tar}: {key} has {members.name(other)} and then {name} again; remove one")
    for key, parts in keys.items():
        images = [number for extension, number in parts.items() if f".{extension}" in SUFFIXES]
        if not images:
            named = {number for extension, number in parts.items() if "." not in extension}  # not seg.png
            images = [number for number in named if begins_as_image(_read(tar, members, number, HEAD))]
        if len(images) != 1:
            there = ", ".join(f".{extension}" for extension in parts)
            raise InputError(f"{tar}: {key} has {len(images)} images, not one, among {there}{ENDS}")
        image = images[0]
        label = _label(
            tar, key, {kind: _read(tar, members, parts[kind]) for kind in ("cls", "json") if kind in parts}
        )
        yield bytes(members.names[image]), label, int(members.offsets[image]), int(members.sizes[image])


def _read(tar: Path, members: Members, number: int, most: int = -1) -> bytes:
    """The bytes of a member, at most so many."""
    size = int(members.sizes[number])
    return FileSlice(str(tar), int(members.offsets[number]), size if most < 0 else min(most, size)).read()


def _label(tar: Path, key: str, texts: dict[str, bytes]) -> int:
    """The label in the texts of KEY.cls and KEY.json; `InputError` where they have none, or two."""
    if not texts:
        raise InputError(f"{tar}: {key} has neither {key}.cls nor {key}.json{ENDS}")
    labels = {kind: _read_label(tar, f"{key}.{kind}", text, len(texts) > 1) for kind, text in texts.items()}
    found = {label for label in labels.values() if label is not None}
    if len(found) > 1:
        raise InputError(
            f"{tar}: {key}.cls has the label {labels['cls']}, and {key}.json {labels['json']}; remove one"
        )
    return found.pop()


def _read_label(tar: Path, name: str, text: bytes, may_lack: bool) -> int | None:
    """The label in KEY.cls or KEY.json, of which the second may lack it where there is the first."""
    try:
        label = parse_json(text)
        if name.endswith(".json"):
            if may_lack and isinstance(label, dict) and "label" not in label:
                return None
            label = label["label"]
        if type(label) not in (int, float):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        wanted = '{"label": 3}' if name.endswith(".json") else "3"
        why = f": it {error}" if " twice" in str(error) else ""
        raise InputError(f"{tar}: {name} holds no label such as {wanted}{why}") from None
    return check_label(f"{tar}: {name}", label)
