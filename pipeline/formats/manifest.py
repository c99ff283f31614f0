"""manifest.json: the contents of a prepared folder, against which every reader checks the files."""

import json
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError, model_validator

from widemix.errors import InputError, command
from widemix.files import parse_json, read_regular
from widemix.formats.chunks import CHUNK, hash_bytes
from widemix.formats.tables import pieces

NAME = "manifest.json"
MOST = 256 << 20  # bytes of a manifest: of some millions of exceptions
_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp")

FileName = Annotated[str, StringConstraints(pattern=r"^[^./][^/]*$")]  # of a file in the folder itself


class Split(BaseModel):
    """One .beton: its size in bytes, fields and samples, and the BLAKE3-128 of each 64 MiB block."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: FileName
    bytes: int
    samples: int
    per_class: tuple[int, ...]  # samples in label order; samples without a label (-1) are not counted
    fields: dict[str, str]  # name -> name of FFCV's type
    blocks: tuple[str, ...]

    @model_validator(mode="after")
    def _blocks_cover_the_file(self) -> "Split":
        if len(self.blocks) != -(-self.bytes // CHUNK):
            raise ValueError(f"{len(self.blocks)} blocks do not cover {self.bytes} bytes")
        return self


class Manifest(BaseModel):
    """A prepared folder: splits by name, class names in label order, and what it was prepared from and with.

    On disk it begins with its own `hash`, the BLAKE3-128 of the rest, which `read_manifest` compares.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal[3] = 3
    source: str
    origin: str  # path that the source was read from
    classes: tuple[str, ...]
    splits: dict[str, Split]
    settings: dict[str, Any]  # `PrepSettings` by name
    versions: dict[str, str]  # of the packages that the bytes depend on
    files: dict[FileName, str] = {}  # name -> BLAKE3-128 of other files: checksums, names of samples, tokenizer.json
    exceptions: tuple[dict[str, str], ...] = ()  # samples that a rule applied to: {"file", "rule"}

    @model_validator(mode="after")
    def _every_split_has_checksums(self) -> "Manifest":
        for split in self.splits.values():
            if Path(split.file).with_suffix(".crc32c").name not in self.files:
                raise ValueError(f"no checksums of {split.file}")
        return self


class Prepared(BaseModel):
    """Facts about the folder that a network was trained on which predictions need, and a run keeps.

    classes: names in label order. max_size, side, to_8_bit_rgb: what was made of its images, as in `PrepSettings`.
    """

    model_config = ConfigDict(frozen=True)
    classes: tuple[str, ...] = ()
    max_size: int = 0
    side: Literal["longest", "shortest"] = "longest"
    to_8_bit_rgb: bool = False

    @classmethod
    def of(cls, manifest: Manifest) -> "Prepared":
        """That of a folder, by its manifest."""
        settings = manifest.settings
        stored = {name: settings[name] for name in ("max_size", "side", "to_8_bit_rgb") if name in settings}
        return cls(classes=manifest.classes, **stored)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder. Raises `InputError` if there is none, or it cannot be read."""
    path = folder / NAME
    if folder.parts[:1] and folder.parts[0].endswith(":"):  # what Path makes of a URL
        url = str(folder).replace(":/", "://", 1)
        raise InputError(f"{url}: is a URL; {command('stage', url, '--to', 'DIR')} copies it to this machine")
    try:
        # Not parsed by pydantic: names may hold bytes that are not UTF-8.
        content = parse_json(read_regular(path, MOST))
        own = content.pop("hash", None) if isinstance(content, dict) else None
        manifest = Manifest.model_validate(content)
        if own != _hash(content):
            raise InputError(f"{path}: was changed since it was written (its hash differs); prepare the folder again")
        return manifest
    except FileNotFoundError:
        raise InputError(f"{folder}: {_why_missing(folder)}") from None
    except NotADirectoryError:
        raise InputError(f"{folder}: is a file; name the folder that `widemix prep` wrote") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except InputError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{name}: " for name in first["loc"][:2])
        raise InputError(f"{path}: not a manifest ({where}{first['msg']}); prepare it again") from None
    except ValueError as error:
        raise InputError(f"{path}: not a manifest (not JSON: {error}); prepare it again") from None


def _why_missing(folder: Path) -> str:
    """What is there instead of a prepared folder, and the cure."""
    if (folder / "environment.json").exists():
        return "is a run folder; name the folder that `widemix prep` wrote"
    if folder.is_dir() and any(path.suffix.lower() in _IMAGES for path in islice(folder.rglob("*"), 1000)):
        prep = command("prep", "image-folder", "--from", folder, "--to", Path("datasets", folder.resolve().name))
        return f"holds images that are not prepared; {prep} prepares them"
    cure = f"`widemix prep SOURCE [--from DIR] --to {folder}` writes one; image-folder is the SOURCE for your images"
    if folder.is_dir():
        return f"has no manifest.json; {cure}"
    where = "" if folder.is_absolute() else f" in {Path.cwd()}"
    return f"no such folder{where}; {cure}"


def find_trained_on(folder: str, network: str | Path) -> Path:
    """Return the folder on which a network was trained; `InputError` where it is not there, as in another folder."""
    if not Path(folder).exists():
        raise InputError(
            f"{folder}: no such folder in {Path.cwd()}, and {network} was trained on it; --data names it"
        )
    return Path(folder)


def find_split(folder: Path, name: str, manifest: Manifest, key: str = "") -> Split:
    """The split of this name. `InputError` says which there are, and with `key`, the recipe's, what to do."""
    if name in manifest.splits:
        return manifest.splits[name]
    cure = f"; --{key} takes another" if key else ""
    if len(manifest.splits) == 1:
        cure = "; prepare it again with --holdout 10%, which makes one" + (f", and --{key} holdout" if key else "")
    raise InputError(f"{folder}: no split {name!r}; it has {', '.join(manifest.splits)}{cure}")


