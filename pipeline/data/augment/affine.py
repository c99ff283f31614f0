"""Rotate, shear and translate: in place on uint8 pictures, bit-identical to Pillow 13's `Image.transform`.

Pillow (Geometry.c) takes the source point of each output pixel's centre in double precision, fills where it lies
outside, and interpolates with edges repeated and the result cut, not rounded. Two pixels of repeated edge save us
its tests. Where only x or only y moves, the fraction along the other axis is exactly zero and one axis is enough.
"""

import math

import numpy as np

from pipeline.data.augment.tables import copy_values
from pipeline.data.compiled import inlined, pixels

_LOW = -3768320.0  # of 1e15, below its highest 26 bits


@pixels
def rotation(degrees, height, width):
    """`Image.rotate`'s matrix (a, b, c, d, e, f): output (x, y) reads from (ax + by + c, dx + ey + f)."""
    angle = -math.radians(degrees % 360.0)
    cos, sin, back = _round15(math.cos(angle)), _round15(math.sin(angle)), _round15(-math.sin(angle))
    x, y = width / 2, height / 2
    return cos, sin, cos * -x + sin * -y + 0.0 + x, back, cos, back * -x + cos * -y + 0.0 + y


@pixels
def _round15(number):
    """Python's round(number, 15) for |number| <= 1: the product's rounding error decides where it hid a half."""
    scaled = number * 1e15
    split = number * 134217729.0  # Veltkamp and Dekker: halves of 26 bits, whose products are exact
    high = split - (split - number)
    low, big, small = number - high, 1e15 - _LOW, _LOW
    rest = ((high * big - scaled) + high * small + low * big) + low * small
    whole = np.rint(scaled)
    off = (scaled - whole) + rest
    if off > 0.5:
        whole += 1.0
    elif off < -0.5:
        whole -= 1.0
    return whole / 1e15


@inlined
def transform(picture, matrix, cubic, fill, scratch):
    """Move picture [H, 3 W] by `matrix`; bicubic or bilinear; `fill` is R | G << 8 | B << 16."""
    a, b, c, d, e, f = matrix
    height, width = picture.shape[0], picture.shape[1] // 3
    padded, corner, shift, inside, line = scratch.padded, scratch.corner, scratch.shift, scratch.inside, scratch.line
    source, stride = padded.reshape(-1), padded.shape[1]
    along_x = a == 1.0 and d == 0.0 and e == 1.0 and f == 0.0
    along_y = a == 1.0 and b == 0.0 and c == 0.0 and e == 1.0
    step, base = (1, 2) if along_x else (stride, 2 * stride + 2)
    first, last = 0, 0
    _pad(picture, padded)
    for y in range(height):
        if along_x or along_y:
            offset = b * (y + 0.5) if along_x else y + 0.5
            scale, start, size = (1.0, c, width) if along_x else (d, f, height)
            if y == 0 or offset != 0.0:
                first, last = _locate_line(scale, offset, start, size, step, base, corner, shift[0], inside)
            row = source[(y + 2) * stride if along_x else 0 :]
            _interpolate_line(row, step, corner[first:last], shift[0][first:last], cubic, line[first:last])
        else:
            first, last = _locate(matrix, y, height, stride, corner, shift[0], shift[1], inside)
            places = corner[first:last], shift[0][first:last], shift[1][first:last]  # not shift[:, ...]: contiguous
            if cubic:
                _cubic_plane(source, stride, *places, line[first:last])
            else:
                _linear_plane(source, stride, *places, line[first:last])
        _fill_ends(line, first, last, fill)
        _unpack(line, picture[y])


@pixels
def _fill_ends(line, first, last, fill):
    for x in range(first):
        line[x] = fill
    for x in range(last, line.size):
        line[x] = fill


@pixels
def _pad(picture, padded):
    height, width = picture.shape[0], picture.shape[1] // 3
    for y in range(height):
        row = padded[y + 2]
        _pack(picture[y], row[2 : width + 2])
        row[0] = row[1] = row[2]
        row[width + 2] = row[width + 3] = row[width + 1]
    for k in range(2):
        copy_values(padded[2], padded[k])
        copy_values(padded[height + 1], padded[height + 2 + k])


