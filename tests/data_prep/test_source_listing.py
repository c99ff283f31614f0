"""Which files of a folder, and which members of shards, are images, and what is said of the others."""

import gzip
import io
import os
import tarfile

import pytest
from PIL import Image

from tests.data_prep.test_more_sources import found, put, shard
from widemix.data_prep import image_folder, imagenet, parquet, webdataset
from widemix.data_prep.imagenet_val import SOLUTION
from widemix.data_prep.listing import HEAD, Images, begins_as_image, is_hidden_path, walk
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.shards import find_shards, split_of
from widemix.errors import InputError

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
STRANGERS = (".DS_Store", "._1.jpg", ".ipynb_checkpoints/1.jpg", "__MACOSX/1.jpg", "@eaDir/1.jpg")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def of_format(image):
    def make(kind, mode="RGB"):
        buffer = io.BytesIO()
        image(0, mode=mode).save(buffer, kind)
        return buffer.getvalue()

    return make


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, mode) for kind in FORMATS for mode in ("RGB", "L")]
    + [(kind, "1") for kind in ("PNG", "TIFF", "PPM", "BMP")],
)
def test_what_pillow_writes_begins_as_an_image(of_format, kind, mode):
    data = of_format(kind, mode)
    assert Image.open(io.BytesIO(data)).format == kind
    assert begins_as_image(data[:HEAD])


@pytest.mark.parametrize(
    "text", [b"", b"BMW and others, named in a file of text", b"P6 is a model", b"{}", b"%PDF-1.7", b"II."]
)
def test_other_files_do_not(text):
    assert not begins_as_image(text[:HEAD])


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


def test_a_suffix_tells_an_image_whatever_is_in_it(tmp_path):
    """So that one that is damaged is told, and not left out as no image."""
    images = ("jpg", "jpeg", "jfif", "jpe", "png", "bmp", "gif", "webp", "avif", "tif", "tiff", "ppm", "pgm")
    raw_photos = ("dng", "nef", "nrw", "arw", "cr2", "pef", "srw")
    put(tmp_path, {f"{i}.{suffix}": b"" for i, suffix in enumerate((*images, *map(str.upper, images), "heic"))})
    put(tmp_path, {f"raw.{suffix}": b"II*\0" + bytes(40) for suffix in (*raw_photos, "fax")})
    found = Images()
    names = found.find(str(tmp_path))
    assert sorted(name.rpartition(".")[2] for name in names) == sorted([*images, *map(str.upper, images), "fax"])
    assert found.others == {f".{suffix}": 1 for suffix in (*raw_photos, "heic")}


@pytest.mark.parametrize(
    "name", ["#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found", "@eaDir", "__MACOSX", ".a"]
)
def test_folders_of_systems_are_none_of_a_source(tmp_path, name):
    put(tmp_path, {f"a/{name}/1.jpg": b"", "a/2.jpg": b"", f"a/x{name}/3.jpg": b""})
    assert list(walk(str(tmp_path))) != []
    assert sorted(walk(str(tmp_path))) == sorted(["a/2.jpg", f"a/x{name}/3.jpg"])
    assert is_hidden_path(f"./a/{name}/1.jpg")
    assert not is_hidden_path("../a/./x.jpg")


def test_images_are_read_whatever_their_names(tmp_path, of_format, capsys):
    images = {f"train/a/{kind}{suffix}": of_format(kind) for kind, suffix in FORMATS.items()}
    others = {
        "1.HEIC": b"\0\0\0\x18ftypheic",
        "2.heic": b"",
        "3.txt": b"x",
        "README": b"x",
        "4.NEF": of_format("TIFF"),
    }
    put(tmp_path / "in", images | {f"train/a/{name}": data for name, data in others.items()})
    put(tmp_path / "in", {f"train/{place}{name}": of_format("JPEG") for place in ("a/", "") for name in STRANGERS})
    os.mkfifo(tmp_path / "in/train/a/fifo")
    dataset = image_folder.read(tmp_path / "in")
    assert dataset.classes == ("a",)
    assert found(dataset, "train") == {name: ("a", images[name]) for name in sorted(images)}
    lines = [
        f"{tmp_path}/in: left out {what}: no images by name or content"
        for what in ("2 files without suffix", "2 files *.heic", "1 file *.nef", "1 file *.txt")
    ]
    assert capsys.readouterr().err.splitlines() == lines
    manifest = prepare("image-folder", tmp_path / "in", tmp_path / "out", PrepSettings(), processes=1)
    assert manifest.splits["train"].samples == len(FORMATS)


