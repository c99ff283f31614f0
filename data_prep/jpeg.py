"""What the markers of a JPEG say, without decoding it (ITU-T T.81, annex B)."""

SOI, EOI = b"\xff\xd8", b"\xff\xd9"
FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended and progressive Huffman: what every decoder takes
OTHER_FRAMES = set(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}  # lossless, hierarchical, arithmetic
HUFFMAN_TABLE, SCAN = 0xC4, 0xDA


def is_plain(data: bytes) -> bool:
    """Whether the file is one 8-bit Huffman-coded frame with its tables, and has its end."""
    return data.startswith(SOI) and data.rstrip(b"\0\r\n ").endswith(EOI) and _head_is_plain(data)


def _head_is_plain(data: bytes) -> bool:
    position, framed, tabled = len(SOI), False, False
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4])
        if marker == 0xFF:  # fill
            position += 1
            continue
        if marker == SCAN:
            return framed and tabled
        if marker in OTHER_FRAMES or (marker in FRAMES and (framed or data[position + 4] != 8)):
            return False
        framed |= marker in FRAMES
        tabled |= marker == HUFFMAN_TABLE
        position += 2 + length
    return False
