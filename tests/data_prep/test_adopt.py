"""Files of images and labels that become a prepared folder; test_ffcv_reads.py has those that FFCV wrote."""

import errno
import os
import re
import shutil

import numpy as np
import pytest

from tests.data_prep.writing import put
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.data_prep.adopt import adopt
from widemix.data_prep.image_processes import encode_all
from widemix.data_prep.prepare import prepare
from widemix.data_prep.samples import ImageFiles
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import repair_command, verify
from widemix.errors import InputError, RunError
from widemix.formats.beton import open_beton
from widemix.formats.manifest import read_manifest
from widemix.formats.tables import FIELD, HEADER

pytestmark = pytest.mark.usefixtures("small_pages")


def main(words):
    return run_command(make_parser(), argv=words)


@pytest.fixture
def beton(tmp_path, image, write_beton):
    """Five JPEGs with the labels 3 to 7, of which one is wide, in train_256.beton."""
    names = [f"{i}.jpg" for i in range(5)]
    for i, name in enumerate(names):
        image(i, width=700 if i == 1 else 40).save(tmp_path / name)
    path = tmp_path / "train_256.beton"
    samples = ImageFiles(tmp_path, names, range(3, 8))
    write_beton(path, encode_all(samples, 0, PrepSettings(restart_markers=False, max_size=0), 1))
    return path


@pytest.mark.parametrize("hard", [True, False])
def test_a_folder_of_links(tmp_path, beton, capsys, monkeypatch, system, hard):
    before, out = beton.read_bytes(), tmp_path / "out"
    (tmp_path / "names.txt").write_text("\n".join("abcdefgh"))
    if not hard:
        system({"os.link": lambda *_: (_ for _ in ()).throw(OSError)})
    monkeypatch.chdir(tmp_path)
    words = ["adopt", beton.name, f"val={beton}", "--to", str(out), "--classes", str(tmp_path / "names.txt")]
    assert main(words) == 0
    assert "train.beton: 5 samples" in capsys.readouterr().out
    assert sorted(os.listdir(out)) == ["manifest.json", "train.beton", "train.crc32c", "val.beton", "val.crc32c"]
    assert (out / "train.beton").is_symlink() is not hard
    assert (out / "train.beton").samefile(beton)
    assert read_manifest(out).classes == tuple("abcdefgh")
    assert read_manifest(out).splits["val"].per_class == (0, 0, 0, 1, 1, 1, 1, 1)
    assert verify(out) == []
    assert main(["verify", str(out)]) == 0
    assert str(beton) in repair_command(out)
    assert beton.read_bytes() == before
    with pytest.raises(InputError, match="out: is already prepared"):
        adopt({"train": beton}, out)


def test_a_lone_train_is_told_with_what_adopt_can_do(tmp_path, beton, capsys):
    assert main(["adopt", str(beton), "--to", str(tmp_path / "out")]) == 0
    advice = "out: has no split to evaluate on; name a file of one too, such as val=FILE\n"
    assert capsys.readouterr().out.endswith(advice)


