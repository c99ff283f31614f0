"""What is damaged opens nowhere."""

import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest

from widemix.data_prep.image import Encoded
from widemix.data_prep.layout import image_layout
from widemix.data_prep.write import PAGE, BetonWriter
from widemix.errors import InputError
from widemix.formats import tables
from widemix.formats.beton import (
    FIELDS,
    IMAGE,
    JPEG,
    RAW,
    SAMPLE,
    SEGMENT_FIELDS,
    SEGMENTED_TARGETED,
    array_arguments,
    open_beton,
)
from widemix.formats.tables import (
    ALLOCATION,
    BYTES_FIELD,
    COEFFICIENTS_FIELD,
    FIELD,
    FLOAT_FIELD,
    HEADER,
    IMAGE_FIELD,
    INT_FIELD,
    JSON_FIELD,
    TENSOR_FIELD,
)

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


def test_pages_of_any_size_are_filled_to_their_last_byte(tmp_path):
    """What follows an image begins at a multiple of 4 bytes, for which room is counted on its page."""

    def write(layout, parts):
        path = tmp_path / f"{len(parts)}.beton"
        with BetonWriter(path, path.with_suffix(".journal"), len(parts), layout, page=4096) as writer:
            for number, (size, table) in enumerate(parts):
                writer.add(Encoded(str(number), number, JPEG, 1, 1, bytes(size), "", bytes(table)))
            writer.finish()
        assert np.fromfile(path, HEADER, 1)["page_size"] == 4096
        return writer.written.table["ptr"].tolist()

    images = write(image_layout(FIELDS), [(4000, 0), (96, 0), (1, 0), (4096, 0)])
    assert images == [[4096], [8096], [8192], [12_288]]
    segmented = write(image_layout(SEGMENT_FIELDS), [(10, 8), (3980, 96), (8, 8)])
    assert segmented == [[4096, 4108], [8192, 12_172], [12_268, 12_276]]
    with pytest.raises(InputError, match="0: takes 4100 bytes, and a page of the file holds 4096"):
        write(image_layout(SEGMENT_FIELDS), [(4000, 96)])


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
        (HEADER, 0, 0, "version", 1, "version 1"),
        (HEADER, 0, 0, "page_size", 0, "not a power of two"),
        (HEADER, 0, 0, "page_size", 16, "sample 0 does not lie"),
        (SAMPLE, TABLES, 2, "f0", (RAW, 2, 3, PAGE + 37), "sample 2 does not lie"),
        (SAMPLE, TABLES, 2, "f1", 1 << 31, "labels of more than 31 bits"),
        (ALLOCATION, -72, 2, "ptr", PAGE + 35, "samples 1 and 2 overlap"),
    ],
)
@pytest.mark.parametrize("piece", [1, tables.PIECE])
def test_damaged_tables_are_refused(kind, start, row, field, value, word, whole, piece, monkeypatch):
    monkeypatch.setattr(tables, "PIECE", piece)
    path = whole
    start += path.stat().st_size if start < 0 else 0
    damaged = np.memmap(path, kind, "r+", start, (3 if kind != HEADER else 1,))
    damaged[field][row] = value
    damaged.flush()
    with pytest.raises(InputError, match=word):
        open_beton(path)


def tables_of(path, samples=3, fields=4, record=SEGMENTED_TARGETED, parts=3):
    """Its fields, records, and allocation table, to be changed."""
    at = HEADER.itemsize + fields * FIELD.itemsize
    table = path.stat().st_size - samples * parts * ALLOCATION.itemsize
    return (
        np.memmap(path, FIELD, "r+", HEADER.itemsize, (fields,)),
        np.memmap(path, record, "r+", at, (samples,)),
        np.memmap(path, ALLOCATION, "r+", table, (samples, parts)),
    )


@pytest.fixture
def complete(tmp_path):
    """Three images of 8 bytes, each with a table of segments of 16 bytes and two targets."""
    path = tmp_path / "complete.beton"
    with BetonWriter(path, tmp_path / "journal", 3, image_layout(SEGMENT_FIELDS, targets=2)) as writer:
        for i in range(3):
            targets = np.array([i, i + 0.5], "<f4").tobytes()
            writer.add(Encoded(str(i), -1, JPEG, 2, 3, bytes([i] * 8), "", bytes([i] * 16), targets=targets))
        writer.finish()
    return path


