"""JPEGs as coefficients and back, by the compiled code: see pipeline/formats/coefficients.py."""

from pathlib import Path

import numpy as np

from widemix.data_prep.restart import WRITTEN, DamagedJpeg, call_codec, library, run_codec
from widemix.formats import coefficients
from widemix.formats.beton import COEFFICIENTS, JPEG, open_beton

SAMPLED = 10_000  # images of which the sizes are read


def pack(data: bytes) -> tuple[bytes, str]:
    """The coefficients of a JPEG, or none and why the JPEG could not be restored from them."""
    compiled = library()
    assert compiled is not None  # `encoding_for` has asked for it
    try:
        outcome, packed, message = call_codec(compiled.pack_jpeg, data)
    except DamagedJpeg as error:
        return b"", str(error)
    return (packed, "") if outcome == WRITTEN else (b"", message)


def unpack(packed: bytes) -> bytes:
    """The JPEG, byte for byte. Raises `ValueError` for damaged coefficients."""
    compiled = library()
    if compiled is None:
        return coefficients.restore(packed)
    if len(packed) < coefficients.HEAD.size:
        raise ValueError(coefficients.DAMAGED)
    outcome, output, size, message = run_codec(compiled.restore_jpeg, packed, coefficients.jpeg_size(packed))
    if outcome != WRITTEN:
        raise ValueError(message or "out of memory")
    return output[:size].tobytes()


def count_bytes(path: Path) -> tuple[int, int, int, int]:
    """Of a .beton: images that are coefficients and that are JPEGs; the bytes of the former, and of their JPEGs.

    These are from some of them.
    """
    beton = open_beton(path)
    packed = np.flatnonzero(beton.mode == COEFFICIENTS)
    chosen = packed[:: -(-len(packed) // SAMPLED) or 1]
    before = [
        coefficients.jpeg_size(beton.bytes[start : start + coefficients.HEAD.size].tobytes())
        for start in beton.offset[chosen]
    ]
    stored = int(beton.size[packed].sum())
    share = stored / max(int(beton.size[chosen].sum()), 1)
    return len(packed), int((beton.mode == JPEG).sum()), stored, round(sum(before) * share)
