"""CRC-32C against RFC 3720's examples and the definition, and what a sample's checksum is made of."""

import json
import os
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

from tests.clone import ROOT
from widemix.data.decode import Decoder
from widemix.data_prep.records import Encoded
from widemix.errors import InputError
from widemix.formats.beton import JPEG, RAW, open_beton
from widemix.formats.checksums import BAND, crc32c, crc32c_bands, open_checksums
from widemix.formats.sources import describe_sample, read_names, read_sources, sources_text


def by_definition(data: bytes) -> int:
    """The remainder of the division by Castagnoli's polynomial, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


RFC_3720 = {b"": 0, bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E}
RFC_3720 |= {b"123456789": 0xE3069283}
DATA = np.random.default_rng(0).bytes(30_000)
# Around the thirds of 256 and of 4,096 bytes that are computed side by side.
SIZES = 1, 7, 8, 255, 256, 257, 511, 512, 767, 768, 769, 1543, 12_287, 12_288, 12_289, 13_100, 29_999
BANDS = 1000, 4096, 30_000, 50_000


def computed() -> list:
    whole = np.frombuffer(DATA, np.uint8)
    parts = [*RFC_3720, *(DATA[3 : 3 + size] for size in SIZES)]
    return [crc32c(part) for part in parts] + [crc32c_bands(whole, band).tolist() for band in BANDS]


@pytest.mark.parametrize("way", ["compiled", "numba"])
def test_crc32c_is_that_of_its_definition(way):
    expected = [*RFC_3720.values(), *(by_definition(DATA[3 : 3 + size]) for size in SIZES)]
    expected += [[by_definition(DATA[at : at + band]) for at in range(0, len(DATA), band)] for band in BANDS]
    if way == "compiled":
        assert computed() == expected
        return
    program = "import json; from tests.formats.test_checksums import computed; print(json.dumps(computed()))"
    words = [sys.executable, "-c", program], os.environ | {"WIDEMIX_NATIVE": "none"}
    assert json.loads(subprocess.run(words[0], env=words[1], cwd=ROOT, capture_output=True).stdout) == expected


def test_pixels_are_read_and_checked_in_bands(tmp_path, write_beton):
    """Damage in the bands of a crop is noticed, and elsewhere no other pixels are read."""
    pixels = np.random.default_rng(0).integers(0, 256, (200, 150, 3), np.uint8)
    path = tmp_path / "a.beton"
    write_beton(path, [Encoded("a", 4, RAW, 150, 200, pixels.tobytes(), "").with_checksum()])
    beton, rows = open_beton(path), -(-BAND // 450)
    bands = [by_definition(pixels[y : y + rows].tobytes()) for y in range(0, 200, rows)]
    record = struct.pack("<6q", RAW, 150, 200, 4, pixels.size, 0)
    sample = by_definition(record + np.array(bands, "<u4").tobytes())
    np.array([sample, *bands], "<u4").tofile(tmp_path / "a.crc32c")
    decoder = Decoder(beton, open_checksums(beton))
    crops = {"first rows": (0, 0, 10, 10), "third band": (2 * rows, 7, rows, 50), "last rows": (199, 0, 1, 150)}

    def damaged() -> dict[str, dict[int, str]]:
        image, boxes = np.empty((1, 16, 16, 3), np.uint8), {name: np.array([[*at, 0]]) for name, at in crops.items()}
        found = {name: decoder.try_read(np.zeros(1, int), box, np.zeros(1), image, 1) for name, box in boxes.items()}
        return {name: reasons for name, reasons in found.items() if reasons}

    assert damaged() == {}
    written = np.memmap(path, np.uint8, "r+")
    for row, crop in ((5, "first rows"), (3 * rows - 1, "third band"), (190, "last rows")):
        written[int(beton.offset[0]) + 450 * row + 449] ^= 1
        assert damaged() == {crop: {0: "its bytes differ from its checksum"}}
        written[int(beton.offset[0]) + 450 * row + 449] ^= 1
    beton.label[0] = 5
    assert damaged().keys() == crops.keys()


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
    folder = shutil.copytree(digits, tmp_path / "digits")
    beton, path = open_beton(folder / "train.beton"), folder / "train.crc32c"
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
    (tmp_path / "damaged.sources").write_bytes(b"0000000g a\n")
    (tmp_path / "folder.sources").mkdir()
    shown = {0: "sample 0 (a b)", 4: "sample 4 (no\ufffdutf8)", 7: "sample 7 ( c )", 99: "sample 99"}
    shown[6] = "sample 6"  # whose name is empty
    for sample, words in shown.items():
        assert describe_sample(tmp_path / "x.beton", sample) == words
    for name in ("none", "folder"):
        assert describe_sample(tmp_path / f"{name}.beton", 3) == "sample 3"
    for read in (read_names, read_sources):
        for name in ("none", "folder"):
            with pytest.raises(InputError, match=rf"{name}\.sources: cannot be read \(.*; prepare the folder again"):
                read(tmp_path / f"{name}.beton")
        with pytest.raises(InputError, match=r"damaged\.sources: is damaged; prepare the folder again"):
            read(tmp_path / "damaged.beton")
