"""What each source reads and what it refuses: the rows of sources.yaml, and those whose files are no texts."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from scipy.io import savemat

from tests import layouts
from tests.data_prep import writing
from tests.data_prep.writing import Link, found, jsonl, plain, put, tar
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import csv_list, read_source
from widemix.errors import InputError

ROWS = yaml.safe_load(Path(__file__).with_name("sources.yaml").read_text(encoding="utf-8"))
SPLITS = ("train", "val", "test")


def assert_says(line: str, words: str, folder: Path) -> None:
    """A line has these words, in which " ... " stands for anything."""
    rest = line
    for part in words.replace("{in}", str(folder)).split(" ... "):
        assert part in rest, line
        rest = rest.partition(part)[2]
    assert "\n" not in line


def files_of(row) -> dict:
    return row if isinstance(row, dict) else {name: name for name in row}


def content(folder: Path, name: str) -> bytes:
    """What is in a file, or in the member of a tar that the name begins with."""
    outer = folder / name
    while not outer.is_file():
        outer = outer.parent
    if outer == folder / name:
        return outer.read_bytes()
    with tarfile.open(outer) as file:
        return file.extractfile(name.removeprefix(f"{outer.relative_to(folder)}/")).read()


@pytest.mark.parametrize("row", ROWS["read"], ids=lambda row: f"{row['source']}: {row['id']}")
def test_a_source_is_read(tmp_path, row, capsys):
    put(tmp_path / "in", files_of(row["files"]))
    folder = tmp_path / "in" / row.get("from", "")
    dataset = read_source(row["source"], folder, PrepSettings())
    assert list(dataset.splits) == [split for split in row if split in SPLITS]
    for split in dataset.splits:
        wanted = [(name, (label, content(folder, name))) for name, label in row[split].items()]
        assert list(found(dataset, split).items()) == wanted
    assert list(dataset.classes) == row.get("classes", list(dataset.classes))
    said = capsys.readouterr().err.splitlines() if row["source"] != "csv" else []
    for line, words in itertools.zip_longest(said, row.get("said", ())):
        assert_says(line, words, folder)


REFUSED = [(source, *row) for source, rows in ROWS["refused"].items() for row in rows]


def assert_refused(source, origin, out, words, **settings):
    """By `prepare`, in one line, and nothing is created."""
    with pytest.raises(InputError) as error:
        prepare(source, origin, out, PrepSettings(**settings), processes=1)
    assert_says(str(error.value), words, origin if origin.is_dir() else origin.parent)
    assert not out.exists()


@pytest.mark.parametrize("row", REFUSED, ids=[f"{row[0]}: {row[2][:60]}" for row in REFUSED])
def test_a_source_is_refused(tmp_path, row):
    source, files, words, *settings = row
    files, origin = files_of(files), tmp_path / "in"
    if "vocab" in str(files):
        pytest.importorskip("tokenizers")
    put(origin, files)
    if source == "csv" and len(files) == 1 and not words.startswith("{in}: is a folder"):
        origin /= next(iter(files))
    assert_refused(source, origin, tmp_path / "out", words, **dict(*settings))


@pytest.mark.parametrize("column", ["label", "labels"])
@pytest.mark.parametrize(("labels", "words"), ROWS["labels"], ids=[words for _, words in ROWS["labels"]])
def test_labels_are_refused_with_their_line(tmp_path, labels, words, column):
    with (tmp_path / "list.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", column), *((f"{i}.jpg", label) for i, label in enumerate(labels))])
    with pytest.raises(InputError) as error:
        csv_list.read(tmp_path / "list.csv")
    assert_says(str(error.value), f"{{in}}/list.csv: {words}", tmp_path)


# Sources of which a file is no text: `layouts` or a function writes them, and some files are replaced.

BINARY = {"-": lambda folder: None, "numbers": lambda folder: None}  # what makes a whole source, by name


def whole(make):
    BINARY[make.__name__] = make
    return make


@whole
def pickles(folder, names=None, **changes):
    """CIFAR-10's, with changes to each batch; None removes a key."""
    batch = {"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 3]} | changes
    body = pickle.dumps({key: value for key, value in batch.items() if value is not None}, 2)
    files = dict.fromkeys((*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"), body)
    put(folder, files | {"batches.meta": pickle.dumps(names or {"label_names": [f"c{i}" for i in range(10)]}, 2)})


TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
WNIDS = ["n01440764", "n01443537", "n01484850"]
IDS = {"n01440764": 449, "n01443537": 2, "n01484850": 1}  # the devkit's numbers follow another order
OF_VAL = {1: WNIDS[1], 2: WNIDS[0], 3: WNIDS[2], 4: WNIDS[2], 5: WNIDS[0]}


def devkit(labels) -> bytes:
    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("num_children", object)]
    synsets = np.array([[(number, wnid, 0)] for wnid, number in IDS.items()], dtype=kinds)
    truth = "".join(f"{IDS[wnid]}\n" for wnid in labels)
    name = "ILSVRC2012_devkit_t12/data"
    files = {f"{name}/ILSVRC2012_validation_ground_truth.txt": truth, f"{name}/meta.mat": mat(synsets=synsets)}
    return tar(files, "gz")


def val_tar(*numbers) -> bytes:
    return tar({f"ILSVRC2012_val_0000000{number}.JPEG": "x" for number in numbers})


@whole
def tars(folder):
    """ImageNet's official ones, of images that are none."""
    train = tar({f"{wnid}.tar": {f"{wnid}_{n}.JPEG": "x" for n in (10, 2)} for wnid in reversed(WNIDS)})
    put(folder, {TRAIN: train, VAL: val_tar(1, 2, 3, 4, 5), DEVKIT: devkit(OF_VAL.values())})


@whole
def flat(folder):
    """Two classes of ImageNet: folders of train, a flat val, and the devkit."""
    put(folder, {f"train/{wnid}/a.JPEG": "x" for wnid in WNIDS[::2]})
    put(folder, {f"val/ILSVRC2012_val_0000000{number}.JPEG": "x" for number in (5, 2, 3, 4)})
    put(folder, {DEVKIT: devkit(OF_VAL.values())})


@whole
def val_alone(folder):
    put(folder, {VAL: val_tar(1, 2, 3, 4, 5), DEVKIT: devkit(OF_VAL.values())})


@whole
def stl10_with_archive(folder):
    layouts.stl10(folder)
    (folder / "stl10_binary.tar.gz").touch()


class Attack:
    def __reduce__(self):
        return (print, ("ran",))


class Reduced:
    """Is pickled as a call, and a state that what it returns is given."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def pointers(kind, state, data=b"AAAAAAAA"):
    """An array whose dtype, of this state, may say that the bytes of the file are pointers to objects."""
    dtype = Reduced(np.dtype, (kind, False, True), state)
    return Reduced(np.empty(0).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, (len(data) // 8,), dtype, False, data))


def batch(**changes) -> bytes:
    return pickle.dumps({"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 3]} | changes, 2)


def idx(*shape, kind=8, value=0, most=None):
    """A file of MNIST's format."""
    body = bytes([value]) * (int(np.prod(shape)) if most is None else most)
    return struct.pack(f">HBB{len(shape)}I", 0, kind, len(shape), *shape) + body


def mat(compressed=False, **arrays):
    """A file of SVHN's format."""
    file = io.BytesIO()
    savemat(file, arrays, do_compression=compressed)
    return file.getvalue()


def sized(*shape):
    """One whose array says another shape."""
    return mat(X=PIXELS, y=ONES).replace(struct.pack("<4i", 32, 32, 3, 4), struct.pack("<4i", *shape))


def sparse_tar(name, compression="") -> bytes:
    """Of a file of a TiB of which no byte is there."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{compression}", format=tarfile.PAX_FORMAT) as file:
        member = tarfile.TarInfo(name)
        member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)}
        file.addfile(member)
    return buffer.getvalue()


def gnu_sparse() -> bytes:
    """As GNU tar writes it with --sparse: its data are not all in the tar."""
    member = tarfile.TarInfo("a.jpg")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (512, 512)  # where the data lie in the file, and how many
    header[483:495] = b"%011o\0" % 1024
    header[148:156] = b"%06o\0 " % (sum(header[:512]) - sum(header[148:156]) + 8 * 32)
    return bytes(header) + bytes(512) + bytes(1024)


def damaged_sparse() -> bytes:
    """tarfile reads the map of its holes as numbers."""
    header, holes, buffer = tarfile.TarInfo("a.jpg"), b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n", io.BytesIO()
    header.type, header.size = tarfile.XHDTYPE, len(holes)
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(header, io.BytesIO(holes))
        member = tarfile.TarInfo("a.jpg")
        member.size = 512
        file.addfile(member, io.BytesIO(b"\xff" * 512))
    return buffer.getvalue()


PIXELS, ONES = np.zeros((32, 32, 3, 4), np.uint8), np.ones((4, 1), np.uint8)
NOISE = np.random.RandomState(0).randint(0, 256, PIXELS.shape, np.uint8)
IMAGES, GZIPPED, MAT = idx(5, 28, 28), gzip.compress(idx(layouts.TRAIN)), mat(True, X=NOISE, y=ONES)
SAMPLE, MESSY, PAIR = {"a.jpg": ".", "a.cls": "0"}, b"n00000001 \xe4, path, label\n", jsonl([("neutral", "a", "b")])
PACKED = gzip.compress(plain([("neutral", "a", "b")]).encode())


def images_of(*images, kind=None):
    return pa.array([{"bytes": data} for data in images], pa.struct([("bytes", kind or pa.binary())]))


ONE = images_of(b".")


def written(table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def table(**columns) -> bytes:
    return written(pa.table(columns))


def labelled(*labels, names=None) -> bytes:
    """Images with these labels."""
    features = json.dumps({"info": {"features": {"label": {"names": names}}}})
    rows = pa.table({"image": images_of(*[b"."] * len(labels)), "label": list(labels)})
    return written(rows.replace_schema_metadata({"huggingface": features}))


def twice(name, column) -> bytes:
    return written(pa.Table.from_arrays([ONE, column, pa.array([0])], ["image", name, "label"]))


def shaped(shape) -> bytes:
    return gzip.compress(idx(*shape, most=6272))


def names(content) -> bytes:
    return pickle.dumps(content, 2)


def row(age: str) -> str:
    return f'{{"path": "a", "age": {age}}}'


def linked(link: Link) -> bytes:
    return tar({"ILSVRC2012_validation_ground_truth.txt": link, "meta.mat": link}, "gz")


def cut(fraction: float):
    return lambda data: data[: int(fraction * len(data))]


def damaged(where: int):
    return lambda data: data[:where] + b"\xff" + data[where + 1 :]


NAMES = vars(writing) | {"bz2": bz2, "lzma": lzma}  # for damaged.yaml, with what is here
DAMAGED = yaml.safe_load(Path(__file__).with_name("damaged.yaml").read_text(encoding="utf-8"))
CASES = [
    (key, file, data, words)
    for key, rows in DAMAGED.items()
    for file, contents, words in rows
    for data in (contents if isinstance(contents, list) else [contents])
]


@pytest.mark.parametrize(
    ("key", "file", "data", "words"), CASES, ids=[f"{key} {words[:50]}" for key, _, _, words in CASES]
)
def test_damage_is_refused_with_its_file(tmp_path, key, file, data, words, capsys):
    source, _, make = key.partition(" ")
    folder = tmp_path / "in"
    folder.mkdir()
    (BINARY[make] if make else layouts.LAYOUTS[source][1])(folder)
    put(folder, {file: eval(data, NAMES | globals())})
    settings = {"targets": "age"} if make == "numbers" else {}
    assert_refused(source, folder / file if source == "csv" else folder, tmp_path / "out", words, **settings)
    assert "ran" not in capsys.readouterr().out.split()


BOMB, MIB = bytes(3 << 20), 1 << 20
BOMBS = {
    "mnist": {"train-images-idx3-ubyte.gz": gzip.compress(BOMB)},
    "svhn": {"train_32x32.mat": mat(True, X=np.frombuffer(BOMB, np.uint8))},
    "mnli": {"train.jsonl.gz": gzip.compress(BOMB)},
    "cifar10": {"cifar-10-python.tar.gz": tar({"cifar-10-batches-py/readme.html": BOMB}, "gz")},
    "imagenet": {VAL: val_tar(1), DEVKIT: tar({"readme.html": BOMB}, "gz")},
}


@pytest.mark.parametrize("source", BOMBS)
def test_what_is_compressed_takes_no_more_memory_than_needed(tmp_path, limits, source):
    for name in ("arrays.MOST", "official.MOST_UNPACKED", "arrays.MOST_UNPACKED", "imagenet.MOST"):
        limits({f"widemix.data_prep.sources.{name}": MIB})
    folder = tmp_path / "in"
    folder.mkdir()
    if source == "mnist":
        layouts.mnist(folder)
    put(folder, BOMBS[source])
    words = "unpacks to more than 1,048,576 bytes, the most that such a file can need"
    assert_refused(source, folder, tmp_path / "out", words)
