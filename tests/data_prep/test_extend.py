"""A source that has grown: it is told, and what is new is added, to the bytes of preparing all of it."""

import shutil

import numpy as np
import pytest

from data_prep import encode
from data_prep.dry_run import dry_run
from data_prep.prepare import prepare
from data_prep.settings import PrepSettings
from pipeline.errors import InputError
from tests import layouts


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def grow(folder, picture):
    """Another class, before the others, and pictures among those of another."""
    for name in ("train/aardvark/0.jpg", "train/aardvark/1.png", "val/aardvark/0.jpg", "train/bee/2b.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        picture(len(name), 44, 33, "L" if name.endswith("png") else "RGB").save(folder / name)


@pytest.mark.parametrize(
    "settings", [PrepSettings(), PrepSettings(raw=True), PrepSettings(restart_markers=False, holdout=0.3)], ids=str
)
def test_what_is_new_is_told_and_added(tmp_path, folder, picture, settings, monkeypatch):
    picture(0, mode="L").save(folder / "train/ant/grey.png")
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    prepare("image-folder", folder, out, settings, processes=1)
    before = contents(out)
    grow(folder, picture)
    new = r"train/aardvark/0\.jpg, .*\(4 in all\)"
    for function in (prepare, dry_run):
        with pytest.raises(InputError, match=rf"out: was prepared from .*pictures before it had {new}; add --extend"):
            function("image-folder", folder, out, settings, processes=1)
    assert contents(out) == before
    encoded = []
    original = encode.encode
    monkeypatch.setattr(encode, "encode", lambda *words: encoded.append(words[0].name) or original(*words))
    assert dry_run("image-folder", folder, out, settings, processes=1, extend=True)[0]
    encoded.clear()
    prepare("image-folder", folder, out, settings, processes=1, extend=True)
    assert len(encoded) == 4
    prepare("image-folder", folder, fresh, settings, processes=1)
    assert contents(out) == contents(fresh)
    assert prepare("image-folder", folder, out, settings, processes=1, extend=True).classes[0] == "aardvark"


def test_what_is_gone_or_changed_is_told(tmp_path, folder, picture):
    out = tmp_path / "out"
    prepare("image-folder", folder, out, PrepSettings(), processes=1)
    grow(folder, picture)
    shutil.copy(folder / "train/bee/5.JPEG", folder / "train/bee/3.JPEG")
    before = contents(out)
    with pytest.raises(InputError, match=r"^train/bee/3\.JPEG: changed since it was prepared; add --force"):
        prepare("image-folder", folder, out, PrepSettings(), processes=1, extend=True)
    (folder / "train/bee/3.JPEG").unlink()
    with pytest.raises(InputError, match=r"out: holds train/bee/3\.JPEG, no longer in .*pictures; add --force"):
        prepare("image-folder", folder, out, PrepSettings(), processes=1, extend=True)
    assert {name: data for name, data in contents(out).items() if not name.endswith(".unfinished")} == before
    prepare("image-folder", folder, out, PrepSettings(), processes=1, force=True)
    prepare("image-folder", folder, tmp_path / "fresh", PrepSettings(), processes=1)
    assert contents(out) == contents(tmp_path / "fresh")


def test_text_and_pixels_grow_too(tmp_path):
    for name in ("mnli", "svhn"):
        source, make = layouts.LAYOUTS[name]
        origin = tmp_path / name
        origin.mkdir()
        make(origin)
        out, settings = tmp_path / f"{name}.out", PrepSettings(length=16)
        prepare(source, origin, out, settings)
        if name == "mnli":
            *_, last = (origin / "train.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
            with (origin / "train.tsv").open("a", encoding="utf-8") as file:
                file.write(last)
        else:
            pixels = np.zeros((32, 32, 3, 5), np.uint8)
            layouts.savemat(origin / "extra_32x32.mat", {"X": pixels, "y": np.ones((5, 1), np.uint8)})
        with pytest.raises(InputError, match=r"before it had (train\.tsv:10|extra\[0\]).*--extend"):
            prepare(source, origin, out, settings)
        prepare(source, origin, out, settings, extend=True)
        prepare(source, origin, tmp_path / f"{name}.fresh", settings)
        assert contents(out) == contents(tmp_path / f"{name}.fresh")
