"""The manifest and what is checked against it, by hand."""

from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from widemix.errors import InputError
from widemix.formats import tables
from widemix.formats.manifest import (
    Manifest,
    Prepared,
    Split,
    check_counts,
    count_labels,
    data_hashes,
    manifest_json,
    read_manifest,
    split_path,
)

CHUNK = 64 << 20  # in all folders that there are


def split(name: str = "train", **keys) -> Split:
    given = {
        "file": f"{name}.beton",
        "bytes": 5,
        "samples": 4,
        "per_class": (1, 0, 2),
        "fields": {},
        "blocks": ("ab",),
    }
    return Split(**(given | keys))


def manifest(**keys) -> Manifest:
    given = {
        "source": "csv",
        "origin": "/table.csv",
        "classes": ("wren", "ant", "bee"),
        "splits": {name: split(name, blocks=(name,)) for name in ("train", "val", "test")},
        "settings": {"max_size": 300, "side": "shortest", "to_8_bit_rgb": True, "quality": 90},
        "versions": {},
        "files": {f"{name}.crc32c": f"of {name}" for name in ("train", "val", "test")},
    }
    return Manifest(**(given | keys))


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "manifest.json").write_text(manifest_json(manifest()))
    (tmp_path / "train.beton").write_bytes(b"12345")
    return tmp_path


@pytest.mark.parametrize(
    ("size", "blocks"), [(0, 0), (1, 1), (CHUNK, 1), (CHUNK + 1, 2), (2 * CHUNK, 2), (2 * CHUNK + 1, 3)]
)
def test_blocks_cover_the_file_and_no_more(size, blocks):
    assert split(bytes=size, blocks=("ab",) * blocks).bytes == size
    for wrong in {blocks - 1, blocks + 1} - {-1}:
        with pytest.raises(ValueError, match=f"{wrong} blocks do not cover {size} bytes"):
            split(bytes=size, blocks=("ab",) * wrong)


@pytest.mark.parametrize("name", ["a/b.beton", "/a.beton", ".a.beton", "../a.beton", "a/../b.beton", ""])
def test_files_are_in_the_folder_itself_and_not_hidden(name):
    with pytest.raises(ValueError, match="should match pattern"):
        split(file=name)
    with pytest.raises(ValueError, match="should match pattern"):
        manifest(files=manifest().files | {name: "a hash"})


def test_the_folder_may_be_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert read_manifest(Path()) == manifest()


def test_each_split_needs_its_checksums():
    files = manifest().files
    for name in files:
        with pytest.raises(ValueError, match=f"no checksums of {name.partition('.')[0]}.beton"):
            manifest(files={other: value for other, value in files.items() if other != name})


def test_predictions_know_how_the_images_were_shrunk():
    assert Prepared.of(manifest()) == Prepared(
        classes=("wren", "ant", "bee"), max_size=300, side="shortest", to_8_bit_rgb=True
    )
    assert Prepared.of(manifest(settings={})) == Prepared(classes=("wren", "ant", "bee"), max_size=0, side="longest")


@pytest.mark.parametrize("repeats", [1, tables.PIECE])
def test_labels_are_counted_by_class(repeats):
    assert count_labels(np.tile([2, -1, 0, -1, 2], repeats), 4) == (repeats, 0, 2 * repeats, 0)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([2, 0, 2], "holds 3 samples, the manifest says 4"),
        ([2, 0, 2, -1, -1], "holds 5 samples, the manifest says 4"),
        ([2, 0, 2, -2], "has labels outside of its 3 classes"),
        ([2, 0, 2, 3], "has labels outside of its 3 classes"),
        ([2, 0, 2, 1], "holds 1 samples of class 1, the manifest says 0"),
        ([-1, 0, 2, -1], "holds 1 samples of class 2, the manifest says 2"),
    ],
)
def test_labels_have_the_counts_of_the_manifest(labels, words):
    check_counts(Path("a.beton"), np.array([2, -1, 0, 2]), split())
    with pytest.raises(InputError, match=rf"a\.beton: {words}"):
        check_counts(Path("a.beton"), np.array(labels), split())


def test_a_splits_file_has_the_size_of_the_manifest(folder):
    whole = manifest()
    assert split_path(folder, "train", whole) == folder / "train.beton"
    for data, words in (
        (b"1234", "has 4 bytes, the manifest says 5"),
        (b"123456", "has 6 bytes, the manifest says 5"),
    ):
        (folder / "train.beton").write_bytes(data)
        with pytest.raises(InputError, match=rf"train\.beton: {words}"):
            split_path(folder, "train", whole)
    with pytest.raises(InputError, match=r"val\.beton: is missing"):
        split_path(folder, "val", whole)
    with pytest.raises(InputError, match=r"no split 'vla'; it has train, val, test"):
        split_path(folder, "vla", whole)


def test_data_are_known_by_the_hashes_of_chosen_splits(folder):
    of = {name: blake3(name.encode()).hexdigest(length=16) for name in ("train", "val")}
    others = {f"{name}.crc32c": f"of {name}" for name in ("train", "val", "test")}
    assert data_hashes(folder, "train", "val") == others | {"train.beton": of["train"], "val.beton": of["val"]}
    assert data_hashes(folder, "val", "holdout") == others | {"val.beton": of["val"]}


def test_what_is_no_prepared_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos/cat").mkdir(parents=True)
    (tmp_path / "photos/cat/1.JPG").touch()
    for path, words in (
        (Path("none"), f"^none: no such folder in {tmp_path}; `widemix prep"),
        (
            Path("photos"),
            "holds images .*; `widemix prep image-folder --from photos --to datasets/photos` prepares them",
        ),
        (Path("s3://bucket/data"), "^s3://bucket/data: is a URL; `widemix stage s3://bucket/data --to DIR`"),
    ):
        with pytest.raises(InputError, match=words):
            read_manifest(path)
