"""CRC-32C against RFC 3720's examples and the definition, and what a sample's checksum is made of."""

import shutil
import struct

import numpy as np
import pytest

from widemix.data.decode import Decoder
from widemix.data_prep.image import Encoded
from widemix.errors import InputError
from widemix.formats import checksums
from widemix.formats.beton import JPEG, RAW, open_beton
from widemix.formats.checksums import BAND, crc32c, crc32c_bands, open_checksums
from widemix.formats.sources import describe_sample, read_names, read_sources, sources_text
from widemix.native import BuildError


@pytest.fixture(params=["compiled", "numba"])
def way(request, monkeypatch):
    if request.param == "numba":

        def fails():
            raise BuildError("no compiler")

        monkeypatch.setattr(checksums, "open_library", fails)
    checksums._functions.cache_clear()
    yield request.param
    checksums._functions.cache_clear()


def by_definition(data: bytes) -> int:
    """The remainder of the division by Castagnoli's polynomial, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_rfc_3720s_examples(way):
    assert crc32c(b"") == 0
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283


def test_crc32c_is_that_of_its_definition(way):
    """Sizes around the thirds of 256 and of 4,096 bytes that are computed side by side."""
    data = np.random.default_rng(0).bytes(30_000)
    for size in (1, 7, 8, 255, 256, 257, 511, 512, 767, 768, 769, 1543, 12_287, 12_288, 12_289, 13_100, 29_999):
        assert crc32c(data[3 : 3 + size]) == by_definition(data[3 : 3 + size]), size
    whole = np.frombuffer(data, np.uint8)
    for band in (1000, 4096, 30_000, 50_000):
        expected = [by_definition(data[start : start + band]) for start in range(0, len(data), band)]
        assert crc32c_bands(whole, band).tolist() == expected


def test_a_image_of_pixels_is_read_and_checked_in_bands(tmp_path, write_beton, way):
    """Damage in the bands of a crop is noticed, and elsewhere no other pixels are read."""
    pixels = np.random.default_rng(0).integers(0, 256, (200, 150, 3), np.uint8)
    path = tmp_path / "a.beton"
    write_beton(path, [Encoded("a", 4, RAW, 150, 200, pixels.tobytes(), "").with_checksum()])
    beton = open_beton(path)
    rows = -(-BAND // 450)
    bands = [by_definition(pixels[y : y + rows].tobytes()) for y in range(0, 200, rows)]
    record = struct.pack("<6q", RAW, 150, 200, 4, pixels.size, 0)
    sample = by_definition(record + np.array(bands, "<u4").tobytes())
    np.array([sample, *bands], "<u4").tofile(tmp_path / "a.crc32c")
    decoder = Decoder(beton, open_checksums(beton))
    crops = {"first rows": (0, 0, 10, 10), "third band": (2 * rows, 7, rows, 50), "last rows": (199, 0, 1, 150)}

    def read(crop: str) -> dict[int, str]:
        image = np.empty((1, 16, 16, 3), np.uint8)
        return decoder.try_read(np.zeros(1, int), np.array([[*crops[crop], 0]]), np.zeros(1), image, 1)

    assert {crop: read(crop) for crop in crops} == {crop: {} for crop in crops}
    for row, crop in ((5, "first rows"), (3 * rows - 1, "third band"), (190, "last rows")):
        with path.open("r+b") as file:
            file.seek(int(beton.offset[0]) + 450 * row + 449)
            file.write(bytes([pixels[row, -1, -1] ^ 1]))
            file.flush()
            assert {name for name in crops if read(name)} == {crop}
            assert read(crop) == {0: "its bytes differ from its checksum"}
            file.seek(int(beton.offset[0]) + 450 * row + 449)
            file.write(bytes([pixels[row, -1, -1]]))
    beton.label[0] = 5
    assert {name for name in crops if read(name)} == set(crops)


def test_pixels_alone_have_checksums_of_bands(tmp_path, write_beton):
    """Of 37 rows of 150 pixels, which are the first with 16 KiB: six in 200 rows, and one in fewer than 38."""
    path = tmp_path / "a.beton"
    sizes = [(RAW, 150, 200), (JPEG, 150, 200), (RAW, 150, 37), (RAW, 1, 1)]
    data = [bytes(3 * width * height) if mode == RAW else b"jpeg" for mode, width, height in sizes]
    write_beton(path, [Encoded("", 0, *size, body, "") for size, body in zip(sizes, data, strict=True)])
    np.arange(4 + 8, dtype="<u4").tofile(tmp_path / "a.crc32c")
    found = open_checksums(open_beton(path))
    assert found.first.tolist() == [0, 6, 6, 7]
    assert (found.samples.tolist(), found.bands.tolist()) == ([0, 1, 2, 3], list(range(4, 12)))


def test_as_many_checksums_as_samples(tmp_path, digits):
    folder = tmp_path / "digits"
    shutil.copytree(digits, folder)
    beton = open_beton(folder / "train.beton")
    path = folder / "train.crc32c"
    whole = path.read_bytes()
    for data in (whole[:-1], whole + bytes(4), b""):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"train\.crc32c: has \d+ bytes, and the samples need 11496"):
            open_checksums(beton)
    path.unlink()
    with pytest.raises(InputError, match=r"train\.crc32c: cannot be read .*prepare the folder again"):
        open_checksums(beton)


def test_names_of_any_characters_are_those_of_the_sources(tmp_path):
    names = ["a b", "line\nbreak", "back\\slash\\n", "\\\\n", "no\udcffutf8", "\r\u2028", "", " c "]
    checksums = [0, 0x1B, 0x12345678, 0xFFFFFFFF, 10, 0xA0000000, 7, 8]
    (tmp_path / "x.sources").write_bytes(sources_text(checksums, names))
    wanted = {name: (i, checksum) for i, (name, checksum) in enumerate(zip(names, checksums, strict=True))}
    assert read_sources(tmp_path / "x.beton") == wanted
    assert read_names(tmp_path / "x.beton") == names
    assert describe_sample(tmp_path / "x.beton", 0) == "sample 0 (a b)"
    assert describe_sample(tmp_path / "x.beton", 4) == "sample 4 (no\ufffdutf8)"
    assert describe_sample(tmp_path / "x.beton", 7) == "sample 7 ( c )"
    assert describe_sample(tmp_path / "x.beton", 99) == "sample 99"
    assert describe_sample(tmp_path / "x.beton", 6) == "sample 6"  # whose name is empty
    assert describe_sample(tmp_path / "none.beton", 3) == "sample 3"
    (tmp_path / "damaged.sources").write_bytes(b"0000000g a\n")
    (tmp_path / "folder.sources").mkdir()
    assert describe_sample(tmp_path / "folder.beton", 3) == "sample 3"
    for read in (read_names, read_sources):
        for name in ("none", "folder"):
            with pytest.raises(InputError, match=rf"{name}\.sources: cannot be read \(.*; prepare the folder again"):
                read(tmp_path / f"{name}.beton")
        with pytest.raises(InputError, match=r"damaged\.sources: is damaged; prepare the folder again"):
            read(tmp_path / "damaged.beton")
