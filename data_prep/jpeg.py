"""What the markers of a JPEG say, without decoding it (ITU-T T.81, annex B)."""

from typing import NamedTuple

SOI, EOI = b"\xff\xd8", b"\xff\xd9"
BASELINE, EXTENDED, PROGRESSIVE = 0xC0, 0xC1, 0xC2  # the Huffman-coded frames that every decoder takes
OTHER_FRAMES = set(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}  # lossless, hierarchical, arithmetic
HUFFMAN_TABLE, SCAN = 0xC4, 0xDA
REMARKS = {0xE1: (b"Exif\0", b"http://ns.adobe.com/xap"), 0xE2: (b"MPF\0",)}  # a turn, further pictures
# Sampling of the first component against the other two that libturbojpeg knows: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1.
SAMPLINGS = {(1, 1), (2, 1), (2, 2), (1, 2), (4, 1)}


class Frame(NamedTuple):
    """The one 8-bit Huffman-coded frame of a file that has its tables and its end."""

    width: int  # pixels
    height: int  # pixels
    progressive: bool
    sampling: tuple[tuple[int, int], ...]  # (across, down) of each component
    remarks: bool  # whether EXIF, XMP or MPF say more of the picture than its frame
    scan: int  # where the entropy-coded data of the first scan begin, bytes

    @property
    def mcu(self) -> tuple[int, int]:
        """Pixels across and down one MCU."""
        return 8 * max(across for across, _ in self.sampling), 8 * max(down for _, down in self.sampling)

    @property
    def common(self) -> bool:
        """Whether it has three components in a sampling that every decoder knows."""
        return len(self.sampling) == 3 and self.sampling[0] in SAMPLINGS and self.sampling[1:] == ((1, 1), (1, 1))


def plain_frame(data: bytes) -> Frame | None:
    """The frame of a file that is plain in that sense, or None. Bytes after the end may be padding only."""
    if not data.startswith(SOI) or not data[-64:].rstrip(b"\0\r\n ").endswith(EOI):
        return None
    position, start, tabled, remarks = len(SOI), 0, False, False
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4])
        if marker == 0xFF:  # fill
            position += 1
            continue
        if marker == SCAN:
            return _frame(data, start, remarks, position + 2 + length) if start and tabled else None
        if marker in (BASELINE, EXTENDED, PROGRESSIVE):
            if start or data[position + 4] != 8:
                return None
            start = position
        elif marker in OTHER_FRAMES:
            return None
        tabled |= marker == HUFFMAN_TABLE
        remarks |= data.startswith(REMARKS.get(marker, ()), position + 4)
        position += 2 + length
    return None


def _frame(data: bytes, start: int, remarks: bool, scan: int) -> Frame:
    height, width, components = (int.from_bytes(data[start + a : start + b]) for a, b in ((5, 7), (7, 9), (9, 10)))
    layers = data[start + 11 : start + 10 + 3 * components : 3]
    return Frame(
        width, height, data[start + 1] == PROGRESSIVE, tuple((s >> 4, s & 15) for s in layers), remarks, scan
    )
