"""manifest.json: what a prepared folder holds, so that nothing else is ever trained on."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError, model_validator

from pipeline.errors import InputError
from pipeline.formats.blocks import BLOCK

NAME = "manifest.json"

FileName = Annotated[str, StringConstraints(pattern=r"^[^./][^/]*$")]  # in the folder itself


class Split(BaseModel):
    """One .beton: its size, fields and samples, and the BLAKE3-128 of each 64 MiB block."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: FileName
    bytes: int
    samples: int
    per_class: tuple[int, ...]  # samples, in label order; those without a label (-1) are in none
    fields: dict[str, str]  # name -> FFCV's type
    blocks: tuple[str, ...]

    @model_validator(mode="after")
    def _blocks_cover_the_file(self) -> "Split":
        if len(self.blocks) != -(-self.bytes // BLOCK):
            raise ValueError(f"{len(self.blocks)} blocks do not cover {self.bytes} bytes")
        return self


class Manifest(BaseModel):
    """The prepared folder: splits by name, class names in label order, and how it came about."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal[2] = 2
    source: str
    origin: str  # where the source was read from
    classes: tuple[str, ...]
    splits: dict[str, Split]
    settings: dict[str, Any]  # of the preparation: sizes, quality, ...
    versions: dict[str, str]  # of the packages that touched the pixels
    files: dict[FileName, str] = {}  # BLAKE3-128 of what else belongs to the folder, such as tokenizer.json
    exceptions: tuple[dict[str, str], ...] = ()  # pictures that took a rule: {"file", "rule"}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder, or `InputError`."""
    path = folder / NAME
    if path.exists() and not path.is_file():  # reading a FIFO would wait for ever
        raise InputError(f"{path}: is no file; prepare the folder again")
    try:
        return Manifest.model_validate(json.loads(path.read_bytes()))  # whose names may hold bytes that are no UTF-8
    except FileNotFoundError:
        what = "has no manifest.json" if folder.is_dir() else "no such folder"
        raise InputError(f"{folder}: {what}; `widemix prep SOURCE --from DIR --to {folder}` writes one") from None
    except NotADirectoryError:
        raise InputError(f"{folder}: is a file; name the folder that `widemix prep` wrote") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{name}: " for name in first["loc"][:2])
        raise InputError(f"{path}: not a manifest ({where}{first['msg']}); prepare it again") from None
    except ValueError as error:
        raise InputError(f"{path}: not a manifest (not JSON: {error}); prepare it again") from None


def split_path(folder: Path, name: str, manifest: Manifest) -> Path:
    """Where a split's .beton lies, refused unless its size is the manifest's."""
    if name not in manifest.splits:
        raise InputError(f"{folder}: no split {name!r}; it has {', '.join(manifest.splits)}")
    split = manifest.splits[name]
    path = folder / split.file
    size = path.stat().st_size if path.is_file() else None
    if size is None:
        raise InputError(f"{path}: is missing; prepare the folder again")
    if size != split.bytes:
        raise InputError(f"{path}: has {size} bytes, the manifest says {split.bytes}; prepare it again")
    return path


def count_labels(labels: np.ndarray, classes: int) -> tuple[int, ...]:
    """How many of the labels, int [n], are each class's."""
    return tuple(np.bincount(labels[labels >= 0], minlength=classes).tolist())


def check_counts(path: Path, labels: np.ndarray, split: Split) -> None:
    """`InputError` unless the labels of a file, int [n], are as many, of each class too, as the manifest says."""
    if len(labels) != split.samples:
        raise InputError(f"{path}: holds {len(labels)} samples, the manifest says {split.samples}")
    if labels.min() < -1 or labels.max() >= len(split.per_class):
        raise InputError(f"{path}: has labels beyond its {len(split.per_class)} classes; prepare it again")
    counts = count_labels(labels, len(split.per_class))
    for label, (found, wanted) in enumerate(zip(counts, split.per_class, strict=True)):
        if found != wanted:
            raise InputError(f"{path}: holds {found} samples of class {label}, the manifest says {wanted}")


def manifest_json(manifest: Manifest) -> str:
    return json.dumps(manifest.model_dump(mode="json"), indent=1) + "\n"
