"""MNIST, SVHN, STL-10 from files in their official layouts, the real ones where they are at hand; and the digits."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from sklearn.datasets import load_digits

from widemix.data_prep import digits, mnist, stl10, svhn
from widemix.data_prep.official import check_labels, check_md5, warn_of
from widemix.data_prep.svhn import read_arrays
from widemix.errors import InputError

REAL = Path(__file__).parents[3] / "shared" / "data"
RNG = np.random.RandomState(0)


def listed(split):
    """Pixels [n, height, width, 3] and labels of a split, sample by sample."""
    samples = [split[i] for i in range(len(split))]
    return np.stack([sample.image for sample in samples]), [sample.label for sample in samples]


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
def test_mnist_in_every_form(tmp_path, mnist_data, place, suffix):
    write_mnist(tmp_path / "m" / place, *mnist_data, suffix) if place != "." else write_mnist(
        tmp_path / "m", *mnist_data
    )
    dataset = mnist.read(tmp_path / "m")
    for split, (grey, labels) in zip(("train", "test"), mnist_data, strict=True):
        found, found_labels = listed(dataset.splits[split])
        assert all(np.array_equal(found[..., c], grey) for c in range(3))
        assert found_labels == labels.tolist()
    assert len(dataset.exceptions) == (4 if suffix else 0)


def test_mnist_files_are_compressed_or_not_whatever_their_names(tmp_path, mnist_data):
    """Browsers unpack what they download, and leave its name."""
    write_mnist(tmp_path / "m", *mnist_data)
    path = tmp_path / "m/t10k-images-idx3-ubyte.gz"
    path.write_bytes(gzip.decompress(path.read_bytes()))
    assert np.array_equal(listed(mnist.read(tmp_path / "m").splits["test"])[0][..., 0], mnist_data[1][0])
    write_mnist(tmp_path / "n", *mnist_data, "")
    path = tmp_path / "n/train-labels-idx1-ubyte"
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert listed(mnist.read(tmp_path / "n").splits["train"])[1] == mnist_data[0][1].tolist()


def test_cut_mnist_files_are_named(tmp_path, mnist_data):
    write_mnist(tmp_path / "m", *mnist_data, "")
    path = tmp_path / "m" / "t10k-images-idx3-ubyte"
    whole = path.read_bytes()
    for cut in (0, 3, 4, 10, 16, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="t10k-images-idx3-ubyte: is not an idx file"):
            mnist.read(tmp_path / "m")
    for other in (whole + b"\0", whole[:2] + b"\x09" + whole[3:]):  # a byte too many; bytes with a sign
        path.write_bytes(other)
        with pytest.raises(InputError, match="t10k-images-idx3-ubyte: is not an idx file"):
            mnist.read(tmp_path / "m")
    write_mnist(tmp_path / "gz", *mnist_data)
    path = tmp_path / "gz/train-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole[:10] + b"\xff" + whole[11:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"train-labels-idx1-ubyte\.gz: cannot be decompressed"):
            mnist.read(tmp_path / "gz")


def test_mnist_files_that_do_not_fit_together_are_refused(tmp_path):
    """As many images as labels, of 28 x 28 pixels."""
    for train, test in (((5, 28, 28), (4, 28, 28)), ((4, 28, 28), (3, 28, 27)), ((4, 27, 28), (3, 28, 28))):
        parts = [(np.zeros(shape, np.uint8), np.zeros(n, np.uint8)) for shape, n in ((train, 4), (test, 3))]
        write_mnist(tmp_path / f"{train}{test}", *parts)
        split = "test" if train == (4, 28, 28) else "train"
        with pytest.raises(InputError, match=rf"the {split} files have shapes"):
            mnist.read(tmp_path / f"{train}{test}")
    parts = [(np.zeros((n, 28, 28), np.uint8), np.full(n, label, np.uint8)) for n, label in ((4, 9), (3, 10))]
    write_mnist(tmp_path / "labels", *parts)
    with pytest.raises(InputError, match="the test file: has labels that are not whole numbers of 0 to 9"):
        mnist.read(tmp_path / "labels")


def test_the_folder_itself_comes_before_the_official_one_in_it(tmp_path, mnist_data):
    write_mnist(tmp_path / "m", *mnist_data)
    write_mnist(tmp_path / "m/MNIST/raw", *mnist_data[::-1])
    assert listed(mnist.read(tmp_path / "m").splits["train"])[1] == mnist_data[0][1].tolist()


@pytest.mark.parametrize(
    "values", [[[1, 2]], [[1], [2, 3]], [], 5, ["1"], [True], [1.5], [np.nan], [2**70], [0], [4]]
)
def test_labels_that_are_none_of_a_dataset_are_refused(values):
    with pytest.raises(InputError, match="x: has labels that are not whole numbers of 1 to 3; download it again"):
        check_labels("x", values, 1, 3)


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.float64, list])
def test_labels_of_any_type_become_integers_of_64_bits(kind):
    labels = check_labels("x", [1, 3] if kind is list else np.array([1, 3], kind), 1, 3)
    assert (labels.dtype, labels.tolist()) == (np.int64, [1, 3])


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


def test_the_digits_are_scikit_learns_and_each_fifth_of_a_class_is_for_the_test():
    scans, splits = load_digits(), digits.read(None).splits
    grey = (scans.images * 255 / 16).round().astype(np.uint8)
    order = [number for digit in range(10) for number in np.flatnonzero(scans.target == digit).tolist()]
    for split, numbers in (("test", set(order[::5])), ("train", set(order) - set(order[::5]))):
        found, labels = listed(splits[split])
        chosen = sorted(numbers)
        assert np.array_equal(found, np.stack([grey[chosen]] * 3, 3))
        assert labels == scans.target[chosen].tolist()
        assert splits[split][3].name == f"{split}[3]"


def test_mnist_is_the_official_one(tmp_path):
    if not (REAL / "mnist").is_dir():
        pytest.skip("needs the real MNIST files in ../shared/data/mnist")
    dataset = mnist.read(REAL / "mnist")
    assert dataset.exceptions == ()
    # Counts of each digit as published (LeCun's page, and every tutorial since).
    assert np.bincount(dataset.splits["train"].labels).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    assert len(dataset.splits["test"]) == 10_000


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
    dataset = svhn.read(tmp_path)
    assert list(dataset.splits) == ["train", "test"]
    assert [found["file"] for found in dataset.exceptions] == ["train_32x32.mat", "test_32x32.mat"]
    for exception, md5 in zip(
        dataset.exceptions, ("e26dedcc434d2e4c54c9b2d4a06d8373", "eb5a983be6a315427106f1b164d9cef3"), strict=True
    ):
        assert exception["rule"].endswith(f"instead of {md5}")
    for split, (images, labels) in data.items():
        found, found_labels = listed(dataset.splits[split])
        assert np.array_equal(found, images)
        assert found_labels == [0 if label == 10 else label for label in labels]


def test_svhn_and_stl10_in_their_own_folders(tmp_path, stl_data):
    """Any of SVHN's splits alone; a file above the folder comes first."""
    for name in ("svhn", "stl10_binary"):
        (tmp_path / name).mkdir()
    pixels = random_images(3, 32, 32)
    savemat(tmp_path / "svhn/extra_32x32.mat", {"X": pixels.transpose(1, 2, 3, 0), "y": [[1], [10], [9]]})
    (found,) = svhn.read(tmp_path).splits.items()
    assert found[0] == "extra"
    assert np.array_equal(listed(found[1])[0], pixels)
    assert listed(found[1])[1] == [1, 0, 9]
    savemat(tmp_path / "extra_32x32.mat", {"X": pixels.transpose(1, 2, 3, 0)[..., :1], "y": [[5]]})
    assert listed(svhn.read(tmp_path).splits["extra"])[1] == [5]
    before = {split: listed(found)[1] for split, found in stl10.read(tmp_path).splits.items()}
    for path in tmp_path.glob("t*_?.bin"):
        path.rename(tmp_path / "stl10_binary" / path.name)
    assert {split: listed(found)[1] for split, found in stl10.read(tmp_path).splits.items()} == before
    with pytest.raises(InputError, match=r"holds none of train_32x32\.mat, test_32x32\.mat, extra_32x32\.mat"):
        svhn.read(tmp_path / "stl10_binary")