def test_a_class_of_other_files_says_which(tmp_path):
    put(tmp_path, {"train/a/1.heic": b"", "train/a/2.heic": b""})
    with pytest.raises(InputError, match=r"train/a: holds no images \(.*\); left out 2 files \*\.heic"):
        image_folder.read(tmp_path)


def test_kaggles_val_of_other_names(tmp_path, jpeg, capsys):
    put(
        tmp_path,
        {"train/n01440764/1.JPEG": jpeg(0), "val/a": jpeg(1), "val/b.JPG_large": jpeg(2), "val/notes.md": b"x"},
    )
    put(tmp_path, {"val/.cache/a": b"", "val/._a.jpg": b""})  # which make no class folder and no image of it
    (tmp_path / SOLUTION).write_text("ImageId,PredictionString\na,n01440764 1\nb,n01440764 1\n")
    assert list(found(imagenet.read(tmp_path), "val")) == ["val/a", "val/b.JPG_large"]
    assert "val: left out 1 file *.md" in capsys.readouterr().err


def test_shards_of_images_of_other_names(tmp_path, of_format):
    members = {}
    for number, kind in enumerate(FORMATS):
        members |= {f"{number}.img": of_format(kind), f"{number}.seg.png": of_format("PNG"), f"{number}.cls": b"0"}
    shard(tmp_path / "train.tar", members)
    assert [data for _, data in found(webdataset.read(tmp_path), "train").values()] == [
        of_format(kind) for kind in FORMATS
    ]


def test_hidden_shards_and_members_are_none(tmp_path, jpeg):
    sample = {"a.jpg": jpeg(0), "a.cls": b"0"}
    others = {
        f"{place}/b.{part}": data
        for place in (".ipynb_checkpoints", "__MACOSX", "x/.x")
        for part, data in (("jpg", jpeg(1)), ("cls", b"1"))
    }
    shard(tmp_path / "in/train-0.tar", {f"./{name}": data for name, data in sample.items()} | others)
    shard(tmp_path / "in/.ipynb_checkpoints/train-0-checkpoint.tar", sample)
    put(tmp_path / "in", {"._train-0.tar": b"\0\5\x16\7", "__MACOSX/train-0.tar": b".", "._part-0.parquet": b"."})
    assert list(found(webdataset.read(tmp_path / "in"), "train")) == ["train-0.tar/./a.jpg"]
    with pytest.raises(InputError, match=r"holds no shards \(\*\.parquet\)"):
        parquet.read(tmp_path / "in")


def test_shards_of_one_name_in_two_folders(tmp_path, jpeg, capsys):
    for number, place in enumerate("ab"):
        shard(tmp_path / "in" / place / "train-0.TAR", {"x.jpg": jpeg(number), "x.cls": b"0"})
        prepare("webdataset", tmp_path / "in", tmp_path / "out", PrepSettings(), processes=1, extend=number > 0)
    names = [line[9:] for line in (tmp_path / "out/train.sources").read_text().splitlines()]
    assert names == ["a/train-0.TAR/x.jpg", "b/train-0.TAR/x.jpg"]
    prepare("webdataset", tmp_path / "in", tmp_path / "out", PrepSettings(), processes=1)
    assert "already prepared" in capsys.readouterr().err


