import functools
import io
import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from widemix.data_prep.beton_writer import BetonWriter
from widemix.data_prep.image import encode
from widemix.data_prep.jpeg import library
from widemix.data_prep.records import IMAGES, SEGMENTED_IMAGES
from widemix.data_prep.samples import FileSlice, Sample
from widemix.data_prep.settings import PrepSettings
from widemix.native.library import load, open_library


@pytest.fixture
def image():
    """`image(seed, width, height, mode)`: a smooth random image, so that JPEG keeps it well."""

    def make(seed, width=40, height=30, mode="RGB"):
        return smooth(seed, width, height).convert(mode)

    return make


@functools.cache
def smooth(seed, width, height):
    noise = np.random.RandomState(seed).randint(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise).filter(ImageFilter.GaussianBlur(3))


def saved(image, kind="JPEG", **options):
    """The bytes of a file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def encode_bytes(folder, data, name="a.jpg", **settings):
    """What becomes of an image file of these bytes."""
    (folder / name).write_bytes(data)
    return encode(Sample(name, 3, FileSlice(str(folder / name))), PrepSettings(**settings))


@pytest.fixture
def jpeg(image):
    """`jpeg(seed)`: the bytes of a small JPEG."""
    return lambda seed: saved(image(seed))


@pytest.fixture
def folder(tmp_path, image):
    """An image folder: 3 classes, 7 training and 2 validation JPEGs each."""
    root = tmp_path / "images"
    for split, count in (("train", 7), ("val", 2)):
        for label, name in enumerate(("ant", "bee", "cat")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                seed = 100 * label + 10 * i + (split == "val")
                image(seed, 40 + i, 30 + label).save(root / split / name / f"{i}.JPEG", quality=92)
    return root


@pytest.fixture
def write_beton():
    """`write_beton(path, encoded)` writes a whole file; returns the samples written and the exceptions."""

    def write(path, encoded):
        encoded = list(encoded)
        layout = SEGMENTED_IMAGES if encoded[0].segments else IMAGES
        with BetonWriter(path, path.with_suffix(".journal"), len(encoded), layout) as writer:
            for item in encoded:
                writer.add(item)
            writer.finish()
        return writer.written.count, writer.written.exceptions

    return write


class Limits:
    """Numbers of ours made small: `limits({"widemix.data_prep.beton_writer.PAGE": 9_000})` needs no gigabytes.

    No functions: see `tests.conftest.System`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch

    def __call__(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            assert type(value) in (int, float), name
            self._monkeypatch.setattr(name, value)


@pytest.fixture
def limits(monkeypatch):
    return Limits(monkeypatch)


@pytest.fixture(scope="module")
def small_pages():
    """Pages of 64 KiB: with FFCV's 8 MiB a file of a few small images is read and hashed as one of 8 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        Limits(patch)({"widemix.data_prep.beton_writer.PAGE": 1 << 16})
        yield


@pytest.fixture(scope="module")
def small_shards(small_pages):
    """And a journal entry after every 2 kB of data."""
    with pytest.MonkeyPatch.context() as patch:
        Limits(patch)({"widemix.data_prep.beton_writer.SHARD": 2_000})
        yield


@pytest.fixture
def fast_clock(system):
    """Who waits has waited a second at each look."""
    system({"time.monotonic": itertools.count().__next__, "time.sleep": lambda seconds: None})


@pytest.fixture
def uncompiled(monkeypatch):
    """No compiled code, as where there is no C compiler."""
    monkeypatch.setenv("WIDEMIX_NATIVE", "none")
    loaders = (load, open_library, library)
    for cached in loaders:
        cached.cache_clear()
    yield
    for cached in loaders:
        cached.cache_clear()


@pytest.fixture
def decoded(system):
    """The images that Pillow has opened: one for each that is encoded again, unless it is a JPEG that stays one."""
    opened = []
    open_image = Image.open
    system({"PIL.Image.open": lambda *words: opened.append(words) or open_image(*words)})
    return opened


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