def test_matlab_arrays_are_what_scipy_writes(tmp_path):
    types = ["i1", "u1", "i2", "u2", "i4", "u4", "f4", "f8", "i8", "u8"]
    arrays = {f"a{kind}": RNG.randint(0, 100, (2, 3, 5)).astype(kind) for kind in types}
    arrays |= {"tiny": np.array([[3]], np.uint8), "four": np.array([[1, 2, 3, 4]], np.uint8)}
    for compress in (True, False):
        savemat(tmp_path / "a.mat", arrays, do_compression=compress)
        found = read_arrays(tmp_path / "a.mat")
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            assert np.array_equal(found[name], array)
            assert found[name].dtype == array.dtype


def test_damaged_svhn_files_are_refused(tmp_path):
    path = tmp_path / "train_32x32.mat"
    savemat(path, {"X": random_images(3, 32, 32).transpose(1, 2, 3, 0), "y": np.ones((3, 1))}, do_compression=True)
    whole = path.read_bytes()
    for cut in (0, 100, 128, 130, 300, len(whole) // 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="train_32x32"):
            svhn.read(tmp_path)
    savemat(path, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.full((2, 1), 11)})
    with pytest.raises(InputError, match="not whole numbers of 1 to 10"):
        svhn.read(tmp_path)
    images = {kind: np.zeros((32, 32, 3, 2), kind) for kind in (np.int16, np.uint8)}
    for arrays in ({"X": images[np.int16], "y": np.ones((2, 1))}, {"X": images[np.uint8]}, {"y": np.ones((2, 1))}):
        savemat(path, arrays)
        with pytest.raises(InputError, match=r"train_32x32\.mat: has no uint8 X"):
            svhn.read(tmp_path)


