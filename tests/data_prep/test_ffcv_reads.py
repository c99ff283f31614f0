"""FFCV itself, the independent reader of what we write."""

import functools
import io
import warnings

import numba
import numpy as np
import pytest
import torch
from PIL import Image

from widemix.data.decode import Decoder
from widemix.data_prep import records
from widemix.data_prep.adopt import adopt
from widemix.data_prep.beton_writer import BetonWriter
from widemix.data_prep.image_processes import encode_all
from widemix.data_prep.prepare import prepare
from widemix.data_prep.samples import ImageFiles
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources.from_python import collect
from widemix.data_prep.verify import verify
from widemix.formats import beton, tables
from widemix.formats.checksums import open_checksums
from widemix.formats.text import open_text

pytestmark = pytest.mark.filterwarnings("ignore")  # numba's and FFCV's own, about FFCV's code


@pytest.fixture(scope="module", autouse=True)
def imported():
    """FFCV, with the first test that needs it: it compiles for seconds, in each process that collects tests.

    Four of them for numba's dictionary, of its two kinds of images, for which a plain one does as well.
    """
    global types, BytesField, FloatField, IntField, JSONField, NDArrayField, RGBImageField
    global IntDecoder, NDArrayDecoder, SimpleRGBImageDecoder, Loader, OrderOption
    global OSCacheManager, Compiler, Reader, ToTensor, DatasetWriter
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr("numba.typed.Dict", dict)
        pytest.importorskip("ffcv", reason="FFCV is not installed")
        from ffcv import types
        from ffcv.fields import BytesField, FloatField, IntField, JSONField, NDArrayField, RGBImageField
        from ffcv.fields.decoders import IntDecoder, NDArrayDecoder, SimpleRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.memory_managers.os_cache import OSCacheManager
        from ffcv.pipeline.compiler import Compiler
        from ffcv.reader import Reader
        from ffcv.transforms import ToTensor
        from ffcv.writer import DatasetWriter


def test_types_are_ffcvs():
    fields = [RGBImageField(), IntField()]
    assert types.HeaderType.names[:4] == tables.HEADER.names[:4]
    for ours, theirs in (
        (tables.HEADER, types.HeaderType),
        (tables.FIELD, types.FieldDescType),
        (beton.IMAGE, fields[0].metadata_type),
        (beton.SAMPLE, types.get_metadata_type(fields)),
        (beton.SEGMENTED, types.get_metadata_type([*fields, BytesField()])),
        (beton.TARGETED, types.get_metadata_type([*fields, NDArrayField(np.dtype("<f4"), (7,))])),
        (
            beton.SEGMENTED_TARGETED,
            types.get_metadata_type([*fields, BytesField(), NDArrayField(np.dtype("<f4"), (7,))]),
        ),
        (tables.ALLOCATION, types.ALLOC_TABLE_TYPE),
        (records.SAMPLE, types.get_metadata_type([NDArrayField(np.dtype("<i4"), (7,)), *[IntField()] * 3])),
    ):
        assert ours.itemsize == theirs.itemsize
        assert [ours.fields[name] for name in ours.names] == [theirs.fields[name] for name in theirs.names]
    assert types.CURRENT_VERSION == tables.VERSION
    for kind, name in tables.TYPES.items():
        if kind == tables.COEFFICIENTS_FIELD:  # a number of FFCV's for fields that it does not read
            assert types.TYPE_ID_HANDLER[kind] is None
        else:
            assert types.TYPE_ID_HANDLER[kind].__name__ == name
    theirs = NDArrayField(np.dtype("<i4"), (7,)).to_binary()[0].tobytes()
    (_, _, arguments), *_ = records.text_layout(7).fields
    assert theirs == arguments.ljust(len(theirs), b"\0")


READ_ONLY = numba.types.Array(numba.uint8, 1, "C", readonly=True)
STATE = numba.types.Tuple([READ_ONLY, numba.uint64[::1], numba.uint64[::1]])


@functools.cache
def compiled_reader():
    """The bytes at an address of the file: what FFCV compiles, for arrays that are read-only by their own type."""

    def read(address, state):
        size = state[2][np.searchsorted(state[1], address)]
        return state[0][address : address + size]

    return Compiler.compile(read, READ_ONLY(numba.uint64, STATE))


@pytest.fixture(autouse=True)
def unaltered_types(monkeypatch):
    """FFCV marks numba's one type of all byte arrays as read-only in place, and so changes its hash.

    Functions compiled for such arrays earlier in the process then raise KeyError, some only when they are collected.
    """
    monkeypatch.setattr(OSCacheManager, "state_type", STATE)
    monkeypatch.setattr(OSCacheManager, "compile_reader", lambda _: compiled_reader())


