"""Kaggle's ImageNet, WebDataset shards and tables of paths, sample by sample against what was put into them."""

import io
import json
import os
import tarfile

import numpy as np
import pytest

from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.data_prep import csv_list, image_folder, imagenet, tar_listing, webdataset
from widemix.data_prep.imagenet_val import SOLUTION
from widemix.data_prep.sources import SOURCES
from widemix.errors import InputError

WNIDS = ("n01440764", "n01443537")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def found(dataset, split):
    return {sample.name: (dataset.classes[sample.label], sample.image.read()) for sample in dataset.splits[split]}


def put(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def shard(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_kaggles_imagenet(tmp_path, jpeg):
    inner = "ILSVRC/Data/CLS-LOC"
    train = {f"{inner}/train/{wnid}/{wnid}_{i}.JPEG": jpeg(i) for i, wnid in enumerate(WNIDS)}
    val = {f"{inner}/val/ILSVRC2012_val_{i:08}.JPEG": jpeg(10 + i) for i in (1, 2, 3)}
    put(tmp_path, {**train, **val, f"{inner}/test/ILSVRC2012_test_00000001.JPEG": jpeg(20)})
    lines = [f"ILSVRC2012_val_{i:08},{WNIDS[i % 2]} 1 2 3 4 {WNIDS[i % 2]} 5 6 7 8" for i in (1, 2, 3)]
    (tmp_path / SOLUTION).write_text("\n".join(["ImageId,PredictionString", *lines]))
    dataset = imagenet.read(tmp_path)
    assert list(dataset.splits) == ["train", "val"]
    assert found(dataset, "train") == {name: (name.split("/")[-2], data) for name, data in train.items()}
    assert found(dataset, "val") == {name: (WNIDS[int(name[-6]) % 2], data) for name, data in val.items()}
    assert [sample.label for sample in dataset.splits["val"]] == [0, 1, 1]
    more = tmp_path / inner / "val/ILSVRC2012_val_00000001.old.JPEG"
    more.write_bytes(jpeg(11))
    with pytest.raises(InputError, match=r"val_00000001\.old\.JPEG: has no label in .*LOC_val_solution\.csv"):
        imagenet.read(tmp_path)
    more.unlink()
    head, row = "ImageId,PredictionString\n", "ILSVRC2012_val_00000001"
    for wrong in (f"ImageId\n{row}", f"{head}{row},", f"{head}{row}", f"{head}{row},\xe4 1"):
        (tmp_path / SOLUTION).write_bytes(wrong.encode("latin-1"))
        with pytest.raises(InputError, match=r"LOC_val_solution\.csv: is not Kaggle's list of validation labels"):
            imagenet.read(tmp_path)
    (tmp_path / SOLUTION).unlink()
    with pytest.raises(InputError, match=r"neither LOC_val_solution\.csv nor"):
        imagenet.read(tmp_path)


@pytest.mark.parametrize("name", ["validation", "valid"])
def test_other_names_of_val_and_suffixes(tmp_path, jpeg, name):
    files = {f"train/a/{i}.{suffix}": jpeg(i) for i, suffix in enumerate(("jfif", "jpe", "avif", "JPG"))}
    put(tmp_path, {**files, f"{name}/a/1.jpg": jpeg(9)})
    dataset = image_folder.read(tmp_path)
    assert found(dataset, "train") == {name: ("a", data) for name, data in files.items()}
    assert list(found(dataset, "val")) == [f"{name}/a/1.jpg"]
    (tmp_path / "val" / "a").mkdir(parents=True)
    with pytest.raises(InputError, match=f"holds both val and {name}"):
        image_folder.read(tmp_path)


def test_webdataset(tmp_path, jpeg, monkeypatch):
    """Labels as text and as JSON, several shards; listed once, and again when a shard has changed."""
    first = {"a/x.jpg": jpeg(0), "a/x.cls": b"2\n", "a/y.cls": b"0", "a/y.seg.png": b"", "a/y.jpeg": jpeg(1)}
    second = {"z.json": json.dumps({"label": 1, "filename": "z"}).encode(), "z.jpg": jpeg(2)}
    shard(tmp_path / "wds" / "imagenet1k-train-0000.tar", first)
    shard(tmp_path / "wds" / "imagenet1k-train-0001.tar", second)
    val = shard(tmp_path / "wds" / "validation" / "00.tar", {"v.cls": b"1", "v.jpg": jpeg(3)})
    dataset = webdataset.read(tmp_path / "wds")
    assert dataset.classes == ("0", "1", "2")
    assert found(dataset, "train") == {
        "imagenet1k-train-0000.tar/a/x.jpg": ("2", first["a/x.jpg"]),
        "imagenet1k-train-0000.tar/a/y.jpeg": ("0", first["a/y.jpeg"]),
        "imagenet1k-train-0001.tar/z.jpg": ("1", second["z.jpg"]),
    }
    with monkeypatch.context() as patch:
        patch.setattr(tar_listing, "_flat", None)  # nothing is listed again
        (tmp_path / "wds" / "classes.txt").write_text("cat\ndog\nowl\n")
        assert found(webdataset.read(tmp_path / "wds"), "val") == {"validation/00.tar/v.jpg": ("dog", jpeg(3))}
    shard(val, {"v.cls": b"0", "v.jpg": jpeg(4), "w.cls": b"1", "w.jpg": jpeg(5)})
    assert len(webdataset.read(tmp_path / "wds").splits["val"]) == 2
    (tmp_path / "wds" / "classes.txt").write_text("cat\ndog\nowl\nyak\n", "utf-8-sig")  # no yak here
    assert webdataset.read(tmp_path / "wds").classes == ("cat", "dog", "owl", "yak")
    shard(val, {"v.cls": b"4", "v.jpg": jpeg(4)})  # no less than those of train
    (tmp_path / "wds" / "classes.txt").unlink()
    assert webdataset.read(tmp_path / "wds").classes == ("0", "1", "2", "3", "4")
    shard(val, {"v.cls": b"0", "v.jpg": jpeg(4), "w.cls": b"1", "w.jpg": jpeg(5)})
    (tmp_path / "wds" / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(InputError, match=r"classes\.txt: names 2 classes, and the shards have labels up to 2"):
        webdataset.read(tmp_path / "wds")


def test_samples_of_shards_have_the_order_of_their_first_members(tmp_path, jpeg):
    """And not that of their names; those of the next shard follow."""
    shard(tmp_path / "train-1.tar", {"b.jpg": jpeg(0), "b.cls": b"1"})
    shard(
        tmp_path / "train-0.tar",
        {
            "z.cls": b"0",
            "c/m.jpg": jpeg(1),
            "z.jpg": jpeg(2),
            "a.json": b'{"label": 2.0}',
            "c/m.cls": b"3",
            "a.png": b".",
        },
    )
    samples = webdataset.read(tmp_path).splits["train"]
    names = ["train-0.tar/z.jpg", "train-0.tar/c/m.jpg", "train-0.tar/a.png", "train-1.tar/b.jpg"]
    assert [(sample.name, sample.label) for sample in samples] == list(zip(names, (0, 3, 2, 1), strict=True))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"a.jpg": b"."}, "a has neither a.cls nor a.json"),
        ({"a.cls": b"1"}, "a has 0 images"),
        ({"a.cls": b"1", "a.jpg": b".", "a.png": b"."}, "a has 2 images"),
        ({"a.cls": b"-1", "a.jpg": b"."}, "a.cls: label -1 is negative"),
        ({"a.cls": b"1.5", "a.jpg": b"."}, "a.cls: label 1.5 is not a whole number"),
        ({"a.cls": b"NaN", "a.jpg": b"."}, "a.cls: label nan is not a whole number"),
        ({"a.cls": b"true", "a.jpg": b"."}, "a.cls holds no label such as 3"),
        ({"a.json": b'{"label": "3"}', "a.jpg": b"."}, "a.json holds no label"),
        ({"a.json": b'{"width": 3}', "a.jpg": b"."}, "a.json holds no label"),
        ({"a.cls": b"900000000", "a.jpg": b"."}, "a.cls: label 900000000 is above 999999"),
        ({"a.json": b'{"label": 1000000}', "a.jpg": b"."}, "a.json: label 1000000 is above 999999"),
        ({"a.JPG": b".", "a.cls": b"1", "a.jpg": b"."}, "a has a.JPG and then a.jpg again; remove one"),
        ({"22.00.jpg": b".", "22.00.cls": b"0"}, "22 has 0 images.* a key ends at the first dot of a file's name"),
        ({"22.jpg": b".", "22.00.cls": b"0"}, "22 has neither 22.cls nor 22.json; a key ends at the first dot"),
        ({"a.json": b"[" * 10**5, "a.jpg": b"."}, 'a.json holds no label such as {"label": 3}'),
        ({}, "holds no samples"),
    ],
)
def test_shards_without_labels_or_images_are_refused(tmp_path, members, words):
    with pytest.raises(InputError, match=words):
        webdataset.read(shard(tmp_path / "train.tar", members))