@pixels
def _pack(row, packed):
    for x in range(packed.size):
        green, blue = np.uint32(row[3 * x + 1]) << np.uint32(8), np.uint32(row[3 * x + 2]) << np.uint32(16)
        packed[x] = np.uint32(row[3 * x]) | green | blue


@pixels
def _unpack(packed, row):
    for x in range(packed.size):
        row[3 * x] = np.uint8(packed[x])
        row[3 * x + 1] = np.uint8(packed[x] >> np.uint32(8))
        row[3 * x + 2] = np.uint8(packed[x] >> np.uint32(16))


@pixels
def _locate(matrix, y, height, stride, corner, shift_x, shift_y, inside):
    """Where row y's pixels read: the pixel up and left of the point, the fractions beyond it; which are inside."""
    a, b, c, d, e, f = matrix
    centre, width = y + 0.5, corner.size
    right, bottom = np.float64(width), np.float64(height)
    for column in range(width):
        across = np.float64(np.int32(column)) + 0.5
        x = a * across + b * centre + c
        y = d * across + e * centre + f
        inside[column] = (x >= 0.0) & (x < right) & (y >= 0.0) & (y < bottom)
        x = min(max(x, 0.0), right) - 0.5  # the bounds only matter where the fill will stand
        y = min(max(y, 0.0), bottom) - 0.5
        left, top = np.floor(x), np.floor(y)
        shift_x[column], shift_y[column] = x - left, y - top
        row = np.int32(min(top, bottom - 1.0)) + np.int32(2)
        corner[column] = row * np.int32(stride) + np.int32(min(left, right - 1.0)) + np.int32(2)
    return _span(inside)


@pixels
def _locate_line(scale, offset, start, size, step, base, corner, shift, inside):
    """`_locate` where one coordinate moves, to (scale x + offset) + start, its pixels `step` apart in memory."""
    limit, along = np.float64(size), np.int32(step != 1)
    for column in range(corner.size):
        place = (scale * (np.float64(np.int32(column)) + 0.5) + offset) + start
        inside[column] = (place >= 0.0) & (place < limit)
        place = min(max(place, 0.0), limit) - 0.5
        low = np.floor(place)
        shift[column] = place - low
        pixel = np.int32(min(low, limit - 1.0)) * np.int32(step)
        corner[column] = pixel + np.int32(column) * along + np.int32(base)
    return _span(inside)


@pixels
def _span(inside):
    """The pixels that read from inside: one run of a row, since coordinates rise or fall along it, rounded or not."""
    first, last = 0, inside.size
    while first < last and inside[first] == 0:
        first += 1
    while last > first and inside[last - 1] == 0:
        last -= 1
    return first, last


@pixels
def _interpolate_line(source, step, corner, shift, cubic, out):
    """Interpolate between pixels `step` apart, in one run where neighbours read neighbours, else each by itself."""
    count = out.size
    if count == 0:
        return
    if not _consecutive(corner):
        if cubic:
            _cubic_line(source, step, corner, shift, out)
        else:
            _linear_line(source, step, corner, shift, out)
        return
    here = source[corner[0] :]
    if cubic:
        above = source[corner[0] - step :]
        _cubic_run(above[:count], here[:count], here[step : step + count], here[2 * step :], shift, out)
    else:
        _linear_run(here[:count], here[step : step + count], shift, out)


@pixels
def _consecutive(corner):
    apart = np.int32(0)
    for i in range(corner.size):
        apart |= corner[i] - (corner[0] + np.int32(i))
    return apart == 0


@pixels
def _cubic_plane(source, stride, corner, shift_x, shift_y, out):
    one, step = np.uint64(1), np.uint64(stride)  # unsigned: no test for negative indices
    for i in range(out.size):
        at = np.uint64(corner[i]) - step - one
        x, y = shift_x[i], shift_y[i]
        row0, row1 = _four(source, at), _four(source, at + step)
        row2, row3 = _four(source, at + step + step), _four(source, at + step + step + step)
        red = _cubic_pixel(row0, row1, row2, row3, np.uint32(0), x, y)
        green = _cubic_pixel(row0, row1, row2, row3, np.uint32(8), x, y)
        blue = _cubic_pixel(row0, row1, row2, row3, np.uint32(16), x, y)
        out[i] = red | (green << np.uint32(8)) | (blue << np.uint32(16))


