"""MNIST, SVHN, STL-10 and CIFAR from files in their official layouts, the real ones if at hand; and the digits."""

import gzip
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat, savemat
from sklearn.datasets import load_digits
from torchvision import datasets
from torchvision.datasets.imagenet import ARCHIVE_META

from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import arrays, cifar, imagenet, read_source
from widemix.data_prep.sources.arrays import read_arrays
from widemix.data_prep.sources.official import check_md5, warn_of
from widemix.errors import InputError
from widemix.formats.beton import RAW, open_beton

REAL = Path(__file__).parents[3] / "shared" / "data"
RNG = np.random.RandomState(0)


def listed(split):
    """Pixels [n, height, width, 3] and labels of a split, sample by sample."""
    samples = [split[i] for i in range(len(split))]
    return np.stack([sample.image for sample in samples]), [sample.label for sample in samples]


def assert_holds(split, images, labels):
    found, found_labels = listed(split)
    assert np.array_equal(found, images)
    assert found_labels == list(labels)


def random_images(count, height, width):
    return RNG.randint(0, 256, (count, height, width, 3), np.uint8)


# MNIST


def write_mnist(folder, train, test, suffix=".gz"):
    folder.mkdir(parents=True)
    for prefix, (grey, labels) in (("train", train), ("t10k", test)):
        for name, array in ((f"{prefix}-images-idx3-ubyte", grey), (f"{prefix}-labels-idx1-ubyte", labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            body = head + array.tobytes()
            (folder / (name + suffix)).write_bytes(gzip.compress(body) if suffix else body)


@pytest.fixture
def mnist_data():
    return [(RNG.randint(0, 256, (n, 28, 28), np.uint8), RNG.randint(0, 10, n, np.uint8)) for n in (6, 4)]


@pytest.mark.parametrize(("place", "suffix"), [(".", ".gz"), ("MNIST/raw", ""), ("MNIST/raw", ".gz")])
@pytest.mark.parametrize("change", [None, "t10k-images-idx3-ubyte", "train-labels-idx1-ubyte"])
def test_mnist_in_every_form(tmp_path, mnist_data, place, suffix, change):
    """Also where one file is compressed or not other than its name says: browsers unpack what they download."""
    write_mnist(tmp_path / "m" / place, *mnist_data, suffix)
    if change:
        path = tmp_path / "m" / place / (change + suffix)
        path.write_bytes((gzip.decompress if suffix else gzip.compress)(path.read_bytes()))
    dataset = arrays.read_mnist(tmp_path / "m")
    for split, (grey, labels) in zip(("train", "test"), mnist_data, strict=True):
        assert_holds(dataset.splits[split], np.stack([grey] * 3, 3), labels)
    assert len(dataset.exceptions) == (4 if suffix else 0)


def test_the_folder_itself_comes_before_the_official_one(tmp_path, mnist_data):
    write_mnist(tmp_path / "m", *mnist_data)
    write_mnist(tmp_path / "m/MNIST/raw", *mnist_data[::-1])
    assert listed(arrays.read_mnist(tmp_path / "m").splits["train"])[1] == mnist_data[0][1].tolist()


def test_the_first_of_several_unofficial_files_is_named(capsys):
    found = tuple({"file": name, "rule": f"not {name}"} for name in "abc")
    assert warn_of(found) == found
    assert warn_of(found[:1]) == found[:1]
    assert capsys.readouterr().err.splitlines() == [
        "warning: a: not a, and 2 other files are not either; read all the same",
        "warning: a: not a; read all the same",
    ]


def test_a_file_with_the_official_sum_is_no_exception(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert check_md5(tmp_path / "abc", "900150983cd24fb0d6963f7d28e17f72") == ()
    rule = f"not the official file: MD5 900150983cd24fb0d6963f7d28e17f72 instead of {'0' * 32}"
    assert check_md5(tmp_path / "abc", "0" * 32) == ({"file": "abc", "rule": rule},)


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


# SVHN


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("label_type", [np.uint8, np.float64])
def test_svhn_is_what_scipy_writes(tmp_path, compress, label_type):
    data = {}
    for split, count in (("train", 400), ("test", 1)):  # 1.2 MB is more than a piece
        images = random_images(count, 32, 32)
        labels = RNG.randint(1, 11, count)
        matrix = {"X": images.transpose(1, 2, 3, 0), "y": labels.astype(label_type)[:, None]}
        savemat(tmp_path / f"{split}_32x32.mat", matrix, do_compression=compress)
        data[split] = images, labels
    dataset = arrays.read_svhn(tmp_path)
    assert list(dataset.splits) == ["train", "test"]
    assert [found["file"] for found in dataset.exceptions] == ["train_32x32.mat", "test_32x32.mat"]
    for split, (images, labels) in data.items():
        assert_holds(dataset.splits[split], images, labels % 10)


def test_svhn_and_stl10_in_their_own_folders(tmp_path, stl_data):
    """Any of SVHN's splits alone; a file above the folder comes first."""
    for name in ("svhn", "stl10_binary"):
        (tmp_path / name).mkdir()
    pixels = random_images(3, 32, 32)
    savemat(tmp_path / "svhn/extra_32x32.mat", {"X": pixels.transpose(1, 2, 3, 0), "y": [[1], [10], [9]]})
    (found,) = arrays.read_svhn(tmp_path).splits.items()
    assert found[0] == "extra"
    assert_holds(found[1], pixels, [1, 0, 9])
    savemat(tmp_path / "extra_32x32.mat", {"X": pixels.transpose(1, 2, 3, 0)[..., :1], "y": [[5]]})
    assert listed(arrays.read_svhn(tmp_path).splits["extra"])[1] == [5]
    before = {split: listed(found)[1] for split, found in arrays.read_stl10(tmp_path).splits.items()}
    for path in tmp_path.glob("t*_?.bin"):
        path.rename(tmp_path / "stl10_binary" / path.name)
    assert {split: listed(found)[1] for split, found in arrays.read_stl10(tmp_path).splits.items()} == before
    with pytest.raises(InputError, match=r"holds none of train_32x32\.mat, test_32x32\.mat, extra_32x32\.mat"):
        arrays.read_svhn(tmp_path / "stl10_binary")


def test_matlab_arrays_are_what_scipy_writes(tmp_path):
    types = ["i1", "u1", "i2", "u2", "i4", "u4", "f4", "f8", "i8", "u8"]
    matrices = {f"a{kind}": RNG.randint(0, 100, (2, 3, 5)).astype(kind) for kind in types}
    matrices |= {"tiny": np.array([[3]], np.uint8), "four": np.array([[1, 2, 3, 4]], np.uint8)}
    for compress in (True, False):
        savemat(tmp_path / "a.mat", matrices, do_compression=compress)
        found = read_arrays(tmp_path / "a.mat")
        assert set(found) == set(matrices)
        for name, array in matrices.items():
            assert np.array_equal(found[name], array)
            assert found[name].dtype == array.dtype


# STL-10: each channel by columns.


@pytest.fixture
def stl_data(tmp_path):
    data = {split: (random_images(n, 96, 96), RNG.randint(0, 10, n)) for split, n in (("train", 6), ("test", 2))}
    for split, (images, labels) in data.items():
        columns = [image[..., c].T.tobytes() for image in images for c in range(3)]
        (tmp_path / f"{split}_X.bin").write_bytes(b"".join(columns))
        (tmp_path / f"{split}_y.bin").write_bytes(bytes((labels + 1).tolist()))
    return data


def test_stl10(tmp_path, stl_data):
    dataset = arrays.read_stl10(tmp_path)
    assert list(dataset.splits) == ["train", "test"]
    names = ["train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin"]
    assert [found["file"] for found in dataset.exceptions] == names
    assert " ".join(dataset.classes) == "airplane bird car cat deer dog horse monkey ship truck"
    for split, (images, labels) in stl_data.items():
        assert_holds(dataset.splits[split], images, labels)
    (tmp_path / "unlabeled_X.bin").write_bytes((tmp_path / "test_X.bin").read_bytes())
    (tmp_path / "fold_indices.txt").write_text("5 0 \n1 2 3\n")
    dataset = arrays.read_stl10(tmp_path)
    splits = dataset.splits
    assert list(splits) == ["train", "test", "fold0", "fold1", "unlabeled"]
    assert dataset.exceptions[-1]["file"] == "unlabeled_X.bin"
    assert_holds(splits["fold0"], *(column[[5, 0]] for column in stl_data["train"]))
    assert listed(splits["unlabeled"])[1] == [-1, -1]


# CIFAR: an image is its red, then green, then blue values, row by row.


@pytest.fixture
def cifar_data():
    parts = {f"data_batch_{i}": (random_images(3, 32, 32), [i, 0, 9]) for i in range(1, 6)}
    return parts | {"test_batch": (random_images(2, 32, 32), [7, 8])}


def rows(images):
    return np.stack([np.concatenate([image[..., c].reshape(-1) for c in range(3)]) for image in images])


def write_cifar10_python(folder, data, protocol=2):
    folder.mkdir(parents=True)
    for name, (images, labels) in data.items():
        given = np.array(labels) if name == "test_batch" else labels  # which any may be
        batch = {"batch_label": b"x", "labels": given, "data": rows(images)}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    names = [f"class{i}" for i in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=protocol))


def write_cifar10_binary(folder, data):
    folder.mkdir(parents=True)
    for name, (images, labels) in data.items():
        records = [bytes([label]) + row.tobytes() for label, row in zip(labels, rows(images), strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    (folder / "batches.meta.txt").write_text("".join(f"class{i}\n" for i in range(10)) + "\n")


def assert_is_cifar10(dataset, data):
    *train, test = data.values()
    assert_holds(dataset.splits["train"], *map(np.concatenate, zip(*train, strict=True)))
    assert_holds(dataset.splits["test"], *test)
    assert dataset.classes == tuple(f"class{i}" for i in range(10))


@pytest.mark.parametrize("form", ["python", "binary"])
@pytest.mark.parametrize("where", ["folder", "above", "tar", "above tar"])
def test_cifar10_in_every_form(tmp_path, cifar_data, form, where, capsys):
    inner, tar = {
        "python": ("cifar-10-batches-py", "cifar-10-python.tar.gz"),
        "binary": ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    }[form]
    write = write_cifar10_python if form == "python" else write_cifar10_binary
    write(tmp_path / "a" / inner, cifar_data)
    with tarfile.open(tmp_path / tar, "w:gz") as archive:
        archive.add(tmp_path / "a" / inner, inner)
    origin = {"folder": f"a/{inner}", "above": "a", "tar": tar, "above tar": "."}[where]
    dataset = cifar.cifar10(tmp_path / origin)
    assert_is_cifar10(dataset, cifar_data)
    # There is an exception for every file whose official sum is known.
    known = 7 if form == "python" else int("tar" in where)
    assert len(dataset.exceptions) == known
    said = capsys.readouterr().err
    assert said.count("instead of") == min(known, 1)
    assert known < 2 or f", and {known - 1} other files are not either; read all the same" in said


@pytest.mark.parametrize("form", ["python", "binary"])
def test_cifar100_reads_fine_labels(tmp_path, form):
    data = {name: (random_images(4, 32, 32), [0, 99, 42, 7], [3, 1, 2, 0]) for name in ("train", "test")}
    names = [f"class{i}" for i in range(100)]
    for name, (images, fine, coarse) in data.items():
        if form == "python":
            batch = {"data": rows(images), "fine_labels": fine, "coarse_labels": coarse}
            (tmp_path / name).write_bytes(pickle.dumps(batch, protocol=2))
        else:
            records = [bytes(labels) + row.tobytes() for *labels, row in zip(coarse, fine, rows(images), strict=True)]
            (tmp_path / f"{name}.bin").write_bytes(b"".join(records))
    if form == "python":
        (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": names}, protocol=2))
    else:
        (tmp_path / "fine_label_names.txt").write_text("\n".join(names))
    dataset = cifar.cifar100(tmp_path)
    for name, (images, fine, _) in data.items():
        assert_holds(dataset.splits[name], images, fine)
    assert dataset.classes == tuple(names)


def by_python_2(images, labels):
    """A batch as Python 2 and NumPy 1 wrote the official ones: texts and pixels are strings of bytes."""
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    shape, data = struct.pack("<cHcH", b"M", len(images), b"M", 3072) + b"\x86", rows(images).tobytes()
    array += b"(K\x01" + shape + kind + b"\x89T" + struct.pack("<i", len(data)) + data + b"tb"
    numbers = b"](" + b"".join(b"K%c" % label for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


def test_the_official_pickles_are_of_python_2(tmp_path, cifar_data):
    for name, (images, labels) in cifar_data.items():
        (tmp_path / name).write_bytes(by_python_2(images, labels))
    names = b"".join(b"U\x06class%d" % number for number in range(10))
    (tmp_path / "batches.meta").write_bytes(b"\x80\x02}U\x0blabel_names](" + names + b"es.")
    assert_is_cifar10(cifar.cifar10(tmp_path), cifar_data)


def test_the_python_version_and_unpacked_files_come_first(tmp_path, cifar_data):
    """Of a tar only what is in its own folder is read."""
    others = {name: (images, [1] * len(labels)) for name, (images, labels) in cifar_data.items()}
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin", others)
    assert listed(cifar.cifar10(tmp_path).splits["test"])[1] == [1, 1]
    write_cifar10_python(tmp_path / "new", cifar_data)
    write_cifar10_python(tmp_path / "old", others)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "new", "cifar-10-batches-py")
        archive.add(tmp_path / "old", "copy")
    assert_is_cifar10(cifar.cifar10(tmp_path), cifar_data)
    (tmp_path / "old").rename(tmp_path / "cifar-10-batches-py")
    assert listed(cifar.cifar10(tmp_path).splits["test"])[1] == [1, 1]
    for path in (tmp_path / "new").iterdir():
        path.rename(tmp_path / path.name)
    assert_is_cifar10(cifar.cifar10(tmp_path), cifar_data)


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


def test_a_cut_tar_is_refused(tmp_path, cifar_data):
    def pack():
        with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "cifar-10-batches-py", "cifar-10-batches-py")
        return (tmp_path / "c.tar.gz").read_bytes()

    write_cifar10_python(tmp_path / "cifar-10-batches-py", cifar_data)
    whole = pack()
    (tmp_path / "cifar-10-batches-py/data_batch_4").unlink()
    lacking = pack(), "lacks cifar-10-batches-py/data_batch_4; download it again"
    cuts = (0, 10, len(whole) // 2, len(whole) * 9 // 10)
    for data, words in (lacking, *((whole[:size], "(cannot be read as a tar|lacks)") for size in cuts)):
        (tmp_path / "c.tar.gz").write_bytes(data)
        with pytest.raises(InputError, match=rf"c\.tar\.gz: {words}"):
            cifar.cifar10(tmp_path / "c.tar.gz")


def test_arrays_are_prepared_raw(tmp_path, cifar_data):
    write_cifar10_python(tmp_path / "c", cifar_data)
    manifest = prepare("cifar10", tmp_path / "c", tmp_path / "out", PrepSettings())
    assert len(manifest.exceptions) == 7
    beton = open_beton(tmp_path / "out" / "test.beton")
    images, labels = cifar_data["test_batch"]
    assert beton.mode.tolist() == [RAW, RAW]
    assert beton.label.tolist() == labels
    for offset, image in zip(beton.offset, images, strict=True):
        assert beton.bytes[offset:][:3072].tobytes() == image.tobytes()
