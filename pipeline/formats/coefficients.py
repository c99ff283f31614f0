"""The coefficients of a JPEG as `widemix prep --encoding coefficients` stores them, and the JPEG that they are from.

A container has the JPEG's bytes before and after the entropy-coded data, and the coefficients in between:
pipeline/native/coefficients.h has its layout, pipeline/native/block_bits.h that of a block. `restore` writes the JPEG
again. The compiled code does the same 200 times faster, and decodes crops; this is for where it cannot be built.
"""

import functools
import struct
from collections.abc import Iterator
from typing import NamedTuple

HEAD = struct.Struct("<4s3I2HI")  # magic, bytes of the JPEG, of its header and end, MCUs per segment, ones, segments
MAGIC = b"WMC1"
DAMAGED = "its coefficients are damaged"


class _Component(NamedTuple):
    blocks: int  # of an MCU
    dc: dict[int, str]  # codes by symbol
    ac: dict[int, str]


def jpeg_size(container: bytes) -> int:
    """The bytes of the JPEG that a container restores, of which the first `HEAD.size` bytes are needed."""
    return int(HEAD.unpack_from(container)[1])


def restore(container: bytes) -> bytes:
    """The JPEG of a container, byte for byte. Raises `ValueError` for a damaged one."""
    try:
        magic, size, head_size, end_size, interval, ones, segments = HEAD.unpack_from(container)
        sizes = struct.unpack_from(f"<{segments}H", container, HEAD.size)
        start = HEAD.size + 2 * segments
        head, rest = container[start : start + head_size], container[start + head_size :]
        end, data = rest[:end_size], rest[end_size:]
        components, restart, shape = _header(head)
        if magic != MAGIC or sum(sizes) != len(data) or len(sizes) != shape[0] * -(-shape[1] // interval):
            raise ValueError(DAMAGED)
        blocks = _blocks(data, sizes, shape, interval, sum(each.blocks for each in components))
        jpeg = head + b"".join(_scan(blocks, components, shape[0] * shape[1], restart, str(ones))) + end
    except (struct.error, IndexError, KeyError, StopIteration, ZeroDivisionError) as error:
        raise ValueError(DAMAGED) from error
    if len(jpeg) != size or any(blocks):  # which looks at the end of the last segment
        raise ValueError(DAMAGED)
    return jpeg


def _header(head: bytes) -> tuple[list[_Component], int, tuple[int, int]]:
    """The components of a JPEG's only scan, its restart interval in MCUs, and its rows and columns of MCUs."""
    tables: dict[int, dict[int, str]] = {}
    frame, restart, at = b"", 0, 2
    while head[at + 1] != 0xDA:
        if head[at + 1] == 0xFF:  # a fill byte
            at += 1
            continue
        marker, length = head[at + 1], int.from_bytes(head[at + 2 : at + 4])
        body = head[at + 4 : at + 2 + length]
        if marker in (0xC0, 0xC1):
            frame = body
        elif marker == 0xC4:
            tables |= _codes(body)
        elif marker == 0xDD:
            restart = int.from_bytes(body)
        at += 2 + length
    wanted = {head[place]: head[place + 1] for place in range(at + 5, at + 5 + 2 * head[at + 4], 2)}
    height, width = int.from_bytes(frame[1:3]), int.from_bytes(frame[3:5])
    layers = [frame[place : place + 3] for place in range(6, 6 + 3 * frame[5], 3)]
    factors = {layer[0]: (layer[1] >> 4, layer[1] & 15) if len(layers) > 1 else (1, 1) for layer in layers}
    across, down = (8 * max(factor[side] for factor in factors.values()) for side in (0, 1))
    components = [
        _Component(factors[which][0] * factors[which][1], tables[numbers >> 4], tables[16 + (numbers & 15)])
        for which, numbers in wanted.items()
    ]
    return components, restart, (-(-height // down), -(-width // across))


def _codes(body: bytes) -> dict[int, dict[int, str]]:
    """The Huffman codes of a DHT segment, as bits in text, by symbol, and by class and number of the table."""
    tables, at = {}, 0
    while at < len(body):
        code, place, codes = 0, at + 17, {}
        for length in range(1, 17):
            for _ in range(body[at + length]):
                codes[body[place]] = f"{code:0{length}b}"
                code, place = code + 1, place + 1
            code *= 2
        tables[body[at]] = codes
        at = place
    return tables


def _blocks(data: bytes, sizes: tuple[int, ...], shape: tuple[int, int], interval: int, count: int) -> Iterator[list]:
    """The coefficients of each block, in zigzag order, of all MCUs, which have `count` blocks each."""
    start, columns = 0, shape[1]
    for number, size in enumerate(sizes):
        first = number % -(-columns // interval) * interval
        bits, at = int.from_bytes(data[start : start + size], "little"), 0
        for _ in range((min(first + interval, columns) - first) * count):
            values, used = _block(bits >> at)
            at += used
            yield values
        if not 0 <= 8 * size - at < 8:
            raise ValueError(DAMAGED)
        start += size


def _block(bits: int) -> tuple[list[int], int]:
    """A block's coefficients in zigzag order, and how many bits it has."""
    at = 0

    def field(count: int) -> int:
        nonlocal at
        at += count
        return bits >> (at - count) & ((1 << count) - 1)

    last, levels, dc = field(6), field(2), field(12)
    values = [dc - ((dc & 2048) << 1)] + [0] * 63
    if not last:
        return values, at
    mask = field(last - 1) | 1 << (last - 1)
    places = [k + 1 for k in range(last) if mask >> k & 1]
    signs = field(len(places))
    negative = [place for n, place in enumerate(places) if signs >> n & 1]
    for level in range(max(levels, 1)):
        low, high = field(len(places)), field(len(places))
        sizes = [(low >> n & 1) + 2 * (high >> n & 1) for n in range(len(places))]  # beyond the level's least
        for bit in range(3):
            longer = [place for place, size in zip(places, sizes, strict=True) if size > bit]
            more = field(len(longer))
            for n, place in enumerate(longer):
                values[place] |= (more >> n & 1) << (3 * level + bit)
            for place, size in zip(places, sizes, strict=True):
                values[place] |= (size == bit) << (3 * level + bit)
        places = [place for place, size in zip(places, sizes, strict=True) if size == 3]
    for place in places:
        values[place] |= 1 << 3 * max(levels, 1)
    for place in negative:
        values[place] *= -1
    return values, at


def _scan(
    blocks: Iterator[list], components: list[_Component], mcus: int, restart: int, filling: str
) -> Iterator[bytes]:
    """The entropy-coded data, with their restart markers, from one marker to the next."""
    for number, first in enumerate(range(0, mcus, restart or mcus)):
        if number:
            yield bytes([0xFF, 0xD0 + (number - 1) % 8])
        codes: list[str] = []
        levels = [0] * len(components)
        for _ in range(first, min(first + (restart or mcus), mcus)):
            for which, component in enumerate(components):
                for _ in range(component.blocks):
                    values = next(blocks)
                    codes += _symbols(values, values[0] - levels[which], component)
                    levels[which] = values[0]
        text = "".join(codes)
        text += filling * (-len(text) % 8)
        yield int(text, 2).to_bytes(len(text) // 8).replace(b"\xff", b"\xff\0")


def _symbols(values: list[int], change: int, component: _Component) -> Iterator[str]:
    """The codes of a block (ITU-T T.81, F.1.2), and the bits of its numbers, as text."""
    size, text = _number(change)
    yield component.dc[size] + text
    zeros = 0
    for value in values[1:]:
        if not value:
            zeros += 1
            continue
        yield component.ac[0xF0] * (zeros // 16) if zeros > 15 else ""
        size, text = _number(value)
        yield component.ac[zeros % 16 << 4 | size] + text
        zeros = 0
    if zeros:
        yield component.ac[0]


@functools.cache  # of few numbers, most of them small
def _number(value: int) -> tuple[int, str]:
    """The size of a number in bits, and these bits as text."""
    size = abs(value).bit_length()
    return size, f"{(value if value > 0 else value + (1 << size) - 1):0{size}b}" if size else ""
