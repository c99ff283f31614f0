"""Sources with anything in them: one line each, and nothing is created."""

import gzip
import io
import json
import pickle
import struct
import tarfile

import numpy as np
import pytest
from scipy.io import savemat

from tests import layouts
from widemix.data_prep import imagenet_tars, mnist, official, svhn
from widemix.data_prep.cifar import cifar10
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError

PIXELS = np.zeros((32, 32, 3, 4), np.uint8)
LABELS = "has labels that are not whole numbers of"


def cifar(folder, names=None, **changes):
    """The pickles of CIFAR-10, with changes to each batch; None removes a key."""
    folder = folder / "cifar-10-batches-py"
    folder.mkdir()
    batch = {"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 3]} | changes
    body = pickle.dumps({key: value for key, value in batch.items() if value is not None}, 2)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(body)
    (folder / "batches.meta").write_bytes(pickle.dumps(names or {"label_names": [f"c{i}" for i in range(10)]}, 2))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (None, "a list of as many labels"),
        ([[0], [1], [2], [3]], "a list of as many labels"),
        ({"a": 1}, "a list of as many labels"),
        ("0123", "a list of as many labels"),
        (3, "a list of as many labels"),
        ([0, [1, 2], 3, 4], LABELS),
        ([0, 1.5, 2, 3], LABELS),
        ([0, float("nan"), 1, 2], LABELS),
        ([None] * 4, LABELS),
        (["0", "1", "2", "3"], LABELS),
        ([True, False, True, False], LABELS),
        ([0, 1, 2, 10**30], LABELS),
        ([0, 1, 2, 10], LABELS),
    ],
    ids=str,
)
def test_cifars_labels(tmp_path, labels, words):
    cifar(tmp_path, labels=labels)
    refused("cifar10", tmp_path, f"data_batch_1: .*{words}")


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((4, 3072), np.int16), np.zeros((4, 3071), np.uint8), np.zeros((3, 3072), np.uint8), [[0] * 3072] * 4],
)
def test_cifars_pixels(tmp_path, pixels):
    cifar(tmp_path, data=pixels)
    refused("cifar10", tmp_path, "data_batch_1: is not a batch of images of 3072 bytes and a list of as many labels")


def test_cifars_labels_as_an_array(tmp_path):
    cifar(tmp_path, labels=np.array([3, 0, 9, 1]))
    assert [sample.label for sample in cifar10(tmp_path).splits["test"]] == [3, 0, 9, 1]


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


@pytest.mark.parametrize(
    "labels",
    [
        pointers("V8", (3, "|", None, ("f",), {"f": (np.dtype("O"), 0)}, 8, 1, 1)),
        pointers("O8", (3, "|", None, None, None, -1, -1, 1)),
        pointers("i8", (3, "|", None, ("f",), {"f": (np.dtype("O"), 0)}, 8, 1, 63)),
        pointers("i8", (3, "<", None, None, None, -1, -1, 0), bytes(9)),
        pointers("M8", (4, "<", None, None, None, -1, -1, 0, ({}, (b"D", 1, 1, 1)))),
        Reduced(np.dtype, ("i8",), None),
        bytearray(8),
    ],
    ids=["field", "object", "numbers", "bytes", "dates", "dtype", "bytearray"],
)
def test_cifars_arrays_are_never_pointers(tmp_path, labels):
    cifar(tmp_path, labels=labels)
    refused(
        "cifar10",
        tmp_path,
        rf"data_batch_1: (is not one of CIFAR's pickles|is not a batch of images .*|{LABELS}) ?.*; download it again",
    )


def test_a_pickle_takes_no_more_memory_than_its_bytes(tmp_path):
    """Of an instruction to keep a value under a number of billions."""
    cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py/data_batch_1").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")
    refused("cifar10", tmp_path, "data_batch_1: is not one of CIFAR's pickles .it numbers a value 2147483647")


@pytest.mark.parametrize("names", [{"other": 1}, {"label_names": 5}, {"label_names": [["a"]]}, {"label_names": []}])
def test_cifars_names(tmp_path, names):
    cifar(tmp_path, names=names)
    refused("cifar10", tmp_path, "batches.meta: does not list the names of the classes")


def test_cifars_names_in_another_encoding(tmp_path):
    layouts.cifar10(tmp_path)
    (tmp_path / "batches.meta.txt").write_bytes(b"\xff\xfe")
    refused("cifar10", tmp_path, r"batches\.meta\.txt: does not list the names of the classes")


