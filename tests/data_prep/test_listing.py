"""Which files of a folder, and which members of shards, are images: by their bytes, their names and their tars."""

import io
import os
import shutil
import tarfile

import numpy as np
import pytest

from tests.data_prep.conftest import saved
from tests.data_prep.test_sources import DEVKIT, OF_VAL, ROWS, TRAIN, VAL, WNIDS, devkit
from tests.data_prep.writing import Link, found, put, tar
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import image_folder, imagenet, tar_listing, webdataset
from widemix.data_prep.sources.listing import HEAD, Images, begins_as_image
from widemix.data_prep.sources.shards import find_shards, split_of

pytestmark = pytest.mark.usefixtures("small_pages")

FORMATS = {
    "JPEG": ".JPG_large",
    "PNG": "",
    "WEBP": ".img",
    "GIF": ".dat",
    "BMP": ".dib",
    "TIFF": ".fax",
    "AVIF": ".x",
}
FORMATS |= {"JPEG2000": ".jp2", "PPM": ".pnm"}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def of_format(image):
    return lambda kind, mode="RGB": saved(image(0, mode=mode), kind)


@pytest.mark.parametrize(
    "head",
    [
        b"MM\0*",
        b"MM\0+",  # a TIFF of more than 4 GiB
        b"II+\0",
        b"GIF87a",
        b"\xff\x4f\xff\x51",  # JPEG 2000 without a container
        b"\0\0\0\x20ftypavis",  # a sequence
        b"P3\n# by hand\n2 2 255",
        b"P4 8 1\n",
        b"P1\t8 1\n",
        b"P2\r\n2 2 255\n",
        b"RIFF\n\n\n\nWEBP",  # of sizes that have such a byte
        b"\n\n\n\nftypavif",
        b"BM\n" + bytes(7) + b"\x36\n\0\0\x28\0\0\0",
        *(b"BM" + bytes(8) + b"\x36\0\0\0" + bytes([size]) + bytes(3) for size in (12, 40, 52, 56, 64, 108, 124)),
    ],
)
def test_rarer_forms_begin_as_images_too(head):
    assert begins_as_image(head.ljust(HEAD, b"x"))
    assert not begins_as_image(b"x" + head.ljust(HEAD, b"x"))


@pytest.mark.parametrize(
    "text", [b"", b"BMW and others, named in a file of text", b"P6 is a model", b"{}", b"%PDF-1.7", b"II."]
)
def test_other_files_do_not(text):
    assert not begins_as_image(text[:HEAD])


def test_a_suffix_tells_an_image_whatever_is_in_it(tmp_path):
    """So that one that is damaged is told, and not left out as no image."""
    images = ("jpg", "jpeg", "jfif", "jpe", "png", "bmp", "gif", "webp", "avif", "tif", "tiff", "ppm", "pgm")
    raw_photos = ("dng", "nef", "nrw", "arw", "cr2", "pef", "srw")
    put(tmp_path, {f"{i}.{suffix}": b"" for i, suffix in enumerate((*images, *map(str.upper, images), "heic"))})
    put(tmp_path, {f"raw.{suffix}": b"II*\0" + bytes(40) for suffix in (*raw_photos, "fax")})
    listed = Images()
    names = listed.find(str(tmp_path))
    assert sorted(name.rpartition(".")[2] for name in names) == sorted([*images, *map(str.upper, images), "fax"])
    assert listed.others == {f".{suffix}": 1 for suffix in (*raw_photos, "heic")}