def test_shards_that_are_cut_short_are_refused(tmp_path, jpeg):
    path = shard(tmp_path / "train.tar", {"a.jpg": jpeg(0), "a.cls": b"0"})
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"train\.tar: is cut short"):
        webdataset.read(tmp_path)
    for size, words in ((0, "is cut short"), (1023, "is cut short"), (1024, "holds no samples")):  # two blocks end it
        path.write_bytes(bytes(size))
        with pytest.raises(InputError, match=rf"train\.tar: {words}"):
            webdataset.read(tmp_path)


def test_a_damaged_header_of_a_sparse_file_is_refused(tmp_path):
    """tarfile reads the map of its holes as numbers."""
    header = tarfile.TarInfo("a.jpg")
    header.type, map_of_holes = tarfile.XHDTYPE, b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    header.size = len(map_of_holes)
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        tar.addfile(header, io.BytesIO(map_of_holes))
        member = tarfile.TarInfo("a.jpg")
        member.size = 512
        tar.addfile(member, io.BytesIO(b"\xff" * 512))
    with pytest.raises(InputError, match=r"train\.tar: cannot be read as an uncompressed tar .not enough values"):
        webdataset.read(tmp_path)


def test_an_error_is_one_line_whatever_the_file_is_called(tmp_path, capsys):
    (tmp_path / "list.csv").write_text('path,label\n"a\nb.jpg",0\n')
    words = ["prep", "csv", "--from", str(tmp_path / "list.csv"), "--to", str(tmp_path / "out")]
    assert run_command(make_parser("prep"), argv=words) == 2
    assert f"error: {tmp_path}/a\\nb.jpg: cannot be read (No such file or directory)\n" in capsys.readouterr().err