def load(path, image="image"):
    """All images and labels in file order, as FFCV's Loader gives them. `image` is the name of that field."""
    others = dict.fromkeys(Reader(str(path)).field_names)
    images, labels = columns(path, others | {image: [SimpleRGBImageDecoder()], "label": [IntDecoder()]})
    return images, labels[:, 0]


def columns(path, pipelines):
    """The fields that have a pipeline, in file order."""
    chosen = {name: steps and [*steps, ToTensor()] for name, steps in pipelines.items()}
    loader = Loader(str(path), 4, 1, os_cache=True, order=OrderOption.SEQUENTIAL, drop_last=False, pipelines=chosen)
    batches = [[part.clone() for part in batch] for batch in loader]
    return [torch.cat(parts).numpy() for parts in zip(*batches, strict=True)]


@pytest.fixture
def odd_files(tmp_path, image):
    """JPEGs of every common kind, and two lossless files."""
    kinds = [
        ("jpg", {"quality": q, "subsampling": s, "progressive": p})
        for q in (60, 95)
        for s in (0, 1, 2)
        for p in (0, 1)
    ]
    kinds += [("png", {}), ("bmp", {})]
    names = [f"{i}.{suffix}" for i, (suffix, _) in enumerate(kinds)]
    for i, (name, (_, options)) in enumerate(zip(names, kinds, strict=True)):
        image(i).save(tmp_path / name, **options)
    return ImageFiles(tmp_path, names, range(50, 50 + len(names)))


def test_loader_gives_raw_pixels_as_pillow_does(tmp_path, odd_files, write_beton):
    array = numba.uint8[::1]
    kept = {array: "as before"}
    write_beton(tmp_path / "a.beton", encode_all(odd_files, 0, PrepSettings(raw=True), 1))
    images, labels = load(tmp_path / "a.beton")
    assert kept.get(array) == "as before"
    assert labels.tolist() == list(odd_files.labels)
    for image, name in zip(images, odd_files.names, strict=True):
        assert np.array_equal(image, Image.open(tmp_path / name))


@pytest.mark.parametrize("restart_markers", [True, False])
def test_loader_gives_jpegs_nearly_as_pillow_does(tmp_path, odd_files, write_beton, restart_markers):
    """FFCV asks libturbojpeg for its fast inverse transform, which is some levels off the accurate one."""
    write_beton(tmp_path / "a.beton", encode_all(odd_files, 0, PrepSettings(restart_markers=restart_markers), 1))
    images, labels = load(tmp_path / "a.beton")
    stored = beton.open_beton(tmp_path / "a.beton")
    assert labels.tolist() == list(odd_files.labels)
    for i, (image, name) in enumerate(zip(images, odd_files.names, strict=True)):
        body = stored.bytes[stored.offset[i] :][: stored.size[i]].tobytes()
        error = np.abs(image.astype(int) - np.asarray(Image.open(io.BytesIO(body))))
        assert error.max() <= 8
        assert error.mean() < 1.5
        if name.endswith("jpg"):
            source = tmp_path / name
            assert np.array_equal(Image.open(io.BytesIO(body)), Image.open(source))
            assert restart_markers or body == source.read_bytes()


