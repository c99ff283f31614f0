"""What is damaged opens nowhere."""

import shutil
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from widemix.data_prep.beton_writer import PAGE, BetonWriter
from widemix.data_prep.records import Encoded, image_layout
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
    PIECE,
    TENSOR_FIELD,
)

# Samples before the three of a test: none, and so many that the three are checked in two turns.
BEFORE = pytest.mark.parametrize("before", [0, PIECE - 1, PIECE - 2])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A file of `before` and three samples: raw images of 2 x 3 pixels, or, if it is complete, images of 8 bytes.

    Each of those with a table of segments of 16 bytes and two targets.
    """

    def make(before: int, complete: bool = False) -> Path:
        path = folder / f"{before}-{complete}.beton"
        if not path.exists():
            layout = image_layout(SEGMENT_FIELDS, targets=2) if complete else image_layout(FIELDS)
            with BetonWriter(path, path.with_suffix(".journal"), before + 3, layout) as writer:
                for i in range(-before, 3):
                    data, targets = bytes(range(i % 200, i % 200 + 18)), np.array([i, i + 0.5], "<f4").tobytes()
                    if complete:
                        sample = Encoded("", -1, JPEG, 2, 3, data[:8], "", bytes([i % 256] * 16), targets=targets)
                    else:
                        sample = Encoded("", i + before, RAW, 2, 3, data, "")
                    writer.add(sample)
                writer.finish()
        return path

    folder = tmp_path_factory.mktemp("betons")
    return make


@pytest.fixture
def whole(made, tmp_path) -> Path:
    return Path(shutil.copy(made(0), tmp_path / "a.beton"))


@pytest.fixture
def complete(made, tmp_path) -> Path:
    return Path(shutil.copy(made(0, True), tmp_path / "complete.beton"))


def tables_of(path, samples=3, fields=4, record=SEGMENTED_TARGETED, parts=3):
    """Its header, fields, records, and allocation table, to be changed."""
    at = HEADER.itemsize + fields * FIELD.itemsize
    table = path.stat().st_size - samples * parts * ALLOCATION.itemsize
    return (
        np.memmap(path, HEADER, "r+", 0, (1,)),
        np.memmap(path, FIELD, "r+", HEADER.itemsize, (fields,)),
        np.memmap(path, record, "r+", at, (samples,)),
        np.memmap(path, ALLOCATION, "r+", table, (samples, parts)),
    )


def test_round_trip(whole):
    """A field may have a name of any bytes."""
    tables_of(whole, fields=2, record=SAMPLE, parts=1)[1]["name"][0, 0] = 0xC4
    beton = open_beton(whole)
    assert beton.label.tolist() == [0, 1, 2]
    for i in range(3):
        assert beton.bytes[beton.offset[i] :][:18].tolist() == list(range(i, i + 18))


@pytest.mark.parametrize(
    ("fields", "parts", "places"),
    [
        (FIELDS, [(4000, 0), (96, 0), (1, 0), (4096, 0)], [[4096], [8096], [8192], [12_288]]),
        (SEGMENT_FIELDS, [(10, 8), (3980, 96), (8, 8)], [[4096, 4108], [8192, 12_172], [12_268, 12_276]]),
        (SEGMENT_FIELDS, [(4000, 96)], None),
    ],
)
def test_pages_of_any_size_are_filled_to_their_last_byte(tmp_path, fields, parts, places):
    """What follows an image begins at a multiple of 4 bytes, for which room is counted on its page."""
    path, refused = tmp_path / "a.beton", "0: takes 4100 bytes, and a page of the file holds 4096"
    samples = [Encoded(str(i), i, JPEG, 1, 1, bytes(of), "", bytes(table)) for i, (of, table) in enumerate(parts)]
    with BetonWriter(path, tmp_path / "journal", len(parts), image_layout(fields), page=4096) as writer:
        with nullcontext() if places else pytest.raises(InputError, match=refused):
            for sample in samples:
                writer.add(sample)
            writer.finish()
        if places:
            assert np.fromfile(path, HEADER, 1)["page_size"] == 4096
            assert writer.written.table["ptr"].tolist() == places


def test_every_cut_is_refused(whole):
    size, end = whole.stat().st_size, HEADER.itemsize + 2 * FIELD.itemsize + 3 * SAMPLE.itemsize
    for cut in reversed([*range(0, end, 7), *range(end, size - 300, 1 << 20), *range(size - 300, size)]):
        with whole.open("r+b") as file:
            file.truncate(cut)
        with pytest.raises(InputError):
            open_beton(whole)


def test_bytes_after_the_end_are_refused(whole):
    with whole.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(InputError, match="after its allocation table"):
        open_beton(whole)


# A table, the number of the sample, a field and its value; of `num_samples` how many more, places after the first's.
HEAD, FIELD_0, RECORD, PART = range(4)
DAMAGED_TABLES = [
    (HEAD, 0, "version", 3, "version 3"),
    (HEAD, 0, "version", 1, "version 1"),
    (HEAD, 0, "num_fields", 1, "not image and label"),
    (HEAD, 0, "num_samples", -1, "after its allocation table"),
    (HEAD, 0, "num_samples", 1, "cut short"),
    (HEAD, 0, "num_samples", 2**62, "cut short"),
    (HEAD, 0, "table", 0, "header is damaged"),
    (HEAD, 0, "page_size", PAGE + 4096, "not a power of two"),
    (HEAD, 0, "page_size", 0, "not a power of two"),
    (HEAD, 0, "page_size", 16, "sample 0 does not lie"),
    (FIELD_0, 0, "arguments", 1, "fields with arguments"),
    (RECORD, 1, "f0", (RAW, 2, 4, 18), "sample {1} does not lie"),
    (RECORD, 1, "f0", (2, 2, 3, 18), "sample {1} does not lie"),
    (RECORD, 1, "f0", (JPEG, 0, 3, 18), "sample {1} does not lie"),
    (RECORD, 1, "f0", (RAW, 2, 3, 17), "sample {1} does not lie"),
    (RECORD, 2, "f0", (RAW, 2, 3, 37), "sample {2} does not lie"),
    (RECORD, 2, "f1", 1 << 31, "labels of more than 31 bits"),
    (PART, 1, "sample_id", 2**62, "allocation table is damaged"),
    (PART, 1, "ptr", 17, "samples {0} and {1} overlap"),
    (PART, 2, "ptr", 35, "samples {1} and {2} overlap"),
    (PART, 1, "size", 19, "samples {1} and {2} overlap"),
    (PART, 1, "size", 7, "samples {1} and {2} .* lie apart"),
    (PART, 1, "size", 0, "sample {1} does not lie"),
    (PART, 1, "size", 2**63 - 1, "sample {1} does not lie"),
    (PART, 1, "size", PAGE, "sample {1} does not lie"),
]


@BEFORE
@pytest.mark.parametrize(("table", "sample", "field", "value", "words"), DAMAGED_TABLES)
def test_damaged_tables_are_refused(made, tmp_path, before, table, sample, field, value, words):
    path, base = Path(shutil.copy(made(before), tmp_path / "a.beton")), PAGE + 18 * before
    rows = tables_of(path, before + 3, fields=2, record=SAMPLE, parts=1)[table].reshape(-1)
    if field == "num_samples":
        value = before + 3 + value
    if field in ("ptr", "f0"):
        value = base + value if field == "ptr" else (*value[:3], base + value[3])
    rows[field][sample + (before if table in (RECORD, PART) else 0)] = value
    rows.flush()
    with pytest.raises(InputError, match=words.format(before, before + 1, before + 2)):
        open_beton(path)


@BEFORE
def test_parts_may_be_stored_and_listed_in_any_order(made, tmp_path, before):
    """As FFCV's processes store and list them: the last sample's image stands before the first one's here."""
    path, base = Path(shutil.copy(made(before, True), tmp_path / "a.beton")), PAGE + 32 * before
    *_, records, table = (rows[-3:] for rows in tables_of(path, before + 3))
    found = open_beton(path)
    assert found.stop.tolist()[-3:] == [base + 32, base + 64, base + 96]
    with path.open("rb") as file:
        assert found.read_targets(file.fileno(), records[[0, 2]]).tolist() == [[0, 0.5], [2, 2.5]]
    for sample, place in ((0, base + 64), (2, base)):
        records["f0"]["data_ptr"][sample], records["f2"]["ptr"][sample] = place, place + 8
        records["f3"][sample] = place + 24
    table["ptr"][[0, 2]] = table["ptr"][[2, 0]]
    table[:] = table.reshape(-1)[[4, 8, 0, 3, 2, 7, 5, 6, 1]].reshape(3, 3)
    found = open_beton(path)
    assert found.offset.tolist()[-3:] == [base + 64, base + 32, base]
    assert found.segments.tolist()[-3:] == [base + 72, base + 40, base + 8]
    assert found.targets.tolist()[-3:] == [base + 88, base + 56, base + 24]
    assert (found.target_count, set(found.label.tolist())) == (2, {-1})
    table[:] = np.sort(table.reshape(-1), order=("sample_id", "ptr")).reshape(3, 3)
    for sizes in ((4, 16, 8), (8, 20, 8)):  # four bytes are no padding
        table["size"][1] = sizes
        with pytest.raises(InputError, match=f"samples {before + 1} and {before + 1} overlap or lie apart"):
            open_beton(path)