def test_tables_of_paths(tmp_path, jpeg):
    put(tmp_path / "images", {f"{i}.jpg": jpeg(i) for i in range(4)})
    rows = [
        "path,label,split",
        "images/2.jpg,owl,train",
        f"{tmp_path}/images/0.jpg,cat,train",
        "images/1.jpg,cat,val",
    ]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    dataset = csv_list.read(tmp_path / "list.csv")
    assert dataset.classes == ("cat", "owl")
    assert found(dataset, "train") == {"images/2.jpg": ("owl", jpeg(2)), "images/0.jpg": ("cat", jpeg(0))}
    assert found(dataset, "val") == {"images/1.jpg": ("cat", jpeg(1))}
    (tmp_path / "link").symlink_to("images")
    (tmp_path / "images" / "again.png").symlink_to("2.jpg")
    (tmp_path / "list.csv").write_text(f"path,label\n{tmp_path}/link/../images/again.png,cat\n")
    assert found(csv_list.read(tmp_path / "list.csv"), "train") == {"images/again.png": ("cat", jpeg(2))}
    (tmp_path / "list.csv").write_text("label,path\n2,images/3.jpg\n0,images/1.jpg\n")
    assert [sample.label for sample in csv_list.read(tmp_path / "list.csv").splits["train"]] == [2, 0]
    assert [sample.label for sample in csv_list.read(tmp_path).splits["train"]] == [2, 0]  # the only table in it
    (tmp_path / "b.jsonl").touch()
    for place, words in ((tmp_path, "b.jsonl and 1 more"), (tmp_path / "images", "no .csv or .jsonl")):
        with pytest.raises(InputError, match=rf"{place}: is a folder that holds {words}; name the table itself"):
            csv_list.read(place)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no column 'path'"),
        ("path,class\na,b\n", "no column 'label' or 'labels'; name columns of numbers with --targets: class"),
        ("path,label,labels\na,b,c\n", "has both the column label"),
        ("path,label,label\na,b,c\n", "names a column twice"),
        ("path,label\n", "lists no images"),
        ("path,label\n,b\n", "line 2: path '' is not that of an image"),
        ("path;label\na;1\n", "list.csv: its columns are separated by ';'; separate them by commas"),
        ("path\tlabel\na\t1\n", r"list.csv: its columns are separated by '\\t'"),
        ("path|label\na|1\n", r"list.csv: its columns are separated by '\|'"),
        ("path,label\na,b,c\n", "line 2 has 3 columns, and the first line has 2"),
        ("path,label\na\n", "line 2 has 1 columns, and the first line has 2"),
        ("path,label,split\na,b,../x\n", "is no name such as train"),
        (f"path,label,split\na,b,{'x' * 101}\n", "line 2: split 'xxx.*... is no name such as train"),
        ("path,label,split\na,b,val\na,b,Val\n", "line 3: split 'Val' differs from 'val' in case alone"),
        ('path,label\n"a,b\n', "cannot be read as a .csv"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, text, words):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(InputError, match=words):
        csv_list.read(tmp_path / "list.csv")