def test_a_disk_without_links_is_told(tmp_path, beton, capsys, system):

    def fails(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    system({"os.link": fails, "os.symlink": fails})
    assert main(["adopt", str(beton), "--to", str(tmp_path / "out")]) == 2
    assert (
        f"{tmp_path}/out: its disk has no links, of which the folder would consist; name one on"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_a_damaged_image_is_refused_and_named(tmp_path, beton, limits, capsys):
    opened = open_beton(beton)
    data = bytearray(beton.read_bytes())
    data[int(opened.offset[2]) : int(opened.offset[2]) + 2] = b"??"
    data[int(opened.stop[4]) - 60 : int(opened.stop[4])] = bytes(60)
    beton.write_bytes(data)
    with pytest.raises(RunError, match=r"train_256\.beton: 2 of 5 images are damaged; write the file again"):
        adopt({"train": beton}, tmp_path / "out")
    listed = capsys.readouterr().err
    assert "train_256.beton[2]: is no image" in listed
    assert "train_256.beton[4]: " in listed
    assert not (tmp_path / "out").exists()
    limits({"widemix.data_prep.adopt.LISTED": 1})
    with pytest.raises(RunError, match="2 of 5 images are damaged"):
        adopt({"train": beton}, tmp_path / "out")
    assert capsys.readouterr().err.count("train_256.beton[") == 1


def test_an_image_with_a_warning_of_libjpeg_is_damaged_too(tmp_path, image, write_beton, capsys):
    """`prep` would write it anew, with the same pixels."""
    image(0).save(tmp_path / "0.jpg")
    jpeg, comment = (tmp_path / "0.jpg").read_bytes(), b"\xff\xfe\x00\x10" + 14 * b"c"
    (tmp_path / "0.jpg").write_bytes(jpeg[:-2] + comment + jpeg[-2:])
    path = tmp_path / "train.beton"
    write_beton(path, encode_all(ImageFiles(tmp_path, ["0.jpg"], [0]), 0, PrepSettings(restart_markers=False), 1))
    assert path.read_bytes().count(comment) == 1
    path.write_bytes(path.read_bytes().replace(comment, 18 * b"c"))
    with pytest.raises(RunError, match="1 of 1 images are damaged"):
        adopt({"train": path}, tmp_path / "out")
    assert re.search(r"train\.beton\[0\]: Corrupt JPEG data: \d+ extraneous bytes", capsys.readouterr().err)


def test_a_size_that_is_not_the_images_is_refused(tmp_path, beton, capsys):
    mapped = np.memmap(beton, np.uint8, "r+")
    opened = open_beton(beton)
    record = opened.records_at + 3 * opened.records.dtype.itemsize
    mapped[record + 1 : record + 5].view("<u2")[:] = 30, 40
    mapped.flush()
    with pytest.raises(RunError, match="1 of 5 images are damaged"):
        adopt({"train": beton}, tmp_path / "out")
    assert "[3]: has 40 x 30 pixels, and the file says 30 x 40" in capsys.readouterr().err


def test_labels_and_unusual_images_of_several_files(tmp_path, image, write_beton, capsys):
    """-1 is no label; the classes are those of all files."""
    for name, options in (("a.jpg", {}), ("b.jpg", {"progressive": True}), ("c.jpg", {})):
        image(0).save(tmp_path / name, **options)
    settings = PrepSettings(restart_markers=False)

    def write(name, labels):
        samples = ImageFiles(tmp_path, ["a.jpg", "b.jpg", "c.jpg"][: len(labels)], labels)
        write_beton(tmp_path / name, encode_all(samples, 0, settings, 1))
        return tmp_path / name

    first, second = write("first.beton", [-1, 4, -1]), write("second.beton", [2])
    manifest = adopt({"train": first, "val": second}, tmp_path / "out", processes=1)
    assert "out: train has no images of 2, which val has" in capsys.readouterr().err
    assert manifest.classes == tuple("01234")
    assert manifest.origin == f"{first}, {second}"
    assert [split.per_class for split in manifest.splits.values()] == [(0, 0, 0, 0, 1), (0, 0, 1, 0, 0)]
    assert manifest.exceptions == ({"file": "first.beton[1]", "rule": "kept as it is: progressive"},)
    assert adopt({"train": second, "val": first}, tmp_path / "swapped", processes=1).classes == tuple("01234")
    assert adopt({"train": first}, tmp_path / "names", "vwxyz", processes=1).classes == tuple("vwxyz")
    for labels, words in (([-2], "has labels from -2 to -2"), ([0, 1_000_000], "label 1000000 is above 999999")):
        with pytest.raises(InputError, match=rf"third\.beton: {words}"):
            adopt({"train": write("third.beton", labels)}, tmp_path / "third")
    with pytest.raises(InputError, match=r"second\.beton: has labels from 2 to 2, and there are 2 classes"):
        adopt({"train": second}, tmp_path / "third", "yz")
    assert not (tmp_path / "third").exists()


def test_wrong_files_and_folders_are_one_line(tmp_path, beton, capsys):
    """Others are in messages/data.yaml."""
    other = tmp_path / "images.beton"
    other.write_bytes(beton.read_bytes())
    mapped = np.memmap(other, FIELD, "r+", HEADER.itemsize, (2,))
    mapped[1]["type_id"] = 0
    mapped.flush()
    put(tmp_path, {"own/val.beton": "anybody's", "link": f"-> {tmp_path}"})
    for words, to, line in (
        (f"train={other}", "out", "holds image (RGBImageField), label (FloatField), not image and label"),
        (str(beton), "own", "own: holds val.beton and no manifest.json"),
        (str(beton), ".", f"error: --to {tmp_path}: holds {beton} itself; name another folder\n"),
        (str(beton), "link", f"error: --to {tmp_path}/link: holds {beton} itself; name another folder\n"),
    ):
        assert main(["adopt", words, "--to", str(tmp_path / to)]) == 2
        assert line in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        # also beside JPEGs, of those that were kept as they are
        ("image-folder", {"encoding": "coefficients"}, "holds coefficients, not FFCV's images"),
        ("csv", {"targets": "age"}, "holds targets instead of classes"),
    ],
)
def test_files_of_prep_that_ffcv_has_not_are_refused(tmp_path, image, source, settings, words):
    put(tmp_path, {"train/a/": "", "table.csv": "path,age\ntrain/a/0.jpg,3.5\n"})
    for number in range(2):
        image(number).save(tmp_path / f"train/a/{number}.jpg", progressive=number == 0)
    shutil.copytree(tmp_path / "train", tmp_path / "in/train")
    origin = tmp_path / ("table.csv" if source == "csv" else "in")
    prepare(source, origin, tmp_path / "prepared", PrepSettings(**settings), processes=1)
    with pytest.raises(InputError, match=rf"train\.beton: {words}"):
        adopt({"train": tmp_path / "prepared/train.beton"}, tmp_path / "out")


@pytest.mark.parametrize("settings", [{}, {"restart_markers": False}, {"raw": True}])
def test_a_file_of_prep_gets_its_own_checksums(tmp_path, folder, settings):
    prepare("image-folder", folder, tmp_path / "prepared", PrepSettings(**settings), processes=1)
    out = tmp_path / "out"
    adopt({"train": tmp_path / "prepared/train.beton"}, out, processes=1)
    assert (out / "train.crc32c").read_bytes() == (tmp_path / "prepared/train.crc32c").read_bytes()
    assert verify(out) == []