@pytest.mark.parametrize("size", [7, 6, 5])
def test_up_to_three_bytes_between_parts_are_padding(complete, size):
    *_, table = tables_of(complete)
    table["size"][1, 0] = size
    assert open_beton(complete).size.tolist() == [8, size, 8]


@BEFORE
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
        (2, (64 - PAGE, 32), (72, 16), (88, 8)),  # within the tables, or on the page before
    ],
)
def test_misplaced_parts_are_refused(made, tmp_path, before, sample, image, segments, targets):
    path, base = Path(shutil.copy(made(before, True), tmp_path / "a.beton")), PAGE + 32 * before
    *_, records, table = (rows[-3:] for rows in tables_of(path, before + 3))
    parts = [(base + place, size) for place, size in (image, segments, targets)]
    for part, (place, size) in enumerate(parts):
        table["ptr"][sample, part], table["size"][sample, part] = place, size
    records["f0"]["data_ptr"][sample], records["f3"][sample] = parts[0][0], parts[2][0]
    records["f2"][sample] = parts[1]
    with pytest.raises(InputError, match=rf"sample {before + sample} does not lie inside the file"):
        open_beton(path)


@pytest.mark.parametrize("place", [lambda of: of["f2"]["ptr"], lambda of: of["f2"]["size"], lambda of: of["f3"]])
def test_segments_and_targets_elsewhere_than_allocated_are_refused(complete, place):
    *_, records, _ = tables_of(complete)
    place(records)[1] += 4
    with pytest.raises(InputError, match="sample 1 does not lie inside the file"):
        open_beton(complete)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        *(({number: {"arguments": b"\1"}}, "fields with arguments") for number in range(3)),
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
    _, fields, *_ = tables_of(complete)
    for number, change in changes.items():
        for name, value in change.items():
            row = fields[name][number : number + 1]
            row[:] = value if name == "type_id" else np.frombuffer(value.ljust(row.size, b"\0"), np.uint8)
    with pytest.raises(InputError, match=word):
        open_beton(complete)


