"""The markers of a JPEG, parsed without decoding it (ITU-T T.81, annex B)."""

from typing import NamedTuple

SOI, EOI = b"\xff\xd8", b"\xff\xd9"
BASELINE, EXTENDED, PROGRESSIVE = 0xC0, 0xC1, 0xC2  # Huffman-coded frames that every decoder reads
OTHER_FRAMES = set(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}  # lossless, hierarchical, arithmetic
HUFFMAN_TABLE, SCAN = 0xC4, 0xDA
METADATA = {
    0xE1: (b"Exif\0", b"http://ns.adobe.com/xap"),
    0xE2: (b"MPF\0",),
}  # may hold an orientation, or further images
# Sampling factors of the first component that libturbojpeg supports: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1.
SAMPLINGS = {(1, 1), (2, 1), (2, 2), (1, 2), (4, 1)}


class Frame(NamedTuple):
    """The only frame of a JPEG: 8 bits, Huffman-coded, with its tables before it and an end marker after it."""

    width: int  # pixels
    height: int  # pixels
    progressive: bool
    sampling: tuple[tuple[int, int], ...]  # factors (across, down) of each component
    has_metadata: bool  # whether there are EXIF, XMP or MPF segments
    scan: int  # bytes before the entropy-coded data of the first scan

    @property
    def mcu(self) -> tuple[int, int]:
        """Pixels (across, down) of one MCU."""
        return 8 * max(across for across, _ in self.sampling), 8 * max(down for _, down in self.sampling)

    @property
    def grey(self) -> bool:
        """Whether it has one component."""
        return len(self.sampling) == 1

    @property
    def common_sampling(self) -> bool:
        """Whether it has three components with sampling factors that every decoder supports."""
        return len(self.sampling) == 3 and self.sampling[0] in SAMPLINGS and self.sampling[1:] == ((1, 1), (1, 1))


def plain_frame(data: bytes) -> Frame | None:
    """The frame of a JPEG that has exactly one, of the kind that `Frame` describes; None for all others.

    After the end marker only padding is allowed.
    """
    if not data.startswith(SOI) or not data[-64:].rstrip(b"\0\r\n ").endswith(EOI):
        return None
    position, start, has_tables, has_metadata = len(SOI), 0, False, False
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4])
        if marker == 0xFF:  # fill
            position += 1
            continue
        if marker == SCAN:
            return _frame(data, start, has_metadata, position + 2 + length) if start and has_tables else None
        if marker in (BASELINE, EXTENDED, PROGRESSIVE):
            if start or data[position + 4] != 8:
                return None
            start = position
        elif marker in OTHER_FRAMES:
            return None
        has_tables |= marker == HUFFMAN_TABLE
        has_metadata |= data.startswith(METADATA.get(marker, ()), position + 4)
        position += 2 + length
    return None


def _frame(data: bytes, start: int, has_metadata: bool, scan: int) -> Frame:
    height, width, components = (int.from_bytes(data[start + a : start + b]) for a, b in ((5, 7), (7, 9), (9, 10)))
    layers = data[start + 11 : start + 10 + 3 * components : 3]
    sampling = tuple((s >> 4, s & 15) for s in layers)
    return Frame(width, height, data[start + 1] == PROGRESSIVE, sampling, has_metadata, scan)
