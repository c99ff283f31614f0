"""Bytes that a program gives, where the system has no /proc that opens files without a name."""

import io

import numpy as np
import pytest
from PIL import Image

from widemix.api.prep import prepare
from widemix.data_prep import from_python
from widemix.errors import InputError

pytestmark = pytest.mark.usefixtures("small_pages")


def jpeg(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((24, 32, 3), shade, np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def test_a_file_with_a_name_holds_the_same_bytes_and_is_removed(tmp_path, monkeypatch):
    for folder, unnamed in (("linux", True), ("other", False)):
        monkeypatch.setattr(from_python, "UNNAMED", unnamed)
        pairs = ((jpeg(20 * number), number % 2) for number in range(12))  # read once
        prepare(pairs, tmp_path / folder, processes=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linux", "other"]
    betons = [(tmp_path / folder / "train.beton").read_bytes() for folder in ("linux", "other")]
    assert betons[0] == betons[1]


@pytest.mark.parametrize(("unnamed", "kind"), [(True, "TemporaryFile"), (False, "NamedTemporaryFile")])
def test_the_bytes_go_to_the_disk_of_the_output(tmp_path, monkeypatch, unnamed, kind):
    """Not to /tmp, which is often a small one in memory."""
    asked, make = [], getattr(from_python.tempfile, kind)
    monkeypatch.setattr(from_python, "UNNAMED", unnamed)
    monkeypatch.setattr(from_python.tempfile, kind, lambda dir: asked.append(dir) or make(dir=dir))
    for to in ("a/b/c", "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        with from_python.collect({"val": [(jpeg(9), 0), (jpeg(7), 1)]}, tmp_path / to) as dataset:
            assert [sample.image.read() for sample in dataset.splits["val"]] == [jpeg(9), jpeg(7)]
    assert asked == [tmp_path, tmp_path]


def test_it_is_removed_after_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(from_python, "UNNAMED", False)
    with pytest.raises(InputError, match="pair 1"):
        prepare([(jpeg(0), 0), (jpeg(1), -1)], tmp_path / "data")
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_an_image_without_bytes_is_left_out_by_its_own_name(tmp_path):
    pairs = [(b"", 0), (jpeg(0), 0), (jpeg(1), 1)]
    rules = prepare(pairs, tmp_path / "data", max_bad=0.5).exceptions
    assert rules == ({"file": "train/0-00000000", "rule": "left out: is empty"},)


@pytest.mark.parametrize("name", ["", " ", "a\0b", "a\ud800"])
def test_a_class_name_that_no_file_can_hold_is_refused(tmp_path, name):
    """Training took its time, and then no command could print or write it."""
    with pytest.raises(InputError, match=r"train: pair 1 has the label .* \(str\), no number, name or several"):
        prepare([(jpeg(0), "a"), (jpeg(1), name)], tmp_path / "data")


def test_class_names_that_only_their_characters_tell_apart_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"python: names the class .* twice, in two Unicode forms"):
        prepare([(jpeg(0), "caf\u00e9"), (jpeg(1), "cafe\u0301")], tmp_path / "data")


def test_of_a_label_that_is_none_its_value_and_type_are_named(tmp_path):
    """Beside the bytes of an image it was not seen."""
    with pytest.raises(InputError, match=r"train: pair 0 has the label None \(NoneType\), no number"):
        prepare([(jpeg(0), None)], tmp_path / "data")


def test_names_of_any_bytes_are_kept(tmp_path):
    manifest = prepare([(jpeg(0), "b\udcff"), (jpeg(1), "a")], tmp_path / "data")
    assert manifest.classes == ("a", "b\udcff")
