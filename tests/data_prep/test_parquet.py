"""Hugging Face's parquet files, written by pyarrow in their layout: row by row against what was put into them."""

import io
import json
import os
import random
import sys

import numpy as np
import pytest
from PIL import Image

from widemix.data_prep import parquet
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.formats.sources import read_sources

pytestmark = pytest.mark.usefixtures("small_pages")

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'widemix[parquet]'")
pq = pytest.importorskip("pyarrow.parquet")

IMAGE = [{"bytes": b"."}]
CLASSES = ["tench, Tinca tinca", "goldfish", "great white shark"]


def write(path, images, labels, group=3, names=CLASSES, column="image", **options):
    """A file as the library `datasets` writes it, with row groups of `group` rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": data, "path": f"{i}.JPEG"} for i, data in enumerate(images)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = {column: {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    table = pa.table({column: pa.array(rows, kind), "label": pa.array(labels, pa.int64())})
    if names:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=group, **options)
    return path


def found(samples):
    return [(sample.label, sample.image.read()) for sample in samples]


@pytest.fixture
def hub(tmp_path, jpeg):
    """Two files of train, of several row groups, one of validation and one of test; and what they hold."""
    rows = {"train": [(i % 3, jpeg(i)) for i in range(19)], "val": [(1, jpeg(50))], "test": [(-1, jpeg(60))] * 2}
    data = tmp_path / "hub" / "data"
    for name, part in (
        ("train-00000-of-00002-ab12", rows["train"][:11]),
        ("train-00001-of-00002-cd34", rows["train"][11:]),
        ("validation-00000-of-00001-ef56", rows["val"]),
        ("test-00000-of-00001-0a7b", rows["test"]),
    ):
        labels, images = zip(*part, strict=True)
        write(data / f"{name}.parquet", images, labels, compression="snappy")
    return data.parent, rows


def test_every_row_in_any_order(hub, monkeypatch):
    """Several batches to a row group; forwards, backwards, and at random."""
    monkeypatch.setattr(parquet, "BATCH", 2)
    origin, rows = hub
    dataset = parquet.read(origin)
    assert dataset.classes == tuple(CLASSES)
    assert list(dataset.splits) == ["train", "val", "test"]
    for split, samples in dataset.splits.items():
        assert found(samples) == rows[split]
        assert found(reversed(samples)) == rows[split][::-1]
    train = dataset.splits["train"]
    chosen = [random.Random(0).randrange(19) for _ in range(60)]
    assert found(train[i] for i in chosen) == [rows["train"][i] for i in chosen]
    assert train[0].name == "data/train-00000-of-00002-ab12.parquet/0"
    assert train[18].name == "data/train-00001-of-00002-cd34.parquet/7"
    assert len({sample.name for sample in train}) == 19


def test_bytes_are_kept(hub, tmp_path):
    origin, rows = hub
    settings = PrepSettings(restart_markers=False)
    manifest = prepare("parquet", origin, tmp_path / "out", settings, processes=1)
    assert {name: split.samples for name, split in manifest.splits.items()} == {"train": 19, "val": 1, "test": 2}
    beton = open_beton(tmp_path / "out" / "train.beton")
    stored = [beton.bytes[beton.offset[i] : beton.stop[i]].tobytes() for i in range(19)]
    assert list(zip(beton.label.tolist(), stored, strict=True)) == rows["train"]
    assert list(read_sources(beton.path))[-1] == "data/train-00001-of-00002-cd34.parquet/7"


def test_several_processes_give_the_same(tmp_path, image, monkeypatch):
    """Workers read the files themselves."""
    monkeypatch.setattr("widemix.data_prep.encode.MIN_SECONDS_PER_PROCESS", 1e-6)
    images = []
    for seed in range(80):
        buffer = io.BytesIO()
        image(seed).save(buffer, "PNG")
        images.append(buffer.getvalue())
    write(tmp_path / "hub" / "0000.parquet", images, [i % 3 for i in range(80)], group=50)
    betons = []
    for processes in (1, 2):
        out = tmp_path / f"out{processes}"
        prepare("parquet", tmp_path / "hub", out, PrepSettings(), processes=processes)
        betons.append((out / "train.beton").read_bytes())
    assert betons[0] == betons[1]


def test_other_names_and_no_metadata(tmp_path, jpeg):
    path = write(tmp_path / "a.parquet", [jpeg(0), jpeg(1)], [4, 0], names=[], column="img")
    dataset = parquet.read(path)
    assert dataset.classes == ("0", "1", "2", "3", "4")
    assert found(dataset.splits["train"]) == [(4, jpeg(0)), (0, jpeg(1))]
    assert Image.open(io.BytesIO(dataset.splits["train"][0].image.read())).size == (40, 30)
    write(tmp_path / "both/train-0.parquet", [b"x"], [1], names=[])
    write(tmp_path / "both/train-1.parquet", [b"y"], [0], names=[], column="img")
    assert found(parquet.read(tmp_path / "both").splits["train"]) == [(1, b"x"), (0, b"y")]


@pytest.mark.parametrize(
    "metadata",
    [
        "not JSON",
        '{"info": null}',
        '{"info": {"features": {"label": {"names": null}}}}',
        '{"info": {"features": {"label": {"dtype": "int64"}}}}',
        '{"info": {"features": {}}}',
    ],
)
def test_metadata_without_names_name_no_classes(tmp_path, metadata):
    path = write(tmp_path / "a.parquet", [b"."], [1], names=[])
    pq.write_table(pq.read_table(path).replace_schema_metadata({"huggingface": metadata}), path)
    assert parquet.read(path).classes == ("0", "1")


def test_files_without_rows_and_images_without_bytes(tmp_path):
    """The greatest label may be in any file, and an image of no bytes is one, to be left out when it is decoded."""
    write(tmp_path / "train-0.parquet", [], [], names=[])
    write(tmp_path / "train-1.parquet", [b"x", b""], [0, 1], names=[])
    write(tmp_path / "val.parquet", [b"y"], [4], names=[])
    dataset = parquet.read(tmp_path)
    assert dataset.classes == tuple("01234")
    assert {split: found(samples) for split, samples in dataset.splits.items()} == {
        "train": [(0, b"x"), (1, b"")],
        "val": [(4, b"y")],
    }
    assert dataset.splits["train"][1].name == "train-1.parquet/1"


def test_a_file_that_is_replaced_is_opened_again(tmp_path, jpeg):
    """Its images are then other ones, and a preparation finds that they have changed."""
    path = write(tmp_path / "train.parquet", [jpeg(0), jpeg(1)], [0, 1])
    samples = parquet.read(path).splits["train"]
    assert samples[0].image.read_with_status() == (jpeg(0), samples[0].status())
    write(path, [jpeg(2), jpeg(3), jpeg(4)], [0, 1, 2])
    assert [samples[i].content() for i in (0, 1)] == [jpeg(2), jpeg(3)]
    write(path, [jpeg(5)], [0])
    with pytest.raises(InputError, match=r"train\.parquet: has fewer rows than when it was listed"):
        samples[1].content()
    write(path, [b"ab"], [0])
    size, before = path.stat().st_size, samples[0].content()
    write(path, [b"cd"], [0])
    os.utime(path, ns=(0, 1))
    assert (before, samples[0].content(), path.stat().st_size) == (b"ab", b"cd", size)


def test_names_of_classes_may_be_in_any_file_and_of_any_column(tmp_path):
    rows = {"image": pa.array(IMAGE * 2, pa.struct([("bytes", pa.binary())])), "fine": [0, 2]}
    table = pa.table(rows)
    features = {"coarse": {"names": ["x"]}, "fine": {"names": ["a", "b", "c", "d"]}}
    named = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    for number, part in enumerate((table, named, table)):
        pq.write_table(part, tmp_path / f"train-{number}.parquet")
    dataset = parquet.read(tmp_path)
    assert dataset.classes == ("a", "b", "c", "d")
    assert dataset.splits["train"].labels.tolist() == [0, 2] * 3
    (tmp_path / "train-1.parquet").unlink()
    assert parquet.read(tmp_path).classes == ("0", "1", "2")
    pq.write_table(named, tmp_path / "val.parquet")
    pq.write_table(table.set_column(1, "fine", [[3, 4]]), tmp_path / "train-2.parquet")
    with pytest.raises(InputError, match=r"train-2\.parquet: has labels outside of its 4 classes"):
        parquet.read(tmp_path)


def test_rows_and_images_have_sizes_that_memory_holds(tmp_path, monkeypatch):
    write(tmp_path / "train.parquet", [b"x", bytes(3000)], [0, 1], names=[])
    monkeypatch.setattr(parquet, "MOST", 1000)
    small, large = parquet.read(tmp_path).splits["train"]
    assert small.image.read() == b"x"
    with pytest.raises(InputError, match=r"row 1 of row group 0 has an image of more than 1,000 bytes; remove it"):
        large.image.read()
    monkeypatch.setattr(parquet, "MOST_ROWS", 1)
    with pytest.raises(InputError, match=r"train\.parquet: has 2 rows; a file has at most 1"):
        parquet.read(tmp_path)


def test_a_row_without_bytes_is_an_error(tmp_path, jpeg):
    write(tmp_path / "hub" / "train.parquet", [jpeg(0), None], [0, 1])
    with pytest.raises(InputError, match=r"train\.parquet: row 1 of row group 0 has no image\.bytes"):
        prepare("parquet", tmp_path / "hub", tmp_path / "out", PrepSettings(), processes=1)


def test_a_page_that_was_changed_is_an_error(tmp_path, jpeg):
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True, "write_statistics": False}
    path = write(tmp_path / "train.parquet", [jpeg(0), jpeg(1)], [0, 1], **options)
    samples = parquet.read(path).splits["train"]
    data = bytearray(path.read_bytes())
    data[data.index(jpeg(1)) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"train\.parquet: cannot be read as parquet \(.*[Cc][Rr][Cc]"):
        found(samples)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"label": [0]}, "no column 'image' of the type {bytes, path}; its columns are label"),
        ({"image": [{"bytes": b"."}]}, "no column 'label' of integers; its columns are image"),
        ({"image": [{"bytes": "text"}], "label": [0]}, "no column 'image' of the type {bytes, path}"),
        ({"image": [{"bytes": 5}], "label": [0]}, "no column 'image' of the type {bytes, path}"),
        (
            {"image": [{"bytes": b"."}], "label": ["cat"]},
            "no column 'label' of integers; its columns are image, label; number its texts, as `class_encode_column",
        ),
        (
            {"image": [{"bytes": b"."}], "a": [0], "b": [1]},
            "no column 'label' of integers; its columns are image, a, b",
        ),
        (
            {"image": [{"bytes": b"."}], "label": ["cat"], "id": [7]},
            "no column 'label' of integers; its columns are image, label, id; number its texts",
        ),
        (
            {"image": [5], "mask": [{"bytes": b"."}], "label": [0]},
            "no column 'image' of the type {bytes, path}; its columns are image, mask, label",
        ),
        (
            {"image": [{"bytes": b"."}], "label": [1, None]},
            "row 1 has no label; remove such rows, or give all the label -1",
        ),
        ({"image": [{"bytes": b"."}], "label": [-2]}, "a.parquet: row 0: label -2 is negative"),
        ({"image": [{"bytes": b"."}], "label": [4, -1]}, "a.parquet: row 1: label -1 is negative"),
        (
            {"image": [{"bytes": b"."}], "label": [0, 900_000_000]},
            "a.parquet: row 1: label 900000000 is above 999999",
        ),
        ({"image": [{"bytes": b"."}], "label": [0, 1_000_000]}, "a.parquet: row 1: label 1000000 is above 999999"),
        ({"image": [{"bytes": b"."}], "label": [np.uint64(2**64 - 1)]}, f"row 0: label {2**64 - 1} is above 999999"),
        ({"image": [{"bytes": b"."}], "label": [0.0, 1.5]}, "row 1: label 1.5 is not a whole number"),
        ({"image": [{"bytes": b"."}], "label": [0.0, float("nan")]}, "row 1: label nan is not a whole number"),
        ({"image": [], "label": []}, "train has no rows"),
        ({"image": [{"bytes": b"."}], "score": [1.0]}, "no column 'label' of integers; its columns are image, score"),
    ],
)
def test_files_without_images_or_labels_are_refused(tmp_path, columns, words):
    others = [image for image in columns.get("image", ()) if not isinstance(image, dict) or image["bytes"] != b"."]
    kinds = {} if others else {"image": pa.struct([("bytes", pa.binary())])}
    rows = max(map(len, columns.values()))
    arrays = {
        name: pa.array((column * rows)[:rows], kinds.get(name, pa.int64() if not rows else None))
        for name, column in columns.items()
    }
    pq.write_table(pa.table(arrays), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=words.replace("{", r"\{")):
        parquet.read(tmp_path)


@pytest.mark.parametrize("name", ["image", "label"])
def test_a_column_that_comes_twice_is_refused(tmp_path, name):
    image, label = pa.array([{"bytes": b"."}], pa.struct([("bytes", pa.binary())])), pa.array([0])
    for second in ({"image": image, "label": label}[name], pa.array(["text"])):  # of the same type, and of another
        pq.write_table(pa.Table.from_arrays([image, second, label], ["image", name, "label"]), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=f"has the column '{name}' twice; remove one"):
            parquet.read(tmp_path)


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.binary(1), pa.binary_view()], ids=str)
def test_bytes_of_each_type_are_read(tmp_path, kind):
    images = pa.array([{"bytes": b"."}, {"bytes": b"x"}], pa.struct([("bytes", kind)]))
    pq.write_table(pa.table({"image": images, "label": [0, 1]}), tmp_path / "a.parquet")
    assert [sample.content() for sample in parquet.read(tmp_path).splits["train"]] == [b".", b"x"]


@pytest.mark.parametrize("labels", [[0.0, 2.0, 10.0], [False, True, True]])
def test_labels_as_pandas_may_write_them(tmp_path, labels, jpeg):
    images = pa.array([{"bytes": jpeg(0)}] * 3, pa.struct([("bytes", pa.binary())]))
    pq.write_table(pa.table({"image": images, "width": [1.5] * 3, "label": labels}), tmp_path / "a.parquet")
    assert parquet.read(tmp_path).splits["train"].labels.tolist() == [int(label) for label in labels]


def test_a_class_that_is_named_twice_is_refused(tmp_path, jpeg):
    write(tmp_path / "train-0.parquet", [jpeg(0)], [1], names=["crane", "duck", "crane"])
    with pytest.raises(InputError, match=r"train-0\.parquet: names the class 'crane' twice \(classes 0 and 2\)"):
        parquet.read(tmp_path)


@pytest.mark.parametrize("size", [0, 3, 1000, -1])
def test_a_file_that_is_cut_short_is_refused(hub, size):
    origin, _ = hub
    path = next(origin.glob("data/train-00001*"))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=r"cd34\.parquet: cannot be read as parquet .*; download it again"):
        parquet.read(origin)


def test_labels_beyond_the_names_and_other_names_are_refused(tmp_path, jpeg):
    write(tmp_path / "train-0.parquet", [jpeg(0)], [3])
    with pytest.raises(InputError, match=r"train-0\.parquet: has labels outside of its 3 classes"):
        parquet.read(tmp_path)
    write(tmp_path / "train-0.parquet", [jpeg(0)], [2])
    for others in (["a", "b", "c"], CLASSES[::-1]):
        write(tmp_path / "train-1.parquet", [jpeg(0)], [1], names=others)
        with pytest.raises(InputError, match=r"train-1\.parquet: names other classes than .*train-0\.parquet"):
            parquet.read(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="holds no shards"):
        parquet.read(empty)


def test_without_pyarrow_one_line_says_so(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"read with pyarrow: pip install 'widemix\[parquet\]'"):
        parquet.read(hub[0])
