"""What is damaged opens nowhere."""

import tracemalloc

import numpy as np
import pytest

from widemix.data_prep.image import Encoded
from widemix.data_prep.write import PAGE
from widemix.errors import InputError
from widemix.formats.beton import FIELDS, JPEG, RAW, SAMPLE, open_beton
from widemix.formats.tables import ALLOCATION, FIELD, HEADER

TABLES = HEADER.itemsize + 2 * FIELD.itemsize


@pytest.fixture
def whole(tmp_path, write_beton):
    """A file of three raw images, 2 x 3 pixels."""
    samples = [Encoded(str(i), i, RAW, 2, 3, bytes(range(i, i + 18)), "") for i in range(3)]
    assert write_beton(tmp_path / "a.beton", samples) == (3, [])
    return tmp_path / "a.beton"


def test_round_trip(whole):
    beton = open_beton(whole)
    assert beton.label.tolist() == [0, 1, 2]
    for i in range(3):
        assert beton.bytes[beton.offset[i] :][:18].tolist() == list(range(i, i + 18))


def test_a_left_out_sample_takes_no_place(tmp_path, write_beton):
    samples = [Encoded("a", 4, JPEG, 5, 6, b"abc", ""), Encoded("b", 0, RAW, 0, 0, b"", "left out: is empty")]
    samples.append(Encoded("c", 7, JPEG, 8, 9, b"defg", "grey to RGB"))
    written = write_beton(tmp_path / "a.beton", samples)
    rules = [{"file": "b", "rule": "left out: is empty"}, {"file": "c", "rule": "grey to RGB"}]
    assert written == (2, rules)
    beton = open_beton(tmp_path / "a.beton")
    assert (beton.label.tolist(), beton.width.tolist(), beton.height.tolist()) == ([4, 7], [5, 8], [6, 9])
    assert [beton.bytes[o : o + s].tobytes() for o, s in zip(beton.offset, beton.size, strict=True)] == [
        b"abc",
        b"defg",
    ]


def test_no_sample_crosses_a_page(tmp_path, write_beton):
    samples = [
        Encoded(str(i), i, JPEG, 1, 1, bytes([i]) * size, "") for i, size in enumerate((PAGE - 10, 11, 10, PAGE))
    ]
    write_beton(tmp_path / "a.beton", samples)
    beton = open_beton(tmp_path / "a.beton")
    assert beton.offset.tolist() == [PAGE, 2 * PAGE, 2 * PAGE + 11, 3 * PAGE]
    assert beton.bytes[3 * PAGE :][:PAGE].tobytes() == b"\3" * PAGE


def test_a_image_larger_than_a_page_is_refused(tmp_path, write_beton):
    with pytest.raises(InputError, match=r"huge\.png: takes 8388609 bytes"):
        write_beton(tmp_path / "a.beton", [Encoded("huge.png", 0, JPEG, 1, 1, bytes(PAGE + 1), "")])


def test_every_cut_is_refused(tmp_path, whole):
    data = whole.read_bytes()
    tables = TABLES + 3 * SAMPLE.itemsize
    cuts = [*range(0, tables, 7), *range(tables, len(data) - 300, 1 << 20), *range(len(data) - 300, len(data))]
    path = tmp_path / "cut.beton"
    path.write_bytes(data)
    for cut in reversed(cuts):
        with path.open("r+b") as file:
            file.truncate(cut)
        with pytest.raises(InputError):
            open_beton(path)


@pytest.mark.parametrize(
    ("kind", "start", "row", "field", "value", "word"),
    [
        (HEADER, 0, 0, "version", 3, "version 3"),
        (HEADER, 0, 0, "num_fields", 1, "not image and label"),
        (HEADER, 0, 0, "num_samples", 2, "after its allocation table"),
        (HEADER, 0, 0, "num_samples", 4, "cut short"),
        (HEADER, 0, 0, "num_samples", 2**63, "cut short"),
        (HEADER, 0, 0, "table", 0, "header is damaged"),
        (SAMPLE, TABLES, 1, "f0", (RAW, 2, 4, PAGE + 18), "sample 1 does not lie"),
        (SAMPLE, TABLES, 1, "f0", (2, 2, 3, PAGE + 18), "sample 1 does not lie"),
        (SAMPLE, TABLES, 1, "f0", (JPEG, 0, 3, PAGE + 18), "sample 1 does not lie"),
        (SAMPLE, TABLES, 1, "f0", (RAW, 2, 3, PAGE + 17), "sample 1 does not lie"),
        (ALLOCATION, -72, 1, "sample_id", 2, "allocation table is damaged"),
        (ALLOCATION, -72, 1, "ptr", PAGE + 17, "samples 0 and 1 overlap"),
        (ALLOCATION, -72, 1, "size", 19, "samples 1 and 2 overlap"),
        (ALLOCATION, -72, 1, "size", 7, "samples 1 and 2 .* lie apart"),
        (HEADER, 0, 0, "page_size", PAGE + 4096, "not a power of two"),
        (FIELD, HEADER.itemsize, 0, "arguments", 1, "fields with arguments"),
        (ALLOCATION, -72, 1, "size", 0, "sample 1 does not lie"),
    ],
)
def test_damaged_tables_are_refused(kind, start, row, field, value, word, whole):
    path = whole
    start += path.stat().st_size if start < 0 else 0
    damaged = np.memmap(path, kind, "r+", start, (3 if kind != HEADER else 1,))
    damaged[field][row] = value
    damaged.flush()
    with pytest.raises(InputError, match=word):
        open_beton(path)


@pytest.mark.parametrize("size", [2**63 - 1, PAGE, 5])
def test_sizes_that_reach_beyond_or_overlap_are_refused(tmp_path, size, write_beton):
    path = tmp_path / "a.beton"
    write_beton(path, [Encoded(str(i), i, JPEG, 2, 3, bytes(4), "") for i in range(3)])
    table = np.memmap(path, ALLOCATION, "r+", path.stat().st_size - 72, (3,))
    table["size"][1] = size
    table.flush()
    with pytest.raises(InputError, match=r"sample 1 does not lie|samples 1 and 2 overlap"):
        open_beton(path)


def test_bytes_after_the_end_are_refused(whole):
    path = whole
    with path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(InputError, match="after its allocation table"):
        open_beton(path)


def test_opening_copies_no_places(tmp_path):
    """What a rank holds of its own, while it checks and after: pixels, size and label, 16 bytes a sample."""
    count, end = 300_000, PAGE * (1 + 300_000 // 1000)
    path, offset = tmp_path / "many.beton", PAGE * (1 + np.arange(count) // 1000) + 8000 * (np.arange(count) % 1000)
    samples, table = np.zeros(count, SAMPLE), np.zeros(count, ALLOCATION)
    samples["f0"]["width"], samples["f0"]["height"], samples["f0"]["data_ptr"] = 300, 200, offset
    samples["f1"], table["sample_id"], table["ptr"], table["size"] = 5, np.arange(count), offset, 8000
    fields = np.zeros(2, FIELD)
    for field, (name, kind) in zip(fields, FIELDS, strict=True):
        field["type_id"], field["name"][: len(name)] = kind, np.frombuffer(name.encode(), np.uint8)
    with path.open("wb") as file:
        file.write(np.array((2, 2, PAGE, count, end), HEADER).tobytes() + fields.tobytes() + samples.tobytes())
        file.seek(end)
        file.write(table.tobytes())
    tracemalloc.start()
    try:
        beton = open_beton(path)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(beton.offset, offset)
    assert held < 17 * count
    assert most < 17 * count + (8 << 20)
