"""MNIST, SVHN, STL-10 and CIFAR from files in their official layouts, the real ones if at hand; and the digits."""

import itertools
import pickle
import struct
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat
from sklearn.datasets import load_digits
from torchvision import datasets
from torchvision.datasets.imagenet import ARCHIVE_META

from tests.data_prep.writing import put
from tests.layouts import batches, mnist, planes, stl10, svhn
from tests.layouts import cifar10 as cifar10_binary
from tests.layouts import cifar100 as cifar100_binary
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import arrays, cifar, imagenet, read_source
from widemix.errors import InputError
from widemix.formats.beton import RAW, open_beton

REAL = Path(__file__).parents[3] / "shared" / "data"
RNG = np.random.RandomState(0)
SETTINGS = PrepSettings()
STL10 = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")


def listed(split):
    """Pixels [n, height, width, 3] and labels of a split, sample by sample."""
    samples = [split[i] for i in range(len(split))]
    return np.stack([sample.image for sample in samples]), [sample.label for sample in samples]


def assert_holds(split, images, labels):
    found, found_labels = listed(split)
    assert np.array_equal(found, images)
    assert found_labels == list(labels)


def some(count, side, classes=10):
    return RNG.randint(0, 256, (count, side, side, 3), np.uint8), RNG.randint(0, classes, count)


# What writes data, {split: (images, labels)}, as it was published; tests/layouts.py has the others.


def cifar10_python(folder, data):
    for name, (images, labels) in batches(data).items():
        given = labels if name == "test_batch" else labels.tolist()  # which any may be
        batch = {"batch_label": b"x", "labels": given, "data": planes(images).reshape(-1, 3072)}
        put(folder, {name: pickle.dumps(batch, 2)})
    put(folder, {"batches.meta": pickle.dumps({"label_names": [f"class{i}" for i in range(10)]}, 2)})


def cifar100_python(folder, data):
    for name, (images, fine) in data.items():
        batch = {"fine_labels": fine.tolist(), "coarse_labels": [3] * len(fine)}
        put(folder, {name: pickle.dumps(batch | {"data": planes(images).reshape(-1, 3072)}, 2)})
    put(folder, {"meta": pickle.dumps({"fine_label_names": [f"class{i}" for i in range(100)]}, 2)})


def packed(write, folder, tar, where, data):
    """In a tar, which is the origin itself or in it, with the official folder."""
    (where / "unpacked" / folder).mkdir(parents=True)
    write(where / "unpacked" / folder, data)
    with tarfile.open(where / tar, "w:gz") as archive:
        archive.add(where / "unpacked" / folder, folder)


PYTHON, BINARY = ("cifar-10-batches-py", "cifar-10-python.tar.gz"), ("cifar-10-batches-bin", "cifar-10-binary.tar.gz")
# Source, what writes it, where it is written and read, and how many of its files have a published sum.
FORMS = [
    *(
        ("mnist", partial(mnist, suffix=suffix, other=other), place, ".", 4 if suffix else 0)
        for (place, suffix), other in itertools.product(
            [(".", ".gz"), ("MNIST/raw", ""), ("MNIST/raw", ".gz")],
            ["", "t10k-images-idx3-ubyte", "train-labels-idx1-ubyte"],  # as browsers unpack what they download
        )
    ),
    *(
        ("svhn", partial(svhn, compress=compress, kind=kind), place, ".", 2)
        for compress, kind, place in itertools.product([True, False], [np.uint8, np.float64], [".", "svhn"])
    ),
    *(("stl10", stl10, place, ".", 4) for place in (".", "stl10_binary")),
    *(
        ("cifar10", write, folder, origin, known)
        for write, (folder, _), known in ((cifar10_python, PYTHON, 7), (cifar10_binary, BINARY, 0))
        for origin in (".", folder)
    ),
    *(
        ("cifar10", partial(packed, write, *names), ".", origin, known)
        for write, names, known in ((cifar10_python, PYTHON, 7), (cifar10_binary, BINARY, 1))
        for origin in (".", names[1])
    ),
    ("cifar100", cifar100_python, ".", ".", 3),
    ("cifar100", cifar100_binary, ".", ".", 0),
]