@pytest.mark.parametrize("piece", [1, tables.PIECE])
def test_parts_may_be_stored_and_listed_in_any_order(complete, piece, monkeypatch):
    """As FFCV's processes store and list them: the last sample's image stands before the first one's here."""
    monkeypatch.setattr(tables, "PIECE", piece)
    _, records, table = tables_of(complete)
    before = open_beton(complete)
    assert before.stop.tolist() == [PAGE + 32, PAGE + 64, PAGE + 96]
    with complete.open("rb") as file:
        assert before.read_targets(file.fileno(), records[[0, 2]]).tolist() == [[0, 0.5], [2, 2.5]]
    for sample, place in ((0, PAGE + 64), (2, PAGE)):
        records["f0"]["data_ptr"][sample], records["f2"]["ptr"][sample] = place, place + 8
        records["f3"][sample] = place + 24
    table["ptr"][[0, 2]] = table["ptr"][[2, 0]]
    table[:] = table.reshape(-1)[[4, 8, 0, 3, 2, 7, 5, 6, 1]].reshape(3, 3)
    found = open_beton(complete)
    assert found.offset.tolist() == [PAGE + 64, PAGE + 32, PAGE]
    assert found.segments.tolist() == [PAGE + 72, PAGE + 40, PAGE + 8]
    assert found.targets.tolist() == [PAGE + 88, PAGE + 56, PAGE + 24]
    assert (found.target_count, found.label.tolist()) == (2, [-1] * 3)
    table[:] = np.sort(table.reshape(-1), order=("sample_id", "ptr")).reshape(3, 3)
    table["size"][1, 0] = 4  # four bytes are no padding
    with pytest.raises(InputError, match="samples 1 and 1 overlap or lie apart"):
        open_beton(complete)
    table["size"][1] = 8, 20, 8
    with pytest.raises(InputError, match="samples 1 and 1 overlap or lie apart"):
        open_beton(complete)


def test_up_to_three_bytes_between_parts_are_padding(complete):
    *_, table = tables_of(complete)
    for size in (7, 6, 5):
        table["size"][1, 0] = size
        assert open_beton(complete).size.tolist() == [8, size, 8]


@pytest.mark.parametrize("piece", [1, tables.PIECE])
@pytest.mark.parametrize(
    ("sample", "image", "segments", "targets"),
    [
        (1, (32, 8), (40, 15), (56, 8)),  # of segments a size that is no multiple of four
        (1, (32, 8), (41, 12), (56, 8)),  # nor its place
        (1, (32, 16), (48, 8), (56, 8)),  # fewer than three numbers
        (2, (64, 8), (72, 12), (84, 12)),  # three targets
        (2, (64, 8), (72, 12), (85, 8)),  # at no multiple of four
        (2, (64, 8), (72, 16), (88, 0)),
        (2, (64, 8), (72, 20), (92, 8)),  # into the allocation table
        (2, (64 - PAGE, 32), (72, 16), (88, 8)),  # within the tables
    ],
)
def test_misplaced_parts_are_refused_where_all_tables_agree(
    complete, sample, image, segments, targets, piece, monkeypatch
):
    monkeypatch.setattr(tables, "PIECE", piece)
    _, records, table = tables_of(complete)
    parts = [(PAGE + place, size) for place, size in (image, segments, targets)]
    for part, (place, size) in enumerate(parts):
        table["ptr"][sample, part], table["size"][sample, part] = place, size
    records["f0"]["data_ptr"][sample], records["f3"][sample] = parts[0][0], parts[2][0]
    records["f2"][sample] = parts[1]
    with pytest.raises(InputError, match=rf"sample {sample} does not lie inside the file"):
        open_beton(complete)


@pytest.mark.parametrize("field", ["ptr", "size"])
def test_segments_elsewhere_than_the_allocation_table_says_are_refused(complete, field):
    _, records, _ = tables_of(complete)
    records["f2"][field][1] += 4
    with pytest.raises(InputError, match="sample 1 does not lie inside the file"):
        open_beton(complete)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({0: {"arguments": b"\1"}}, "fields with arguments"),
        ({1: {"arguments": b"\1"}}, "fields with arguments"),
        ({2: {"arguments": b"\1"}}, "fields with arguments"),
        ({3: {"arguments": array_arguments(np.dtype("<f8"), 2)}}, "not a row of 32-bit floats"),
        ({3: {"arguments": array_arguments(np.dtype("<f4"), 0)}}, "not a row of 32-bit floats"),
        ({2: {"type_id": IMAGE_FIELD}}, "not image and label"),
        ({1: {"name": b"one"}, 3: {"type_id": INT_FIELD}}, "not image and label"),
        ({0: {"name": b"caption", "type_id": BYTES_FIELD}, 3: {"name": b"more"}}, "not image and label"),
        ({1: {"name": b"one", "type_id": FLOAT_FIELD}}, "not image and label"),
        ({3: {"type_id": 77}}, "not image and label"),
    ],
)
def test_fields_that_are_not_read_are_refused(complete, changes, word):
    fields, *_ = tables_of(complete)
    for number, change in changes.items():
        for name, value in change.items():
            if name == "type_id":
                fields[name][number] = value
            else:
                row = fields[name][number]
                row[:] = np.frombuffer(value.ljust(len(row), b"\0"), np.uint8)
    with pytest.raises(InputError, match=word):
        open_beton(complete)