def test_reader_sees_pages_and_samples(tmp_path, folder):
    manifest = prepare("image-folder", folder, tmp_path / "out", PrepSettings(shuffle=False), processes=1)
    path = tmp_path / "out" / "train.beton"
    theirs, ours = Reader(str(path)), beton.open_beton(path)
    assert theirs.num_samples == len(ours) == manifest.splits["train"].samples == 21
    assert theirs.field_names == ["image", "label", "segments"]
    assert np.array_equal(theirs.metadata["f0"]["data_ptr"], ours.offset)
    assert np.array_equal(theirs.metadata["f2"]["ptr"], ours.segments)
    assert np.array_equal(theirs.metadata["f2"]["size"], ours.segments_size)
    assert np.array_equal(theirs.metadata["f1"], np.repeat([0, 1, 2], 7))
    assert np.array_equal(theirs.alloc_table["size"], np.stack([ours.size, ours.segments_size], 1).ravel())
    assert (ours.offset // theirs.page_size == (ours.stop - 1) // theirs.page_size).all()


def test_reader_and_decoder_see_the_targets(tmp_path, folder):
    names = sorted(str(path) for path in folder.rglob("*.JPEG"))
    targets = np.random.RandomState(0).randn(len(names), 3).astype(np.float32)
    with collect({"train": zip(names, targets, strict=True)}, tmp_path / "out") as dataset:
        prepare(dataset, None, tmp_path / "out", PrepSettings())
    path = tmp_path / "out" / "train.beton"
    reader = Reader(str(path))
    assert reader.field_names == ["image", "label", "segments", "targets"]
    field = reader.handlers["targets"]
    assert (field.dtype, field.shape) == (np.float32, (3,))
    places = reader.metadata["f3"].astype(np.int64)
    stored = np.fromfile(path, np.uint8)
    assert np.array_equal([stored[place : place + 12].view(np.float32) for place in places], targets)
    (found,) = columns(path, {"targets": [NDArrayDecoder()], "image": None, "label": None, "segments": None})
    assert np.array_equal(found, targets)


class Squares:
    """Smooth and noisy images of 32 x 32 pixels, with more fields than an image and its label."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        rng = np.random.RandomState(index)
        noise, smooth = rng.randint(0, 256, (32, 32, 3), np.uint8), np.full((32, 32, 3), 6 * index, np.uint8)
        arrays = np.arange(3), np.frombuffer(b"caption", np.uint8)
        return 0.5, arrays[0], {"a": 1}, smooth if index % 2 else noise, arrays[1], 1000 - index, index % 7


@pytest.mark.parametrize("mode", ["jpg", "raw", "proportion", "smart"])
def test_ffcvs_own_files_are_adopted(tmp_path, mode):
    """Fields in another order and under other names, of several processes; pixel by pixel against what was written.

    Against FFCV's Loader too where a file has images of both kinds: it takes seconds to compile.
    """
    fields = {
        "weight": FloatField(),
        "array": NDArrayField(np.dtype("<i8"), (3,)),
        "notes": JSONField(),
        "image": RGBImageField(mode, smart_threshold=3),
        "caption": BytesField(),
        "id": IntField(),
        "label": IntField(),
    }
    writer = DatasetWriter(str(tmp_path / "train.beton"), fields, num_workers=2)
    writer.from_indexed_dataset(Squares(), chunksize=5)
    manifest = adopt({"train": tmp_path / "train.beton"}, tmp_path / "out", processes=1)
    assert manifest.splits["train"].per_class == tuple(np.bincount([i % 7 for i in range(40)]))
    assert verify(tmp_path / "out") == []
    ours = beton.open_beton(tmp_path / "out" / "train.beton")
    theirs = Reader(str(ours.path))
    assert np.array_equal(theirs.metadata["f3"]["data_ptr"], ours.offset)
    assert np.array_equal(theirs.metadata["f6"], ours.label)
    kinds = {"raw": {beton.RAW}, "proportion": {beton.JPEG, beton.RAW}}.get(mode, {beton.JPEG})
    assert set(ours.mode.tolist()) == kinds
    assert ours.label.tolist() == [i % 7 for i in range(40)]
    pixels = np.empty((40, 32, 32, 3), np.uint8)
    boxes = np.tile([0, 0, 32, 32, 0], (40, 1))
    Decoder(ours, open_checksums(ours)).read(np.arange(40), boxes, np.zeros(40, bool), pixels, 1)
    for i in range(40):
        stored = ours.bytes[ours.offset[i] : ours.stop[i]].tobytes()
        raw = ours.mode[i] == beton.RAW
        assert np.array_equal(pixels[i], Squares()[i][3] if raw else Image.open(io.BytesIO(stored)))
    if mode == "proportion":
        images, labels = load(ours.path, "image")
        assert labels.tolist() == ours.label.tolist()
        errors = np.abs(pixels.astype(int) - images).max(axis=(1, 2, 3))
        assert (errors <= np.where(ours.mode == beton.RAW, 0, 8)).all()


def test_loader_gives_token_arrays(tmp_path):
    tokens = np.random.RandomState(0).randint(0, 30_000, (10, 7), np.int32)
    path = tmp_path / "a.beton"
    with BetonWriter(path, tmp_path / "journal", 10, records.text_layout(7)) as writer:
        for i, row in enumerate(tokens):
            writer.add(records.EncodedPair(str(i), row.tobytes(), "", i % 7, i % 7 // 2, i % 2))
        writer.finish()
    numbers = {name: [IntDecoder()] for name in ("length", "second", "label")}
    found, length, second, label = columns(path, {"tokens": [NDArrayDecoder()], **numbers})
    assert np.array_equal(found, tokens)
    ours = open_text(path)
    assert length[:, 0].tolist() == ours.length.tolist() == [i % 7 for i in range(10)]
    assert second[:, 0].tolist() == ours.second.tolist() == [i % 7 // 2 for i in range(10)]
    assert label[:, 0].tolist() == ours.label.tolist() == [i % 2 for i in range(10)]
    assert np.array_equal(np.stack([ours[i] for i in range(10)]), tokens)
