"""JPEGs that encoders seldom write: of blocks of one colour each, coded here by the tables of ITU-T T.81."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import numpy as np

Table = tuple[tuple[int, ...], tuple[int, ...]]  # codes of each length from 1 on, and their symbols
LUMA = (0, 1, 5, 1, 1, 1, 1, 1, 1), tuple(range(12))
CHROMA = (0, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1), tuple(range(12))  # of which the codes of 10 and 11 have as many bits
OTHERS = LUMA[0], (*range(9), 11, 10, 9)  # as LUMA, with other symbols
# Of the first component, and of others; the end of a block is 0111, so that a last byte filled up may be ones alone.
AC = (0, 0, 0, 13), (*range(1, 8), 0, *range(8, 12), 0xF0)
OTHER_AC = (0, 0, 0, 13), (0xF0, *range(11, 5, -1), 0, *range(5, 0, -1))


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2, "big") + body


def codes(table: Table) -> dict[int, str]:
    """The bits of each symbol's code."""
    found, code, symbols = {}, 0, iter(table[1])
    for length, count in enumerate(table[0], 1):
        for _ in range(count):
            found[next(symbols)] = f"{code:0{length}b}"
            code += 1
        code *= 2
    return found


def number(value: int) -> tuple[int, str]:
    """A number's size, and its bits."""
    size = abs(value).bit_length()
    return size, f"{value if value > 0 else value + (1 << size) - 1:0{size}b}" if size else ""


def places(size: tuple[int, int], factors: list[tuple[int, int]], apart: bool) -> Iterator[Iterable[int]]:
    """For each scan the component of each of its blocks, in their order."""
    across, down = (max(each) for each in zip(*factors, strict=True))
    for part in [[c] for c in range(len(factors))] if apart else [list(range(len(factors)))]:
        if len(part) == 1:
            sides = (
                -(-side * factor // most)
                for side, factor, most in zip(size, factors[part[0]], (across, down), strict=True)
            )
            wide, tall = (-(-side // 8) for side in sides)
            yield part * (wide * tall)
        else:
            mcu = [c for c in part for _ in product(*map(range, factors[c]))]
            yield mcu * (-(-size[0] // (8 * across)) * -(-size[1] // (8 * down)))


def crafted(
    size: tuple[int, int],
    *factors: tuple[int, int],
    dc: Table = LUMA,
    apart: bool = False,
    first: int = 0,
    levels: Sequence[int] = (),
) -> bytes:
    """A JPEG of this width and height; its components have these factors across and down.

    apart: in a scan each. first: the coefficient after DC of the first block, in place of 0. levels: DC of each block
    of one scan, in place of random ones.
    """
    numbers, frame, data = np.random.RandomState(size[0]), b"", b""
    dc_codes, ac_codes = codes(dc), [codes(AC), codes(OTHER_AC)]
    for name, (across, down) in enumerate(factors, 1):
        frame += bytes([name, across << 4 | down, 0])
    for scan in places(size, list(factors), apart):
        scan, bits, last = list(scan), "", dict.fromkeys(range(len(factors)), 0)
        for c, level in zip(scan, levels or numbers.randint(-1000, 1001, len(scan)).tolist(), strict=True):
            (count, text), last[c] = number(level - last[c]), level
            bits += dc_codes[count] + text
            if first and not data and bits == dc_codes[count] + text:
                bits += ac_codes[0][number(first)[0]] + number(first)[1]
            bits += ac_codes[min(c, 1)][0]
        bits += "1" * (-len(bits) % 8)
        body = b"".join(bytes([c + 1, min(c, 1)]) for c in sorted(set(scan)))
        data += segment(0xDA, bytes([len(body) // 2]) + body + b"\0\x3f\0")
        data += int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    kinds = {0: dc, 16: AC, 17: OTHER_AC}
    tables = [bytes([kind, *table[0]]).ljust(17, b"\0") + bytes(table[1]) for kind, table in kinds.items()]
    head = bytes([8]) + size[1].to_bytes(2, "big") + size[0].to_bytes(2, "big") + bytes([len(factors)]) + frame
    parts = [segment(0xDB, b"\0" + b"\1" * 64), segment(0xC0, head), segment(0xC4, b"".join(tables))]
    return b"\xff\xd8" + b"".join(parts) + data + b"\xff\xd9"