def test_real_svhn_labels_match_its_images(tmp_path):
    if not (REAL / "svhn").is_dir():
        pytest.skip("needs the real SVHN file in ../shared/data/svhn")
    from scipy.io import loadmat

    dataset = svhn.read(REAL / "svhn")
    theirs = loadmat(REAL / "svhn" / "train_32x32.mat")
    found, labels = listed(dataset.splits["train"])
    assert np.array_equal(found, theirs["X"].transpose(3, 0, 1, 2))
    assert labels == [int(label) % 10 for label in theirs["y"][:, 0]]


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
    dataset = stl10.read(tmp_path)
    assert list(dataset.splits) == ["train", "test"]
    names = ["train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin"]
    assert [found["file"] for found in dataset.exceptions] == names
    assert " ".join(dataset.classes) == "airplane bird car cat deer dog horse monkey ship truck"
    for split, (images, labels) in stl_data.items():
        found, found_labels = listed(dataset.splits[split])
        assert np.array_equal(found, images)
        assert found_labels == labels.tolist()


def test_stl10_folds_and_unlabelled(tmp_path, stl_data):
    (tmp_path / "unlabeled_X.bin").write_bytes((tmp_path / "test_X.bin").read_bytes())
    (tmp_path / "fold_indices.txt").write_text("5 0 \n1 2 3\n")
    dataset = stl10.read(tmp_path)
    splits = dataset.splits
    assert list(splits) == ["train", "test", "fold0", "fold1", "unlabeled"]
    assert dataset.exceptions[-1]["file"] == "unlabeled_X.bin"
    images, labels = listed(splits["fold0"])
    assert np.array_equal(images, stl_data["train"][0][[5, 0]])
    assert labels == stl_data["train"][1][[5, 0]].tolist()
    assert listed(splits["unlabeled"])[1] == [-1, -1]


@pytest.mark.parametrize(
    ("name", "data", "word"),
    [
        ("train_X.bin", b"x", "not a multiple of 27648"),
        ("train_X.bin", b"", "has 0 bytes, not a multiple of 27648"),
        ("test_y.bin", b"\1\2\3", r"test_y\.bin: must hold a label of 1 to 10 for each of the 2 images"),
        ("test_y.bin", b"\1", r"test_y\.bin: must hold a label"),
        ("test_y.bin", b"\0\1", r"test_y\.bin: has labels that are not whole numbers of 1 to 10"),
        ("fold_indices.txt", b"6\n", "line 1 must hold indices of 0 to 5"),
        ("fold_indices.txt", b"0\n\n1\n", "line 2 must hold indices of 0 to 5"),
        ("fold_indices.txt", b"0 1\n0 \xff\n", "line 2 must hold indices of 0 to 5"),
    ],
)
def test_damaged_stl10_files_are_named(tmp_path, stl_data, name, data, word):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=word):
        stl10.read(tmp_path)


def test_missing_stl10_files_are_named(tmp_path, stl_data):
    (tmp_path / "train_y.bin").unlink()
    (tmp_path / "stl10_binary.tar.gz").touch()
    with pytest.raises(InputError, match=r"lacks train_y\.bin; unpack stl10_binary\.tar\.gz first"):
        stl10.read(tmp_path)