def test_coefficients_take_no_arguments(whole):
    fields, *_ = tables_of(whole, fields=2, record=SAMPLE, parts=1)
    fields["type_id"][0] = COEFFICIENTS_FIELD
    assert len(open_beton(whole)) == 3
    fields["arguments"][0, 5] = 1
    with pytest.raises(InputError, match="fields with arguments"):
        open_beton(whole)


def test_a_field_may_have_a_name_of_any_bytes(whole):
    fields, *_ = tables_of(whole, fields=2, record=SAMPLE, parts=1)
    fields["name"][0, 0] = 0xC4
    assert open_beton(whole).label.tolist() == [0, 1, 2]


def test_an_array_named_targets_beside_labels_is_none(complete):
    """One label tells that the file is of labels, and so do other fields."""
    fields, records, _ = tables_of(complete)
    for label in (5, 0, -2):
        records["f1"][1] = label
        found = open_beton(complete)
        assert (found.target_count, found.targets.tolist(), found.label.tolist()) == (0, [0] * 3, [-1, label, -1])
    records["f1"][1] = -1
    assert open_beton(complete).target_count == 2
    fields["name"][2, :8] = np.frombuffer(b"captions", np.uint8)
    found = open_beton(complete)
    assert (found.target_count, found.targets.tolist(), found.segments_size.tolist()) == (0, [0] * 3, [0] * 3)


def test_fields_that_are_not_read_take_their_place_in_a_record(tmp_path):
    """Of FFCV's types: a float and a tensor's place have 8 bytes, a JSON object's place and size 16."""
    image, data = np.array((RAW, 2, 1, PAGE), IMAGE).tobytes(), b"pixels--tensor--{}"
    record = np.float64(0.5).tobytes() + image + bytes(3) + np.uint64(PAGE + 8).tobytes()
    record += np.array([PAGE + 16, 2], "<u8").tobytes() + np.int64(6).tobytes()
    fields = np.zeros(5, FIELD)
    fields["type_id"] = FLOAT_FIELD, IMAGE_FIELD, TENSOR_FIELD, JSON_FIELD, INT_FIELD
    table = np.array([(0, PAGE, 6), (0, PAGE + 8, 8), (0, PAGE + 16, 2)], ALLOCATION)
    head = np.array((2, 5, PAGE, 1, PAGE + len(data)), HEADER).tobytes() + fields.tobytes() + record
    (tmp_path / "a.beton").write_bytes(head.ljust(PAGE, b"\0") + data + table.tobytes())
    found = open_beton(tmp_path / "a.beton")
    assert found.bytes[found.offset[0] :][: found.size[0]].tobytes() == b"pixels"
    assert (found.width[0], found.height[0], found.label[0], found.mode[0]) == (2, 1, 6, RAW)


def test_records_and_targets_that_a_cut_file_holds_in_part_are_not_read(complete):
    beton, samples, read = open_beton(complete), np.array([0, 2]), []
    with complete.open("r+b") as file:
        records = beton.read_records(file.fileno(), samples)
        for end in (int(beton.targets[2]) + 7, beton.records_at + 3 * beton.records.dtype.itemsize - 1):
            file.truncate(end)
            read += [beton.read_records(file.fileno(), chosen) is not None for chosen in (samples[:1], samples)]
            read += [beton.read_targets(file.fileno(), rows) is not None for rows in (records[:1], records)]
    assert read == [True, True, True, False, True, False, False, False]  # not of `beton`, whose bytes have gone


@pytest.mark.parametrize("size", [2**63 - 1, PAGE, 5])
def test_sizes_that_reach_beyond_or_overlap_are_refused(tmp_path, size, write_beton):
    path = tmp_path / "a.beton"
    write_beton(path, [Encoded(str(i), i, JPEG, 2, 3, bytes(4), "") for i in range(3)])
    table = np.memmap(path, ALLOCATION, "r+", path.stat().st_size - 72, (3,))
    table["size"][1] = size
    table.flush()
    with pytest.raises(InputError, match=r"sample 1 does not lie|samples 1 and 2 overlap"):
        open_beton(path)


@pytest.mark.parametrize(("offset", "size", "fits"), [(64, 1, True), (64, 0, False), (64, 2, False), (63, 1, False)])
def test_the_smallest_part_is_of_one_byte(tmp_path, offset, size, fits):
    places = np.array([[offset]], np.int64), np.array([[size]], np.int64)
    with nullcontext() if fits else pytest.raises(InputError, match="sample 0 does not lie inside the file"):
        tables.check_places(tmp_path, *places, 64, 65, PAGE)


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