def test_members_whose_names_are_not_utf8(tmp_path, jpeg):
    with tarfile.open(tmp_path / "train.tar", "w", encoding="latin-1", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in (("caf\u00e9.jpg", jpeg(0)), ("caf\u00e9.cls", b"0")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    prepare("webdataset", tmp_path / "train.tar", tmp_path / "out", PrepSettings(), processes=1)
    assert (tmp_path / "out/train.sources").read_bytes()[9:] == b"train.tar/caf\xe9.jpg\n"


def test_compressed_shards_are_named(tmp_path, jpeg, capsys):
    shard(tmp_path / "train.tar", {"x.jpg": jpeg(0), "x.cls": b"0.0"})
    put(tmp_path, {"val.tar.gz": gzip.compress(b""), "test.tgz": b""})
    assert list(webdataset.read(tmp_path).splits) == ["train"]
    warned = f"{tmp_path}: left out 2 compressed shards such as"
    assert warned in capsys.readouterr().err
    others = [f"{kind}.{kind}" for kind in ("tbz", "TBZ2", "txz", "tar.bz2", "tar.xz", "tar.zst", "tar.lz4")]
    put(tmp_path, dict.fromkeys([*others, "x.zip", "tar.gz.txt"], b""))
    find_shards(tmp_path, ".tar")
    assert f"{tmp_path}: left out 9 compressed shards such as" in capsys.readouterr().err
    for name in others:
        (tmp_path / name).unlink()
    whole = (tmp_path / "train.tar").read_bytes()
    for head in (b"BZh9", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"):
        (tmp_path / "train.tar").write_bytes(head + whole[len(head) :])
        with pytest.raises(InputError, match=r"train\.tar: is compressed; decompress it"):
            webdataset.read(tmp_path)
    (tmp_path / "train.tar").write_bytes(whole)
    (tmp_path / "train.tar").write_bytes(gzip.compress((tmp_path / "train.tar").read_bytes()))
    with pytest.raises(InputError, match=r"train\.tar: is compressed; decompress it"):
        webdataset.read(tmp_path)
    (tmp_path / "train.tar").unlink()
    with pytest.raises(InputError, match=r"holds no shards \(\*\.tar\), but 2 compressed shards such as"):
        webdataset.read(tmp_path)


def write_links(path, links, kind):
    with tarfile.open(path, "a") as tar:
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member)


def test_hard_links_in_shards_are_the_files_that_they_name(tmp_path, jpeg):
    """As `tar` packs files that are links to one another: the first with its data, the others without."""
    path = shard(tmp_path / "train.tar", {"a.jpg": jpeg(0), "a.cls": b"3", "old/.d.jpg": jpeg(0)})
    write_links(path, {"b.jpg": "a.jpg", "b.cls": "a.cls", "c.jpg": "b.jpg", "c.cls": "a.cls"}, tarfile.LNKTYPE)
    write_links(path, {"d.jpg": "old/.d.jpg", "d.cls": "a.cls"}, tarfile.LNKTYPE)  # of a hidden file
    names = [f"train.tar/{key}.jpg" for key in "abcd"]
    assert found(webdataset.read(tmp_path), "train") == dict.fromkeys(names, ("3", jpeg(0)))


def test_sparse_files_in_shards_are_refused(tmp_path, jpeg):
    """Their data are not all in the tar: as GNU tar writes them with --sparse."""
    member = tarfile.TarInfo("a.jpg")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (512, 512)  # where the data lie in the file, and how many
    header[483:495] = b"%011o\0" % 1024
    header[148:156] = b"%06o\0 " % (sum(header[:512]) - sum(header[148:156]) + 8 * 32)
    (tmp_path / "train.tar").write_bytes(bytes(header) + bytes(512) + bytes(1024))
    with pytest.raises(InputError, match=r"train\.tar: a\.jpg is a link or sparse; pack it with"):
        webdataset.read(tmp_path)


@pytest.mark.parametrize(("kind", "target"), [(tarfile.SYMTYPE, "a.jpg"), (tarfile.LNKTYPE, "nothing.jpg")])
def test_other_links_in_shards_are_refused(tmp_path, jpeg, kind, target):
    path = shard(tmp_path / "train.tar", {"a.jpg": jpeg(0), "a.cls": b"3"})
    write_links(path, {".hidden/b.jpg": target}, kind)
    assert len(webdataset.read(tmp_path).splits["train"]) == 1
    write_links(path, {"b.jpg": target}, kind)
    with pytest.raises(InputError, match=r"train\.tar: b\.jpg is a link or sparse; pack it with"):
        webdataset.read(tmp_path)


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("Valid/Train_0.tar", "train"),
        ("VALID/0.tar", "val"),
        ("train-test.tar", "train"),
        ("test-bench/train-000.tar", "train"),
        ("test/val/000.tar", "val"),
        ("train/000.tar", "train"),
        ("validation/x/000.tar", "val"),
        ("imagenet1k-validation-00.tar", "val"),
        ("data/latest/000.tar", None),
        ("val2/000.tar", "val"),
        ("latest/train00.tar", "train"),
    ],
)
def test_the_nearest_word_names_the_split(path, split):
    assert split_of(path) == split


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"a.jpg": b"", "./a.jpg": b""}, r"a has a\.jpg and then \./a\.jpg again"),
        ({"x/a.cls": b"", "x//a.CLS": b""}, r"x/a has x/a\.cls and then x//a\.CLS again"),
        ({"a.cls": b"0", "a.json": b'{"label": 1}'}, r"a\.cls has the label 0, and a\.json 1; remove one"),
        ({"a.json": b'{"label": 1, "label": 2}'}, r"a\.json holds no label .*: it has the key 'label' twice"),
        ({"a.cls": b"0", "a.json": b"[]"}, r"a\.json holds no label"),
    ],
)
def test_samples_with_two_images_or_labels_are_refused(tmp_path, jpeg, members, words):
    path = shard(tmp_path / "train.tar", {"b.jpg": jpeg(0), "b.cls": b"0", "b.json": b'{"width": 3}'})
    assert len(webdataset.read(tmp_path).splits["train"]) == 1
    shard(path, {"a.jpg": jpeg(0)} | members)
    with pytest.raises(InputError, match=rf"train\.tar: {words}"):
        webdataset.read(tmp_path)