def test_images_are_read_whatever_their_names(tmp_path, of_format, capsys):
    images = {f"train/a/{kind}{suffix}": of_format(kind) for kind, suffix in FORMATS.items()}
    others = {"1.HEIC": b"\0\0\0\x18ftypheic", "2.heic": b"", "3.txt": b"x", "README": b"x"}
    others["4.NEF"] = of_format("TIFF")
    strange = (".DS_Store", "._1.jpg", ".ipynb_checkpoints/1.jpg", "__MACOSX/1.jpg", "@eaDir/1.jpg")
    put(tmp_path / "in", images | {f"train/a/{name}": data for name, data in others.items()} | {"train/a/fifo|": ""})
    put(tmp_path / "in", {f"train/{place}{name}": of_format("JPEG") for place in ("a/", "") for name in strange})
    dataset = image_folder.read(tmp_path / "in")
    assert found(dataset, "train") == {name: ("a", images[name]) for name in sorted(images)}
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}/in: left out {what}: no images by name or content"
        for what in ("2 files without suffix", "2 files *.heic", "1 file *.nef", "1 file *.txt")
    ]
    manifest = prepare("image-folder", tmp_path / "in", tmp_path / "out", PrepSettings(), processes=1)
    assert manifest.splits["train"].samples == len(FORMATS)
    members = {}
    for number, kind in enumerate(FORMATS):
        members |= {f"{number}.img": of_format(kind), f"{number}.seg.png": of_format("PNG"), f"{number}.cls": "0"}
    put(tmp_path, {"train.tar": members})
    samples = found(webdataset.read(tmp_path / "train.tar"), "train")
    assert [data for _, data in samples.values()] == [of_format(kind) for kind in FORMATS]


@pytest.mark.parametrize(("path", "split"), ROWS["splits"].items())
def test_the_nearest_word_names_the_split(path, split):
    assert split_of(path) == split


def test_a_shard_alone_is_of_its_own_names_split(tmp_path, capsys):
    """Whatever its suffix, and the folders that it is in."""
    put(tmp_path, {"train/0-val.bin": b"", "val/0.bin": b"", "val/1.tar": b""})
    assert find_shards(tmp_path / "train/0-val.bin", ".tar") == {"val": [tmp_path / "train/0-val.bin"]}
    assert capsys.readouterr().err == ""
    assert find_shards(tmp_path / "val/0.bin", ".tar") == {"train": [tmp_path / "val/0.bin"]}
    assert "1 shards name no split, such as 0.bin; read as train" in capsys.readouterr().err
    assert find_shards(tmp_path, ".tar") == {"val": [tmp_path / "val/1.tar"]}


def test_shards_of_one_name_in_two_folders(tmp_path, jpeg, capsys):
    for number, place in enumerate("ab"):
        put(tmp_path / "in", {f"{place}/train-0.TAR": {"x.jpg": jpeg(number), "x.cls": "0"}})
        prepare("webdataset", tmp_path / "in", tmp_path / "out", PrepSettings(), processes=1, extend=number > 0)
    names = [line[9:] for line in (tmp_path / "out/train.sources").read_text().splitlines()]
    assert names == ["a/train-0.TAR/x.jpg", "b/train-0.TAR/x.jpg"]
    prepare("webdataset", tmp_path / "in", tmp_path / "out", PrepSettings(), processes=1)
    assert "already prepared" in capsys.readouterr().err


def test_members_whose_names_are_not_utf8(tmp_path, jpeg):
    members = {"caf\u00e9.jpg": jpeg(0), "caf\u00e9.cls": "0"}
    (tmp_path / "train.tar").write_bytes(tar(members, encoding="latin-1", format=tarfile.USTAR_FORMAT))
    prepare("webdataset", tmp_path / "train.tar", tmp_path / "out", PrepSettings(), processes=1)
    assert (tmp_path / "out/train.sources").read_bytes()[9:] == b"train.tar/caf\xe9.jpg\n"