@inlined
def _four(source, at):
    return source[at], source[at + np.uint64(1)], source[at + np.uint64(2)], source[at + np.uint64(3)]


@inlined
def _cubic_pixel(row0, row1, row2, row3, bits, x, y):
    above, here = _cubic_taps(row0, bits, x), _cubic_taps(row1, bits, x)
    below, last = _cubic_taps(row2, bits, x), _cubic_taps(row3, bits, x)
    return _clip(_cubic(above, here, below, last, y))


@inlined
def _cubic_taps(row, bits, x):
    return _cubic(_channel(row[0], bits), _channel(row[1], bits), _channel(row[2], bits), _channel(row[3], bits), x)


@inlined
def _cubic(v0, v1, v2, v3, x):
    """Pillow's cubic (a = -1) in Horner's form; its coefficients are exact for integers, whatever the type."""
    return v1 + x * ((v2 - v0) + x * ((2 * (v0 - v1) + v2 - v3) + x * (v1 - v0 - v2 + v3)))


@inlined
def _channel(pixel, bits):
    return np.int32((pixel >> bits) & np.uint32(255))


@inlined
def _clip(value):
    return np.uint32(np.int32(min(max(value, 0.0), 255.0)))


@pixels
def _cubic_line(source, stride, corner, shift, out):
    step = np.uint64(stride)
    for i in range(out.size):
        at = np.uint64(corner[i]) - step
        taps = source[at], source[at + step], source[at + step + step], source[at + step + step + step]
        out[i] = _cubic_between(taps, shift[i])


@pixels
def _cubic_run(before, here, after, last, shift, out):
    for i in range(out.size):
        out[i] = _cubic_between((before[i], here[i], after[i], last[i]), shift[i])


@inlined
def _cubic_between(taps, x):
    red = _clip(_cubic_taps(taps, np.uint32(0), x))
    green = _clip(_cubic_taps(taps, np.uint32(8), x))
    blue = _clip(_cubic_taps(taps, np.uint32(16), x))
    return red | (green << np.uint32(8)) | (blue << np.uint32(16))


@pixels
def _linear_plane(source, stride, corner, shift_x, shift_y, out):
    one, step = np.uint64(1), np.uint64(stride)
    for i in range(out.size):
        at = np.uint64(corner[i])
        taps = source[at], source[at + one], source[at + step], source[at + step + one]
        red = _linear_pixel(taps, np.uint32(0), shift_x[i], shift_y[i])
        green = _linear_pixel(taps, np.uint32(8), shift_x[i], shift_y[i])
        blue = _linear_pixel(taps, np.uint32(16), shift_x[i], shift_y[i])
        out[i] = red | (green << np.uint32(8)) | (blue << np.uint32(16))


@inlined
def _linear_pixel(taps, bits, x, y):
    above = _linear(_channel(taps[0], bits), _channel(taps[1], bits), x)
    below = _linear(_channel(taps[2], bits), _channel(taps[3], bits), x)
    return np.uint32(np.int32(above + (below - above) * y))


@inlined
def _linear(v0, v1, x):
    return v0 + (v1 - v0) * x


@pixels
def _linear_line(source, stride, corner, shift, out):
    step = np.uint64(stride)
    for i in range(out.size):
        at = np.uint64(corner[i])
        out[i] = _linear_between(source[at], source[at + step], shift[i])


@pixels
def _linear_run(here, after, shift, out):
    for i in range(out.size):
        out[i] = _linear_between(here[i], after[i], shift[i])


@inlined
def _linear_between(one, two, x):
    red = np.uint32(np.int32(_linear(_channel(one, np.uint32(0)), _channel(two, np.uint32(0)), x)))
    green = np.uint32(np.int32(_linear(_channel(one, np.uint32(8)), _channel(two, np.uint32(8)), x)))
    blue = np.uint32(np.int32(_linear(_channel(one, np.uint32(16)), _channel(two, np.uint32(16)), x)))
    return red | (green << np.uint32(8)) | (blue << np.uint32(16))
