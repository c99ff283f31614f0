"""Hugging Face's parquet files, written by pyarrow in their layout: row by row against what was put into them."""

import io
import json
import os
import random
import sys

import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.data_prep.conftest import saved
from tests.data_prep.test_sources import images_of
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import parquet
from widemix.errors import InputError

pytestmark = pytest.mark.usefixtures("small_pages")

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'widemix[parquet]'")
pq = pytest.importorskip("pyarrow.parquet")

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


def refused(path, words):
    with pytest.raises(InputError) as error:
        parquet.read(path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def hub(tmp_path, jpeg):
    """Two files of train, of several row groups and batches, one of validation and one of test; what they hold."""
    rows = {"train": [(i % 3, jpeg(i)) for i in range(59)], "val": [(1, jpeg(60))], "test": [(-1, jpeg(61))] * 2}
    for name, part in (
        ("train-00000-of-00002-ab12", rows["train"][:41]),
        ("train-00001-of-00002-cd34", rows["train"][41:]),
        ("validation-00000-of-00001-ef56", rows["val"]),
        ("test-00000-of-00001-0a7b", rows["test"]),
    ):
        labels, images = zip(*part, strict=True)
        write(tmp_path / f"hub/data/{name}.parquet", images, labels, group=37, compression="snappy")
    return tmp_path / "hub", rows


def test_every_row_in_any_order(hub):
    """Forwards, backwards, and at random."""
    origin, rows = hub
    dataset = parquet.read(origin)
    assert dataset.classes == tuple(CLASSES)
    assert list(dataset.splits) == ["train", "val", "test"]
    for split, samples in dataset.splits.items():
        assert found(samples) == rows[split]
        assert found(reversed(samples)) == rows[split][::-1]
    train = dataset.splits["train"]
    chosen = [random.Random(0).randrange(59) for _ in range(60)]
    assert found(train[i] for i in chosen) == [rows["train"][i] for i in chosen]
    assert train[0].name == "data/train-00000-of-00002-ab12.parquet/0"
    assert train[58].name == "data/train-00001-of-00002-cd34.parquet/17"
    assert len({sample.name for sample in train}) == 59


def test_several_processes_give_the_same(tmp_path, image, limits):
    """Workers read the files themselves."""
    limits({"widemix.data_prep.image_processes.MIN_SECONDS_PER_PROCESS": 1e-6})
    images = [saved(image(seed), "PNG") for seed in range(80)]
    write(tmp_path / "hub" / "0000.parquet", images, [i % 3 for i in range(80)], group=50)
    for processes in (1, 2):
        prepare("parquet", tmp_path / "hub", tmp_path / f"out{processes}", PrepSettings(), processes=processes)
    one, two = ((tmp_path / f"out{processes}/train.beton").read_bytes() for processes in (1, 2))
    assert one == two


def test_files_of_other_columns_and_without_rows(tmp_path, jpeg):
    """The greatest label may be in any file; an image of no bytes is one, to be left out when it is decoded."""
    path = write(tmp_path / "a.parquet", [jpeg(0), jpeg(1)], [4, 0], names=[], column="img")
    dataset = parquet.read(path)
    assert dataset.classes == ("0", "1", "2", "3", "4")
    assert found(dataset.splits["train"]) == [(4, jpeg(0)), (0, jpeg(1))]
    assert Image.open(io.BytesIO(dataset.splits["train"][0].image.read())).size == (40, 30)
    write(tmp_path / "more/train-0.parquet", [], [], names=[])
    write(tmp_path / "more/train-1.parquet", [b"x", b""], [0, 1], names=[])
    write(tmp_path / "more/train-2.parquet", [b"z"], [1], names=[], column="img")
    write(tmp_path / "more/val.parquet", [b"y"], [4], names=[])
    dataset = parquet.read(tmp_path / "more")
    assert dataset.classes == tuple("01234")
    assert found(dataset.splits["train"]) == [(0, b"x"), (1, b""), (1, b"z")]
    assert found(dataset.splits["val"]) == [(4, b"y")]
    assert dataset.splits["train"][1].name == "train-1.parquet/1"


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


def test_names_may_be_in_any_file_and_of_any_column(tmp_path):
    table = pa.table({"image": images_of(b".", b"."), "fine": [0, 2]})
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
    refused(tmp_path, "train-2.parquet: has labels outside of its 4 classes")


def test_names_of_two_files_are_the_same(tmp_path):
    write(tmp_path / "train-0.parquet", [b"."], [2])
    for others in (["a", "b", "c"], CLASSES[::-1]):
        write(tmp_path / "train-1.parquet", [b"."], [1], names=others)
        refused(tmp_path, f"train-1.parquet: names other classes than {tmp_path}/train-0.parquet")


def test_rows_and_images_have_sizes_that_memory_holds(tmp_path, limits):
    write(tmp_path / "train.parquet", [b"x", bytes(3000)], [0, 1], names=[])
    limits({"widemix.data_prep.sources.parquet.MOST": 1000})
    small, large = parquet.read(tmp_path).splits["train"]
    assert small.image.read() == b"x"
    with pytest.raises(InputError, match=r"row 1 of row group 0 has an image of more than 1,000 bytes; remove it"):
        large.image.read()
    limits({"widemix.data_prep.sources.parquet.MOST_ROWS": 1})
    refused(tmp_path, "train.parquet: has 2 rows; a file has at most 1")


def test_damage_of_a_row_is_named(tmp_path, jpeg):
    write(tmp_path / "hub" / "train.parquet", [jpeg(0), None], [0, 1])
    with pytest.raises(InputError, match=r"train\.parquet: row 1 of row group 0 has no image\.bytes"):
        prepare("parquet", tmp_path / "hub", tmp_path / "out", PrepSettings(), processes=1)
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True, "write_statistics": False}
    path = write(tmp_path / "train.parquet", [jpeg(0), jpeg(1)], [0, 1], **options)
    samples, data = parquet.read(path).splits["train"], bytearray(path.read_bytes())
    data[data.index(jpeg(1)) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"train\.parquet: cannot be read as parquet \(.*[Cc][Rr][Cc]"):
        found(samples)


KINDS = [(kind, [0, 1]) for kind in (pa.large_binary(), pa.binary(1), pa.binary_view())]
KINDS += [(pa.binary(), labels) for labels in ([0.0, 10.0], [False, True])]  # as pandas may write them


@pytest.mark.parametrize(("kind", "labels"), KINDS, ids=str)
def test_bytes_and_labels_of_each_type_are_read(tmp_path, kind, labels):
    table = {"image": images_of(b".", b"x", kind=kind), "width": [1.5] * 2, "label": labels}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    assert found(parquet.read(tmp_path).splits["train"]) == [(int(labels[0]), b"."), (int(labels[1]), b"x")]


def test_without_pyarrow_one_line_says_so(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(hub[0], f"read with pyarrow: pip install '{ROOT}[parquet]'")