def test_hard_links_in_shards_are_the_files_they_name(tmp_path, jpeg):
    """As `tar` packs files that are links to one another: the first with its data, the others without."""
    members = {"a.jpg": jpeg(0), "a.cls": "3", "old/.d.jpg": jpeg(0), ".hidden/b.jpg": Link("nothing")}
    members |= {"b.jpg": Link("a.jpg"), "b.cls": Link("a.cls"), "c.jpg": Link("b.jpg"), "c.cls": Link("a.cls")}
    put(tmp_path, {"train.tar": members | {"d.jpg": Link("old/.d.jpg"), "d.cls": Link("a.cls")}})  # of a hidden file
    names = [f"train.tar/{key}.jpg" for key in "abcd"]
    assert found(webdataset.read(tmp_path), "train") == dict.fromkeys(names, ("3", jpeg(0)))


# Lists of tars, which are kept.


def names_of(members):
    return [members.name(number) for number in range(len(members.names))]


def test_a_kept_list_is_of_the_same_file_and_kind(tmp_path):
    """It is made again for a tar of the same size that is newer, and where its inner tars are to be listed too."""
    path = tmp_path / "a.tar"
    put(tmp_path, {"a.tar": {"x/y.tar": {"b.jpg": "123"}, "x/README.md": "", "x/._y.tar": "", "d.tar/z.txt": ""}})
    assert names_of(tar_listing.list_tar(path)) == ["x/y.tar", "x/README.md", "d.tar/z.txt"]
    nested = tar_listing.list_tar(path, nested=True)
    assert names_of(nested) == ["x/y.tar/b.jpg"]
    assert path.read_bytes()[nested.offsets[0] :][: nested.sizes[0]] == b"123"
    status = path.stat()
    # written over, a nanosecond later; in its place by a rename, and written over with more, both of its time
    for name, later, more, renamed in (("c.jpg", 1, 0, False), ("d.jpg", 0, 0, True), ("e.jpg", 0, 512, False)):
        new = tmp_path / "new.tar" if renamed else path
        new.write_bytes(tar({"x/y.tar": {name: "123"}, "x/README.md": ""}).ljust(status.st_size + more, b"\0"))
        new.rename(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + later))
        assert names_of(tar_listing.list_tar(path, nested=True)) == [f"x/y.tar/{name}"]
        status = path.stat()


def names_alone(_):
    content = io.BytesIO()
    np.savez(content, names=np.zeros(1, np.bytes_))
    return content.getvalue()