@pytest.mark.parametrize(
    ("source", "file", "words"),
    [
        ("csv", "list.csv", r"list\.csv: cannot be read as a \.csv"),
        ("csv", "list.jsonl", r"list\.jsonl: cannot be read as a \.jsonl"),
        ("imagenet", "wnids.txt", r"wnids\.txt: cannot be read .*decode byte 0xe4"),
        ("mnli", "train.tsv", r"train\.tsv: cannot be read .*decode byte 0xe4"),
    ],
)
def test_texts_in_another_encoding(tmp_path, source, file, words):
    (tmp_path / file).write_bytes("n00000001 \xe4, path, label\n".encode("latin-1"))
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
    refused(source, tmp_path / file if source == "csv" else tmp_path, words)


@pytest.mark.parametrize(
    "shape", [[1] * 64, [0] * 65, [65_536] * 4, [8, 784], []], ids=["64 axes", "65", "overflow", "two", "none"]
)
@pytest.mark.parametrize("kind", ["images-idx3", "labels-idx1"])
def test_idx_files_of_other_axes(tmp_path, shape, kind):
    layouts.mnist(tmp_path)
    body = struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(min(int(np.prod(shape[:2])), 6272))
    (tmp_path / f"train-{kind}-ubyte.gz").write_bytes(gzip.compress(body))
    refused("mnist", tmp_path, "is not an idx file of bytes with [13] axes, or is cut short")


@pytest.mark.parametrize(
    "labels",
    [[1, 1.5, 2, 3], [1, np.nan, 2, 3], [1j, 1, 2, 3], list("abcd"), [0, 1, 2, 3], [[1], "a", [2], 3]],
    ids=str,
)
def test_mat_files_with_other_labels(tmp_path, labels):
    savemat(tmp_path / "train_32x32.mat", {"X": PIXELS, "y": np.array(labels, object if "a" in labels else None)})
    refused("svhn", tmp_path, rf"train_32x32\.mat: ({LABELS} 1 to 10|has no uint8 X)")


@pytest.mark.parametrize("shape", [(-32, 32, 3, 4), (-32, -32, 3, 4), (2**30, 2**30, 2**30, 4)], ids=str)
def test_mat_files_with_other_dimensions(tmp_path, shape):
    path = tmp_path / "train_32x32.mat"
    savemat(path, {"X": PIXELS, "y": np.ones((4, 1), np.uint8)})
    path.write_bytes(path.read_bytes().replace(struct.pack("<4i", 32, 32, 3, 4), struct.pack("<4i", *shape)))
    refused("svhn", tmp_path, "cannot be read as a MATLAB file")


def test_what_is_compressed_unpacks_to_what_the_format_needs_at_most(tmp_path, monkeypatch):
    """A file of some megabytes may unpack to all memory."""
    for module, name in (
        (mnist, "MOST"),
        (official, "MOST_UNPACKED"),
        (svhn, "MOST_UNPACKED"),
        (imagenet_tars, "MOST"),
    ):
        monkeypatch.setattr(module, name, 1 << 20)
    monkeypatch.setattr(official.Unpacked.__init__, "__defaults__", (1 << 20,))
    monkeypatch.setattr(official.unpack, "__defaults__", (1 << 20,))
    bomb = bytes(3 << 20)
    for source in ("mnist", "svhn", "mnli", "cifar10", "imagenet"):
        (tmp_path / source).mkdir()
    layouts.mnist(tmp_path / "mnist")
    (tmp_path / "mnist/train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bomb))
    savemat(tmp_path / "svhn/train_32x32.mat", {"X": np.frombuffer(bomb, np.uint8)}, do_compression=True)
    (tmp_path / "mnli/train.jsonl.gz").write_bytes(gzip.compress(bomb))
    for name in ("cifar10/cifar-10-python.tar.gz", "imagenet/ILSVRC2012_devkit_t12.tar.gz"):
        with tarfile.open(tmp_path / name, "w:gz") as tar:
            member = tarfile.TarInfo("cifar-10-batches-py/readme.html")
            member.size = len(bomb)
            tar.addfile(member, io.BytesIO(bomb))
    write_tar(tmp_path / "imagenet/ILSVRC2012_img_val.tar", ["ILSVRC2012_val_00000001.JPEG"])
    for source in ("mnist", "svhn", "mnli", "cifar10", "imagenet"):
        refused(source, tmp_path / source, "unpacks to more than 1,048,576 bytes, the most that such a file can need")


@pytest.mark.parametrize(
    ("source", "archive", "name"),
    [
        ("cifar10", "cifar-10-python.tar.gz", "cifar-10-batches-py/data_batch_1"),
        ("imagenet", "ILSVRC2012_devkit_t12.tar.gz", "data/meta.mat"),
    ],
)
def test_a_sparse_file_in_a_tar_takes_no_memory(tmp_path, source, archive, name):
    with tarfile.open(tmp_path / archive, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo(name)
        member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)}
        tar.addfile(member)
    write_tar(tmp_path / "ILSVRC2012_img_val.tar", ["ILSVRC2012_val_00000001.JPEG"])
    refused(source, tmp_path, f"{name} is sparse")