@pytest.mark.parametrize(
    ("source", "write", "place", "origin", "known"),
    FORMS,
    ids=[f"{row[0]} {number}" for number, row in enumerate(FORMS)],
)
def test_every_form_is_read(tmp_path, source, write, place, origin, known, capsys):
    side, classes = {"mnist": 28, "stl10": 96}.get(source, 32), 100 if source == "cifar100" else 10
    count = 400 if source == "svhn" else 15  # 1.2 MB is more than a piece
    data = {"train": some(count, side, classes), "test": some(2, side, classes)}
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    write(tmp_path / place, data)
    dataset = read_source(source, tmp_path / origin, SETTINGS)
    assert list(dataset.splits) == ["train", "test"]
    for split, (images, labels) in data.items():
        assert_holds(dataset.splits[split], np.stack([images[..., 0]] * 3, 3) if side == 28 else images, labels)
    names = {"stl10": STL10, "mnist": tuple("0123456789"), "svhn": tuple("0123456789")}
    assert dataset.classes == names.get(source, tuple(f"class{i}" for i in range(classes)))
    assert len(dataset.exceptions) == known
    said = capsys.readouterr().err
    assert said.count("instead of") == min(known, 1)
    assert known < 2 or f", and {known - 1} other files are not either; read all the same" in said


def test_of_several_forms_the_first_is_read(tmp_path):
    """Files in the folder itself before those in the official one, these before a tar; and CIFAR's python version."""
    data, others = ({"train": some(5, 32), "test": (some(1, 32)[0], np.array([label]))} for label in (3, 7))

    def test_label(source):
        return listed(read_source(source, tmp_path, SETTINGS).splits["test"])[1]

    inner = {"mnist": (mnist, "MNIST/raw"), "svhn": (svhn, "svhn"), "stl10": (stl10, "stl10_binary")}
    for source, (write, folder) in inner.items():
        side = {"mnist": 28, "stl10": 96}.get(source, 32)
        for place, label in ((folder, 7), (".", 3)):
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
            write(tmp_path / place, {"train": some(2, side), "test": (some(1, side)[0], np.array([label]))})
            assert test_label(source) == [label]
    with pytest.raises(InputError, match=r"holds none of train_32x32\.mat, test_32x32\.mat, extra_32x32\.mat"):
        read_source("svhn", tmp_path / "stl10_binary", SETTINGS)
    (tmp_path / BINARY[0]).mkdir()
    cifar10_binary(tmp_path / BINARY[0], others)
    assert test_label("cifar10") == [7]
    cifar10_python(tmp_path / "new", data)
    cifar10_python(tmp_path / "old", others)
    with tarfile.open(tmp_path / PYTHON[1], "w:gz") as archive:  # of which only what is in its own folder is read
        archive.add(tmp_path / "new", PYTHON[0])
        archive.add(tmp_path / "old", "copy")
    assert test_label("cifar10") == [3]
    (tmp_path / "old").rename(tmp_path / PYTHON[0])
    assert test_label("cifar10") == [7]
    for path in (tmp_path / "new").iterdir():
        path.rename(tmp_path / path.name)
    assert test_label("cifar10") == [3]


def test_digits_are_scikit_learns_each_fifth_for_the_test():
    scans, splits = load_digits(), arrays.read_digits(None).splits
    grey = (scans.images * 255 / 16).round().astype(np.uint8)
    order = [number for digit in range(10) for number in np.flatnonzero(scans.target == digit).tolist()]
    for split, numbers in (("test", set(order[::5])), ("train", set(order) - set(order[::5]))):
        chosen = sorted(numbers)
        assert_holds(splits[split], np.stack([grey[chosen]] * 3, 3), scans.target[chosen])
        assert splits[split][3].name == f"{split}[3]"


@pytest.mark.parametrize("name", ["mnist", "svhn"])
def test_real_files_are_the_published_ones(name):
    if not (REAL / name).is_dir():
        pytest.skip(f"needs the real files in ../shared/data/{name}")
    dataset = read_source(name, REAL / name, PrepSettings())
    if name == "mnist":
        assert dataset.exceptions == ()
        # Counts of each digit as published (LeCun's page, and every tutorial since).
        counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert np.bincount(dataset.splits["train"].labels).tolist() == counts
        assert len(dataset.splits["test"]) == 10_000
    else:
        theirs = loadmat(REAL / "svhn" / "train_32x32.mat")
        assert_holds(dataset.splits["train"], theirs["X"].transpose(3, 0, 1, 2), theirs["y"][:, 0] % 10)