def test_they_are_sources():
    assert {"webdataset", "csv"} <= SOURCES.keys()


def test_a_kept_list_is_of_the_same_file_and_kind_only(tmp_path):
    """It is made again for a tar of the same size that is newer, and where its inner tars are to be listed too."""
    inner = shard(tmp_path / "inner.tar", {"b.jpg": b"123"}).read_bytes()
    path = shard(tmp_path / "a.tar", {"x/y.tar": inner, "x/README.md": b"", "x/._y.tar": b"", "d.tar/z.txt": b""})
    flat = tar_listing.list_tar(path)
    assert [flat.name(number) for number in range(len(flat.names))] == ["x/y.tar", "x/README.md", "d.tar/z.txt"]
    nested = tar_listing.list_tar(path, nested=True)
    assert nested.name(0) == "x/y.tar/b.jpg"
    assert len(nested.names) == 1
    assert path.read_bytes()[nested.offsets[0] :][: nested.sizes[0]] == b"123"
    status = path.stat()
    shard(path, {"x/y.tar": shard(tmp_path / "inner.tar", {"c.jpg": b"123"}).read_bytes(), "x/README.md": b""})
    path.write_bytes(path.read_bytes().ljust(status.st_size, b"\0"))
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert tar_listing.list_tar(path, nested=True).name(0) == "x/y.tar/c.jpg"
    status = path.stat()
    for name, more in (("d.jpg", 0), ("e.jpg", 512)):  # in its place by a rename, and written over; of its time
        inner = shard(tmp_path / "inner.tar", {name: b"123"}).read_bytes()
        data = shard(tmp_path / "new.tar", {"x/y.tar": inner, "x/README.md": b""}).read_bytes()
        (path if more else tmp_path / "new.tar").write_bytes(data.ljust(status.st_size + more, b"\0"))
        if not more:
            (tmp_path / "new.tar").rename(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert tar_listing.list_tar(path, nested=True).name(0) == f"x/y.tar/{name}"


def names_alone(_):
    content = io.BytesIO()
    np.savez(content, names=np.zeros(1, np.bytes_))
    return content.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"PK" + data[2:9],
        lambda data: b"x" * 99,
        names_alone,
    ],
)
def test_a_kept_list_of_a_tar_that_is_damaged_is_made_again(tmp_path, damage):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("x")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"abc"))
    listed = tar_listing.list_tar(path)
    (kept,) = (tmp_path / "cache/widemix").glob("tar-*.npz")
    kept.write_bytes(damage(kept.read_bytes()))
    assert [column.tolist() for column in tar_listing.list_tar(path)] == [column.tolist() for column in listed]
    assert path.read_bytes()[listed.offsets[0] :][: listed.sizes[0]] == b"abc"
