"""What each source reads and what it refuses: the rows of sources.yaml, and those whose files are no texts."""

import bz2
import csv
import gzip
import io
import itertools
import lzma
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy.io import savemat

from tests import layouts
from tests.data_prep.writing import Fifo, Link, Symlink, found, jsonl, plain, put, tar
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


REFUSED = [(source, files, words) for source, rows in ROWS["refused"].items() for files, words in rows]


def assert_refused(source, origin, out, words, **settings):
    """By `prepare`, in one line, and nothing is created."""
    with pytest.raises(InputError) as error:
        prepare(source, origin, out, PrepSettings(**settings), processes=1)
    assert_says(str(error.value), words, origin if origin.is_dir() else origin.parent)
    assert not out.exists()


@pytest.mark.parametrize(("source", "files", "words"), REFUSED, ids=[f"{row[0]}: {row[2][:60]}" for row in REFUSED])
def test_a_source_is_refused(tmp_path, source, files, words):
    files, origin = files_of(files), tmp_path / "in"
    if "vocab" in str(files):
        pytest.importorskip("tokenizers")
    put(origin, files)
    if source == "csv" and len(files) == 1 and not words.startswith("{in}: is a folder"):
        origin /= next(iter(files))
    assert_refused(source, origin, tmp_path / "out", words)


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
LABELS, SHAPE = "has labels that are not whole numbers of", "is not an idx file of bytes with"
IMAGES, OF_TRAIN = "t10k-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
GZIPPED, SAMPLE = gzip.compress(idx(layouts.TRAIN)), {"a.jpg": ".", "a.cls": "0"}
PAIRS = [("neutral", "a", "b")]
PACKED = gzip.compress(plain(PAIRS).encode())
LIST, FOLDS, MESSY = "list of as many labels", "fold_indices.txt", b"n00000001 \xe4, path, label\n"


def cut(*sizes):
    return [
        lambda data, size=size: data[: size if isinstance(size, int) else int(size * len(data))] for size in sizes
    ]


def damaged(where: int):
    return lambda data: data[:where] + b"\xff" + data[where + 1 :]