def test_a_shard_that_is_there_twice_by_a_link_is_refused(tmp_path, jpeg):
    shard(tmp_path / "train/0.tar", {"x.jpg": jpeg(0), "x.cls": b"0"})
    (tmp_path / "val").symlink_to("train")
    with pytest.raises(InputError, match=r"val/0\.tar: is the same file as .*train/0\.tar, by a link"):
        webdataset.read(tmp_path)


def test_shards_without_a_split_are_told(tmp_path, capsys):
    put(tmp_path, {"testing/0.tar": b"", "eval-0.tar": b""})
    assert list(find_shards(tmp_path, ".tar")) == ["train"]
    assert "2 shards name no split, such as eval-0.tar; read as train" in capsys.readouterr().err


def test_a_shard_alone_is_of_the_split_that_its_own_name_tells(tmp_path, capsys):
    """Whatever its suffix, and the folders that it is in."""
    put(tmp_path, {"train/0-val.bin": b"", "val/0.bin": b"", "val/1.tar": b""})
    assert find_shards(tmp_path / "train/0-val.bin", ".tar") == {"val": [tmp_path / "train/0-val.bin"]}
    assert capsys.readouterr().err == ""
    assert find_shards(tmp_path / "val/0.bin", ".tar") == {"train": [tmp_path / "val/0.bin"]}
    assert "1 shards name no split, such as 0.bin; read as train" in capsys.readouterr().err
    assert find_shards(tmp_path, ".tar") == {"val": [tmp_path / "val/1.tar"]}


def test_splits_are_listed_in_their_usual_order_and_shards_by_name(tmp_path):
    put(tmp_path, {f"{name}.tar": b"" for name in ("test-1", "val-0", "train-10", "train-2", "test-0", "b/train")})
    shards = find_shards(tmp_path, ".tar")
    assert list(shards) == ["train", "val", "test"]
    names = [[str(path.relative_to(tmp_path)) for path in paths] for paths in shards.values()]
    assert names == [["b/train.tar", "train-10.tar", "train-2.tar"], ["val-0.tar"], ["test-0.tar", "test-1.tar"]]