def pair(first, gold="neutral"):
    return json.dumps({"gold_label": gold, "sentence1": first, "sentence2": "c"}).encode()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"null", "lacks one of the columns"),
        (b"5", "lacks one of the columns"),
        (b"[1]", "lacks one of the columns"),
        (pair(None), "has a sentence that is not text"),
        (pair(7), "has a sentence that is not text"),
        (pair(["x"]), "has a sentence that is not text"),
        (pair("\ud800"), "has a sentence that is not text"),
        (pair("x", None), "has the label None"),
        (pair("x", ["neutral"]), "has the label"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a":' * 100_000, "is not JSON"),
        (b'{"a":' + b"9" * 10_000 + b"}", "is not JSON"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else "",
)
def test_jsonl_with_anything_in_it(tmp_path, line, words):
    (tmp_path / "train.jsonl").write_bytes(pair("a b") + b"\n" + line + b"\n")
    refused("mnli", tmp_path, rf"train\.jsonl: line 2 {words}")


def write_tar(path, names, kind=tarfile.REGTYPE, link="", mode="w"):
    with tarfile.open(path, mode) as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            tar.addfile(member, io.BytesIO())


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE], ids=["symlink", "link", "FIFO"]
)
def test_links_in_tars(tmp_path, kind):
    write_tar(tmp_path / "ILSVRC2012_img_train.tar", ["n01440764.tar"], kind, "/etc/passwd")
    refused("imagenet", tmp_path, r"img_train\.tar: cannot be read as an uncompressed tar .*is no regular file")


@pytest.mark.parametrize(
    ("kind", "link"), [(tarfile.SYMTYPE, "nowhere"), (tarfile.SYMTYPE, "meta.mat"), (tarfile.FIFOTYPE, "")]
)
def test_links_in_the_devkit(tmp_path, kind, link):
    write_tar(tmp_path / "ILSVRC2012_img_val.tar", ["ILSVRC2012_val_00000001.JPEG"])
    names = ["ILSVRC2012_validation_ground_truth.txt", "meta.mat"]
    write_tar(tmp_path / "ILSVRC2012_devkit_t12.tar.gz", names, kind, link, "w:gz")
    refused("imagenet", tmp_path, r"ILSVRC2012_devkit_t12\.tar\.gz: is not ImageNet's devkit")


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_tar_that_is_a_link(tmp_path, split):
    (tmp_path / f"ILSVRC2012_img_{split}.tar").symlink_to(tmp_path / "nowhere.tar")
    refused("imagenet", tmp_path, rf"ILSVRC2012_img_{split}\.tar: is a link to a file that does not exist")


@pytest.mark.parametrize(
    ("link", "target", "words"),
    [
        ("train/a/loop", "..", "train/a/loop/a: is a link to a folder that it is in|loop: is a link to"),
        ("train/a/loop", "loop", "train/a/loop: cannot be read .Too many levels of symbolic links"),
        ("train/a/y.jpg", "y.jpg", r"train/a/y\.jpg: cannot be read .Too many levels"),
        ("train/b", "b", "train/b: cannot be read .Too many levels"),
        ("train/a/z.jpg", "nowhere.jpg", r"train/a/z\.jpg: cannot be read .No such file"),
    ],
)
def test_links_that_lead_round_or_nowhere(tmp_path, image, link, target, words):
    (tmp_path / "train/a").mkdir(parents=True)
    image(0).save(tmp_path / "train/a/x.jpg")
    (tmp_path / link).symlink_to(target)
    refused("image-folder", tmp_path, words)


def test_lists_that_are_links_to_themselves(tmp_path):
    layouts.imagenet(tmp_path)
    (tmp_path / "wnids.txt").symlink_to("wnids.txt")
    refused("imagenet", tmp_path, r"wnids\.txt: cannot be read .Too many levels")
    (tmp_path / "train.jsonl").write_bytes(pair("a b"))
    (tmp_path / "vocab.txt").symlink_to("vocab.txt")
    refused("mnli", tmp_path, r"vocab\.txt: is not a regular file")


@pytest.mark.parametrize("line", ["9" * 30, "-1", "8", "²"])
def test_folds_of_other_numbers(tmp_path, line):
    layouts.stl10(tmp_path)
    (tmp_path / "fold_indices.txt").write_text(line)
    refused("stl10", tmp_path, r"fold_indices\.txt: line 1 must hold indices of 0 to 7")


def test_a_target_that_is_a_link_to_itself(tmp_path, folder):
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(InputError, match=r"out.*(Too many levels of symbolic links|File exists)"):
        prepare("image-folder", folder, tmp_path / "out", PrepSettings(), processes=1)


def refused(source, folder, words):
    out = folder.with_name("out")
    with pytest.raises(InputError, match=words) as error:
        prepare(source, folder, out, PrepSettings(), processes=1)
    assert "\n" not in str(error.value)
    assert not out.exists()