def test_stl10_has_folds_and_unlabelled_images_and_svhn_any_split(tmp_path):
    data = {"train": some(6, 96), "test": some(2, 96)}
    stl10(tmp_path, data)
    put(tmp_path, {"unlabeled_X.bin": (tmp_path / "test_X.bin").read_bytes(), "fold_indices.txt": "5 0 \n1 2 3\n"})
    dataset = arrays.read_stl10(tmp_path)
    assert list(dataset.splits) == ["train", "test", "fold0", "fold1", "unlabeled"]
    assert dataset.exceptions[-1]["file"] == "unlabeled_X.bin"
    assert_holds(dataset.splits["fold0"], *(column[[5, 0]] for column in data["train"]))
    assert_holds(dataset.splits["unlabeled"], data["test"][0], [-1, -1])
    (tmp_path / "svhn").mkdir()
    svhn(tmp_path / "svhn", {"extra": (pixels := some(3, 32)[0], np.array([1, 0, 9]))})
    ((name, extra),) = arrays.read_svhn(tmp_path).splits.items()
    assert name == "extra"
    assert_holds(extra, pixels, [1, 0, 9])


def by_python_2(images, labels):
    """A batch as Python 2 and NumPy 1 wrote the official ones: texts and pixels are strings of bytes."""
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    shape, data = struct.pack("<cHcH", b"M", len(images), b"M", 3072) + b"\x86", planes(images).tobytes()
    array += b"(K\x01" + shape + kind + b"\x89T" + struct.pack("<i", len(data)) + data + b"tb"
    numbers = b"](" + b"".join(b"K%c" % label for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


def test_the_official_pickles_are_of_python_2(tmp_path):
    data = {"train": some(15, 32), "test": some(2, 32)}
    for name, (images, labels) in batches(data).items():
        (tmp_path / name).write_bytes(by_python_2(images, labels))
    names = b"".join(b"U\x06class%d" % number for number in range(10))
    (tmp_path / "batches.meta").write_bytes(b"\x80\x02}U\x0blabel_names](" + names + b"es.")
    for split, (images, labels) in data.items():
        assert_holds(cifar.cifar10(tmp_path).splits[split], images, labels)


def test_official_names_and_sums_are_those_that_torchvision_has():
    for ours, theirs in ((cifar.CIFAR10_PYTHON, datasets.CIFAR10), (cifar.CIFAR100_PYTHON, datasets.CIFAR100)):
        assert (ours.folder, ours.archive) == (theirs.base_folder, theirs.filename)
        meta = (theirs.meta["filename"], theirs.meta["md5"])
        assert [*ours.files.items()] == [*map(tuple, theirs.train_list + theirs.test_list), meta]
    assert [*arrays.GZ.items()] == datasets.MNIST.resources
    assert {split: [*found] for split, found in arrays.SVHN.items()} == {
        split: found[1:] for split, found in datasets.SVHN.split_list.items()
    }
    assert datasets.STL10.base_folder == arrays.STL10_FOLDER
    assert dict(datasets.STL10.train_list + datasets.STL10.test_list) == arrays.STL10
    assert dict(ARCHIVE_META.values()) == imagenet.MD5
    names = {"train": imagenet.TRAIN, "val": imagenet.VAL, "devkit": imagenet.DEVKIT}
    assert names == {split: name for split, (name, _) in ARCHIVE_META.items()}


def test_a_cut_tar_is_refused(tmp_path):
    def pack():
        with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "cifar-10-batches-py", "cifar-10-batches-py")
        return (tmp_path / "c.tar.gz").read_bytes()

    cifar10_python(tmp_path / "cifar-10-batches-py", {"train": some(15, 32), "test": some(2, 32)})
    whole = pack()
    (tmp_path / "cifar-10-batches-py/data_batch_4").unlink()
    lacking = pack(), "lacks cifar-10-batches-py/data_batch_4; download it again"
    cuts = (0, 10, len(whole) // 2, len(whole) * 9 // 10)
    for data, words in (lacking, *((whole[:size], "(cannot be read as a tar|lacks)") for size in cuts)):
        (tmp_path / "c.tar.gz").write_bytes(data)
        with pytest.raises(InputError, match=rf"c\.tar\.gz: {words}"):
            cifar.cifar10(tmp_path / "c.tar.gz")


def test_arrays_are_prepared_raw(tmp_path):
    data = {"train": some(15, 32), "test": some(2, 32)}
    cifar10_python(tmp_path / "c", data)
    manifest = prepare("cifar10", tmp_path / "c", tmp_path / "out", PrepSettings())
    assert len(manifest.exceptions) == 7
    beton = open_beton(tmp_path / "out" / "test.beton")
    images, labels = data["test"]
    assert beton.mode.tolist() == [RAW, RAW]
    assert beton.label.tolist() == labels.tolist()
    for offset, image in zip(beton.offset, images, strict=True):
        assert beton.bytes[offset:][:3072].tobytes() == image.tobytes()