def test_doubtful_splits_are_told(tmp_path, capsys):
    put(tmp_path, {"test-bench/train-000.tar": b"", "test-bench/dev-000.tar": b"", "val/000.tar": b"", "0.tar": b""})
    shards = find_shards(tmp_path, ".tar")
    assert {split: len(paths) for split, paths in shards.items()} == {"train": 2, "val": 1, "test": 1}
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {tmp_path}: the path of test-bench/train-000.tar names test and train; it is read as train",
        f"warning: {tmp_path}: 1 shards name no split, such as 0.tar; read as train",
    ]
    put(tmp_path / "more", {"val/validation-0.tar": b""})  # by two words for one
    assert list(find_shards(tmp_path / "more", ".tar")) == ["val"]
    assert capsys.readouterr().err == ""


def test_shards_may_be_links_and_folders_of_links(tmp_path, jpeg):
    shard(tmp_path / "far/0.tar", {"x.jpg": jpeg(0), "x.cls": b"0"})
    (tmp_path / "in").mkdir()
    (tmp_path / "in/train").symlink_to(tmp_path / "far")
    assert list(found(webdataset.read(tmp_path / "in"), "train")) == ["train/0.tar/x.jpg"]
    (tmp_path / "in/1.tar").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"1\.tar: cannot be read \(No such file"):
        webdataset.read(tmp_path / "in")
    (tmp_path / "in/1.tar").unlink()
    os.mkfifo(tmp_path / "in/1.tar")
    with pytest.raises(InputError, match=r"1\.tar: is not a regular file"):
        webdataset.read(tmp_path / "in")


@pytest.mark.parametrize("names", [["train"], ["Test"], ["train", "valid"]])
@pytest.mark.parametrize("stray", [False, True])
def test_splits_within_the_folder_of_one_are_refused(tmp_path, jpeg, names, stray):
    put(tmp_path, {f"val/{name}/{label}/1.jpg": jpeg(0) for name in names for label in "ab"})
    put(tmp_path, {"train/a/1.jpg": jpeg(0), "train/b/1.jpg": jpeg(0)})
    if stray:
        put(tmp_path, {f"val/{names[0]}/1.jpg": jpeg(0)})
    words = f"val/{names[0]}: is named as a split, and holds folders; move the folders of classes up to"
    with pytest.raises(InputError, match=f"{words} {tmp_path}/val"):
        image_folder.read(tmp_path)


def test_a_class_may_be_called_train(tmp_path, jpeg, capsys):
    put(tmp_path, {"train/train/1.jpg": jpeg(0), "train/bus/old/1.jpg": jpeg(0), "val/train/1.jpg": jpeg(0)})
    put(tmp_path, {"val/bus/a/1.jpg": jpeg(0), "val/car/b/1.jpg": jpeg(0), ".cache/a/1.jpg": b"", "@eaDir/x": b""})
    (tmp_path / "val/train/1.jpg").rename(tmp_path / "val/car/1.png")  # among folders
    (tmp_path / "val/train").rmdir()
    assert image_folder.read(tmp_path).classes == ("bus", "car", "train")
    (tmp_path / "val/car/1.png").unlink()  # two classes of folders alone
    assert image_folder.read(tmp_path).classes == ("bus", "car", "train")
    assert capsys.readouterr().err == ""


def test_images_above_and_folders_beside(tmp_path, jpeg, capsys):
    put(
        tmp_path,
        {"train/images/a/1.jpg": jpeg(0), "train/images/b/1.jpg": jpeg(0), "train/2.jpg": b"", "dev/a/1.jpg": b""},
    )
    for name in ("dev1", "dev2", "dev3", "dev4", "dev5"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes").touch()
    (tmp_path / "train/.3.jpg").touch()
    assert image_folder.read(tmp_path).classes == ("images",)
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}: left out the folder dev, dev1, dev2, dev3, dev4: "
        "a split is named train, val, validation, valid, test",
        f"{tmp_path}/train: left out 1 images that are in no class folder",
        f"warning: {tmp_path}/train/images: is the only class; if its folders (a, b, ...) are, move them up by one",
    ]