def split_path(folder: Path, name: str, manifest: Manifest) -> Path:
    """The path of a split's .beton. Raises `InputError` unless the file has the size in the manifest."""
    split = find_split(folder, name, manifest)
    path = folder / split.file
    size = path.stat().st_size if path.is_file() else None
    if size is None:
        raise InputError(f"{path}: is missing; prepare the folder again")
    if size != split.bytes:
        raise InputError(f"{path}: has {size} bytes, the manifest says {split.bytes}; prepare it again")
    return path


def count_labels(labels: np.ndarray, classes: int) -> tuple[int, ...]:
    """The number of labels, int [n], of each of `classes` classes. Negative labels are not counted."""
    counts = np.zeros(classes, np.int64)
    for piece in pieces(len(labels)):
        counts += np.bincount(labels[piece][labels[piece] >= 0], minlength=classes)
    return tuple(counts.tolist())


def check_counts(path: Path, labels: np.ndarray, split: Split) -> None:
    """Raise `InputError` unless the labels of a file, int [n], have the counts per class in the manifest."""
    if len(labels) != split.samples:
        raise InputError(f"{path}: holds {len(labels)} samples, the manifest says {split.samples}")
    if labels.min() < -1 or labels.max() >= len(split.per_class):
        raise InputError(f"{path}: has labels outside of its {len(split.per_class)} classes; prepare it again")
    counts = count_labels(labels, len(split.per_class))
    for label, (count, wanted) in enumerate(zip(counts, split.per_class, strict=True)):
        if count != wanted:
            raise InputError(f"{path}: holds {count} samples of class {label}, the manifest says {wanted}")


def data_hashes(folder: Path, *splits: str) -> dict[str, str]:
    """Hashes of splits and other files of a prepared folder, by file name: equal where the bytes are."""
    manifest = read_manifest(folder)
    chosen = [manifest.splits[name] for name in splits if name in manifest.splits]
    return dict(manifest.files) | {split.file: hash_bytes("".join(split.blocks).encode()) for split in chosen}


def manifest_json(manifest: Manifest) -> str:
    """The text of manifest.json."""
    content = manifest.model_dump(mode="json")
    return json.dumps({"hash": _hash(content)} | content, indent=1) + "\n"


def _hash(content: dict[str, Any]) -> str:
    return hash_bytes(json.dumps(content).encode("ascii"))