HALF, NOTHING, ZIP, OTHER = lambda d: d[: len(d) // 2], lambda d: b"", lambda d: b"PK" + d[2:9], lambda d: b"x" * 99


@pytest.mark.parametrize("damage", [HALF, NOTHING, ZIP, OTHER, names_alone])
def test_a_damaged_list_of_a_tar_is_made_again(tmp_path, damage):
    put(tmp_path, {"a.tar": {"x": "abc"}})
    listed = tar_listing.list_tar(tmp_path / "a.tar")
    (kept,) = (tmp_path / "cache/widemix").glob("tar-*.npz")
    kept.write_bytes(damage(kept.read_bytes()))
    again = tar_listing.list_tar(tmp_path / "a.tar")
    assert [column.tolist() for column in again] == [column.tolist() for column in listed]
    assert (tmp_path / "a.tar").read_bytes()[listed.offsets[0] :][: listed.sizes[0]] == b"abc"


def test_a_tar_that_is_the_same_is_listed_once(tmp_path):
    """Another content of the same name, size, times and inode is not seen; so nothing was read."""
    put(tmp_path, {"a.tar": {"x.jpg": "abc"}})
    status = (tmp_path / "a.tar").stat()
    assert names_of(tar_listing.list_tar(tmp_path / "a.tar")) == ["x.jpg"]
    put(tmp_path, {"a.tar": {"y.jpg": "abc"}})
    os.utime(tmp_path / "a.tar", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert names_of(tar_listing.list_tar(tmp_path / "a.tar")) == ["x.jpg"]


# ImageNet's official tars against the class folders that they unpack to.


@pytest.fixture
def folders(tmp_path, jpeg):
    for wnid in WNIDS:
        put(tmp_path / "folders", {f"train/{wnid}/{wnid}_{n}.JPEG": jpeg(n) for n in (10, 2)})
    for number, wnid in OF_VAL.items():
        put(tmp_path / "folders", {f"val/{wnid}/ILSVRC2012_val_{number:08}.JPEG": jpeg(20 + number)})
    return tmp_path / "folders"


@pytest.fixture
def tars(tmp_path, jpeg):
    train = {f"{wnid}.tar": {f"{wnid}_{n}.JPEG": jpeg(n) for n in (10, 2)} for wnid in reversed(WNIDS)}
    val = {f"ILSVRC2012_val_{number:08}.JPEG": jpeg(20 + number) for number in OF_VAL}
    put(tmp_path / "tars", {TRAIN: train, VAL: val, DEVKIT: devkit(OF_VAL.values())})
    return tmp_path / "tars"


def betons(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.beton")}


@pytest.mark.parametrize("wnids", [None, [*WNIDS[::-1], "n09999999"]])
def test_tars_give_the_bytes_of_folders(tmp_path, folders, tars, wnids):
    for origin in (folders, tars):
        if wnids:
            (origin / "wnids.txt").write_text("\n".join(wnids))
        manifest = prepare("imagenet", origin, tmp_path / f"of-{origin.name}", PrepSettings(), processes=1)
        assert manifest.classes == tuple(wnids or WNIDS)
    assert betons(tmp_path / "of-tars") == betons(tmp_path / "of-folders")
    assert len(manifest.exceptions) == 3  # none of the three is the official file


def test_one_tar_alone(tars):
    """Only what it needs is read and checked: train needs no devkit."""
    assert [entry["file"] for entry in imagenet.read(tars).check_files()] == [TRAIN, VAL, DEVKIT]
    for name, split, needed in ((VAL, "train", [TRAIN]), (TRAIN, "val", [VAL, DEVKIT])):
        (tars / name).rename(tars / "away")
        dataset = imagenet.read(tars)
        assert list(dataset.splits) == [split]
        assert [entry["file"] for entry in dataset.check_files()] == needed
        (tars / "away").rename(tars / name)
    (tars / VAL).unlink()
    (tars / DEVKIT).unlink()
    assert [entry["file"] for entry in imagenet.read(tars).check_files()] == [TRAIN]


def test_other_members_of_train_are_no_classes(tars):
    before = {sample.name for sample in imagenet.read(tars).splits["train"]}
    assert len(before) == 6
    more = {"README.txt": "x", "._n01440764.tar": "x", "./more/n01484850.tar": {"./n01484850/a.JPEG": "x"}}
    with tarfile.open(tars / TRAIN, "a") as file:
        for name, content in more.items():
            data, info = tar(content) if isinstance(content, dict) else b"x", tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
        folder = tarfile.TarInfo("old.tar")
        folder.type = tarfile.DIRTYPE
        file.addfile(folder)
    assert {sample.name for sample in imagenet.read(tars).splits["train"]} == before | {"train/n01484850/a.JPEG"}


def test_the_devkit_labels_a_flat_folder_too(tars, folders):
    expected = {(s.name.split("/")[-1], s.label) for s in imagenet.read(folders).splits["val"]}
    for path in sorted(folders.glob("val/*/*.JPEG")):
        path.rename(folders / "val" / path.name)
    for folder in folders.glob("val/n*"):
        folder.rmdir()
    shutil.copy(tars / DEVKIT, folders)
    assert {(s.name.split("/")[-1], s.label) for s in imagenet.read(folders).splits["val"]} == expected


def test_classes_are_those_of_both_tars(tars):
    put(tars, {TRAIN: {f"{WNIDS[1]}.tar": {f"{WNIDS[1]}_1.JPEG": "x"}}})
    dataset = imagenet.read(tars)
    assert dataset.classes == tuple(WNIDS)
    assert [sample.label for sample in dataset.splits["train"]] == [1]