def test_coefficients_take_no_arguments(whole):
    _, fields, *_ = tables_of(whole, fields=2, record=SAMPLE, parts=1)
    fields["type_id"][0] = COEFFICIENTS_FIELD
    assert open_beton(whole).label.tolist() == [0, 1, 2]
    fields["arguments"][0, 5] = 1
    with pytest.raises(InputError, match="fields with arguments"):
        open_beton(whole)


def test_an_array_named_targets_beside_labels_is_none(complete):
    """One label tells that the file is of labels, and so do other fields."""
    _, fields, records, _ = tables_of(complete)
    for label in (5, 0, -2):
        records["f1"][1] = label
        found = open_beton(complete)
        assert (found.target_count, found.targets.tolist(), found.label.tolist()) == (0, [0] * 3, [-1, label, -1])
    records["f1"][1] = -1
    assert open_beton(complete).target_count == 2
    fields["name"][2, :8] = np.frombuffer(b"captions", np.uint8)
    found = open_beton(complete)
    assert (found.target_count, found.targets.tolist(), found.segments_size.tolist()) == (0, [0] * 3, [0] * 3)


def test_fields_that_are_not_read_take_their_place(tmp_path):
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


def test_what_a_cut_file_holds_in_part_is_not_read(complete):
    beton, samples, found = open_beton(complete), np.array([0, 2]), []
    with complete.open("r+b") as file:
        records = beton.read_records(file.fileno(), samples)
        for end in (int(beton.targets[2]) + 7, beton.records_at + 3 * beton.records.dtype.itemsize - 1):
            file.truncate(end)
            found += [beton.read_records(file.fileno(), chosen) is not None for chosen in (samples[:1], samples)]
            found += [beton.read_targets(file.fileno(), rows) is not None for rows in (records[:1], records)]
    assert found == [True, True, True, False, True, False, False, False]  # not of `beton`, whose bytes have gone


@pytest.mark.parametrize(("offset", "size", "fits"), [(64, 1, True), (64, 0, False), (64, 2, False), (63, 1, False)])
def test_the_smallest_part_is_of_one_byte(tmp_path, offset, size, fits):
    places = np.array([[offset]], np.int64), np.array([[size]], np.int64)
    with nullcontext() if fits else pytest.raises(InputError, match="sample 0 does not lie inside the file"):
        tables.check_places(tmp_path, *places, 64, 65, PAGE)


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