# By source, and what makes it whole where that is not its layout: a file, its content, and words of the line.
DAMAGED = {
    "mnist": [
        *((IMAGES, idx(5, 28, 28)[:size], f"{IMAGES}: {SHAPE}") for size in (0, 3, 4, 10, 16, -1)),
        (IMAGES, idx(5, 28, 28) + b"\0", f"{IMAGES}: {SHAPE}"),
        (IMAGES, idx(5, 28, 28, kind=9), f"{IMAGES}: {SHAPE}"),  # bytes with a sign
        (OF_TRAIN, GZIPPED[:-9], f"{OF_TRAIN}: cannot be decompressed"),
        (OF_TRAIN, damaged(10)(GZIPPED), f"{OF_TRAIN}: cannot be decompressed"),
        (OF_TRAIN, idx(layouts.TRAIN - 1), "the train files have shapes"),
        (IMAGES, idx(5, 28, 27), "the test files have shapes"),
        ("train-images-idx3-ubyte.gz", idx(layouts.TRAIN, 27, 28), "the train files have shapes"),
        ("t10k-labels-idx1-ubyte.gz", idx(5, value=10), f"test file: {LABELS} 0 to 9"),
        *(
            (f"train-{kind}-ubyte.gz", gzip.compress(idx(*shape, most=6272)), f"{SHAPE} {axes} axes, or is cut short")
            for kind, axes in (("images-idx3", 3), ("labels-idx1", 1))
            for shape in ([1] * 64, [0] * 65, [65_536] * 4, [8, 784], [])
        ),
    ],
    "svhn": [
        *(("train_32x32.mat", mat(True, X=NOISE, y=ONES)[:size], "train_32x32") for size in (0, 100, 128, 130, 300)),
        ("train_32x32.mat", cut(0.5)[0](mat(True, X=NOISE, y=ONES)), "train_32x32"),
        *(
            ("train_32x32.mat", mat(X=PIXELS, y=labels), f"train_32x32.mat: {LABELS} 1 to 10")
            for labels in (
                *(ONES * factor for factor in (11, 0, 1.5, np.nan, 1j)),
                np.array(list("abcd"), object),
                np.array([[1], "a", [2], 3], object),
            )
        ),
        *(
            ("train_32x32.mat", mat(**arrays), "train_32x32.mat: has no uint8 X")
            for arrays in (
                {"X": PIXELS.astype(np.int16), "y": ONES},
                {"X": PIXELS},
                {"y": ONES},
            )
        ),
        *(
            ("train_32x32.mat", sized(*shape), "cannot be read as a MATLAB file")
            for shape in ((-32, 32, 3, 4), (-32, -32, 3, 4), (2**30, 2**30, 2**30, 4))
        ),
    ],
    "stl10": [
        ("train_X.bin", b"x", "not a multiple of 27648"),
        ("train_X.bin", b"", "has 0 bytes, not a multiple of 27648"),
        ("test_y.bin", b"\1" * 6, "y.bin: must hold a label of 1 to 10 for each of the 5 "),
        ("test_y.bin", b"\1", "test_y.bin: must hold a label"),
        ("test_y.bin", bytes(5), f"test_y.bin: {LABELS} 1 to 10"),
        *(
            (FOLDS, line, f"{FOLDS}: line {number} must hold indices of 0 to 7")
            for line, number in (
                *((line, 1) for line in ("8\n", "9" * 30, "-1", "²")),
                ("0\n\n1\n", 2),
                (b"0 1\n0 \xff\n", 2),
            )
        ),
    ],
    "stl10 stl10_with_archive": [("train_y.bin", None, "lacks train_y.bin; unpack stl10_binary.tar.gz first")],
    "cifar10": [
        *(
            ("data_batch_2.bin", bytes(size), f"data_batch_2.bin: has {size} bytes, not a multiple of")
            for size in (0, 3072, 3 * 3073 - 1, 3 * 3073 + 1)
        ),
        ("batches.meta.txt", b"\xff\xfe", "batches.meta.txt: does not list the names of the classes"),
    ],
    "cifar10 pickles": [
        ("data_batch_3", None, "data_batch_3: cannot be read"),
        ("data_batch_3", b"", "data_batch_3: is not one of CIFAR's pickles"),
        ("data_batch_3", pickle.dumps(Attack()), "it needs ... .print"),
        ("data_batch_3", pickle.dumps([1]), "it holds a list"),
        ("data_batch_3", pickle.dumps({"labels": [1]}), "data_batch_3: is not a batch"),
        # an instruction to keep a value under a number of billions, which would take that memory
        (
            "data_batch_1",
            b"\x80\x02Nr\xff\xff\xff\x7f.",
            "is not one of CIFAR's pickles (it numbers a value 2147483647",
        ),
        *(
            ("data_batch_1", batch(labels=labels), f"data_batch_1: ... {LIST}")
            for labels in (None, [[0], [1], [2], [3]], {"a": 1}, "0123", 3)
        ),
        *(
            ("data_batch_1", batch(labels=labels), f"data_batch_1: {LABELS} 0 to 9")
            for labels in (
                [0, [1, 2], 3, 4],
                [0, 1.5, 2, 3],
                [0, float("nan"), 1, 2],
                [None] * 4,
                ["0", "1", "2", "3"],
                [True, False, True, False],
                [0, 1, 2, 10**30],
                [0, 1, 2, 10],
            )
        ),
        *(
            ("data_batch_1", batch(data=data), f"data_batch_1: is not a batch of images of 3072 bytes and a {LIST}")
            for data in (
                np.zeros((4, 3072), np.int16),
                np.zeros((4, 3071), np.uint8),
                np.zeros((3, 3072), np.uint8),
                [[0] * 3072] * 4,
            )
        ),
        *(
            ("data_batch_1", batch(labels=labels), "data_batch_1: ... ; download it again")
            for labels in (
                pointers("V8", (3, "|", None, ("f",), {"f": (np.dtype("O"), 0)}, 8, 1, 1)),
                pointers("O8", (3, "|", None, None, None, -1, -1, 1)),
                pointers("i8", (3, "|", None, ("f",), {"f": (np.dtype("O"), 0)}, 8, 1, 63)),
                pointers("i8", (3, "<", None, None, None, -1, -1, 0), bytes(9)),
                pointers("M8", (4, "<", None, None, None, -1, -1, 0, ({}, (b"D", 1, 1, 1)))),
                Reduced(np.dtype, ("i8",), None),
                bytearray(8),
            )
        ),
        *(
            ("batches.meta", pickle.dumps(names, 2), "batches.meta: does not list the names of the classes")
            for names in ({"other": 1}, {"label_names": 5}, {"label_names": [["a"]]}, {"label_names": []})
        ),
    ],
    "cifar10 -": [
        ("cifar-10-python.tar.gz", sparse_tar("cifar-10-batches-py/data_batch_1", "gz"), "data_batch_1 is sparse"),
    ],
    "csv -": [
        ("list.csv", MESSY, "list.csv: cannot be read as a .csv"),
        ("list.jsonl", MESSY, "list.jsonl: cannot be read as a .jsonl"),
        ("list.csv", f"path,label,split\na,b,{'x' * 101}\n", "line 2: split 'xxx ... is no name such as train"),
    ],
    "csv numbers": [
        ("list.jsonl", f'{{"path": "a", "age": {wrong}}}', "line 1: age is ... , not a finite number")
        for wrong in ("true", "null", "[1]", "1e39", "-1e39", "NaN", f"1{'0' * 400}")
    ],
    "mnli -": [
        ("train.tsv", MESSY, "train.tsv: cannot be read ... decode byte 0xe4"),
        *(
            ("train.jsonl", f"{jsonl(PAIRS)}{line}\n", "train.jsonl: line 2 is not JSON")
            for line in ("[" * 100_000, '{"a":' * 100_000, '{"a":' + "9" * 10_000 + "}", jsonl(PAIRS)[:-9])
        ),
        *(
            (name, packed, f"{name}: cannot be read")
            for name in ("train.TSV", "Train.tsv.GZ", "train.tsv")
            for packed in (PACKED[:-9], damaged(10)(PACKED), PACKED[:-8] + bytes(8))
        ),
    ],
    "webdataset -": [
        ("train.tar", tar({"a.json": "[" * 10**5, "a.jpg": "."}), 'a.json holds no label such as {"label": 3}'),
        *(("train.tar", data, "train.tar: is cut short") for data in (tar(SAMPLE)[:1000], b"", bytes(1023))),
        ("train.tar", bytes(1024), "train.tar: holds no samples"),  # two blocks end a tar
        *(
            ("train.tar", pack(tar(SAMPLE)), "train.tar: is compressed; decompress it")
            for pack in (gzip.compress, bz2.compress, lzma.compress, b"\x28\xb5\x2f\xfd".__add__)
        ),
        *(
            ("train.tar", tar(SAMPLE | {"b.jpg": link}), "train.tar: b.jpg is a link or sparse; pack it with")
            for link in (Symlink("a.jpg"), Link("nothing"))
        ),
        ("train.tar", gnu_sparse(), "train.tar: a.jpg is a link or sparse; pack it with"),
        ("train.tar", damaged_sparse(), "train.tar: cannot be read as an uncompressed tar (not enough values"),
    ],
    "imagenet -": [
        ("wnids.txt", MESSY, "wnids.txt: cannot be read ... decode byte 0xe4"),
        *(
            (TRAIN, tar({"n01440764.tar": kind("/etc/passwd")}), f"{TRAIN}: cannot be read as an uncompressed tar")
            for kind in (Symlink, Link, Fifo)
        ),
    ],
    "imagenet tars": [
        *((name, change, name) for name in (TRAIN, VAL, DEVKIT) for change in cut(0, 1 / 9, 1 / 3)),
        ("wnids.txt", "\n".join(WNIDS[1:]), "holds n01440764, which is not in {in}/wnids.txt"),
        ("train/", "", "and the folder train; keep only one of them"),
        (DEVKIT, None, f"{DEVKIT}: is missing"),
        *((VAL, val_tar(*range(1, n)), f"holds {n - 1} images, and {DEVKIT} labels 5") for n in (7, 5)),
        *(
            (VAL, val_tar(1, 2, 3, 4, wrong), f"has no label for ILSVRC2012_val_0000000{wrong}.JPEG")
            for wrong in (6, 0, "x")
        ),
    ],
    "imagenet flat": [
        ("val/ILSVRC2012_val_00000006.JPEG", "x", f"val_00000006.JPEG: has no label in {{in}}/{DEVKIT}"),
        (
            "val/ILSVRC2012_val_00000001.JPEG",
            "x",
            "val_00000001.JPEG: is of class n01443537, which the training split lacks",
        ),
    ],
    "imagenet val_alone": [
        ("wnids.txt", "n01440764\nn01484850", f"{VAL}: holds n01443537, which is not in {{in}}/wnids.txt"),
        *(
            (
                DEVKIT,
                tar({"ILSVRC2012_validation_ground_truth.txt": link, "meta.mat": link}, "gz"),
                f"{DEVKIT}: is not ImageNet's devkit",
            )
            for link in (Symlink("nowhere"), Symlink("meta.mat"), Fifo(""))
        ),
        (DEVKIT, sparse_tar("data/meta.mat", "gz"), "data/meta.mat is sparse"),
    ],
}


CASES = [(key, *row) for key, rows in DAMAGED.items() for row in rows]


@pytest.mark.parametrize(
    ("key", "file", "data", "words"), CASES, ids=[f"{key} {row[-1][:50]}" for key, *row in CASES]
)
def test_damage_is_refused_with_its_file(tmp_path, key, file, data, words, capsys):
    source, _, make = key.partition(" ")
    folder = tmp_path / "in"
    folder.mkdir()
    (BINARY[make] if make else layouts.LAYOUTS[source][1])(folder)
    put(folder, {file: data})
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
