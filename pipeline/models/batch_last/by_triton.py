"""The operations by Triton in fp32, bf16 and fp16, mixed as by autocast. Sizes of blocks were chosen on an H100.

Each program reads a block of each matrix, once, and computes in fp32. Gradients of weights and biases are sums over
programs, which PyTorch adds up: without atomics, so that they are the same each time.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_TYPES = {torch.float32, torch.bfloat16, torch.float16}


def takes(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels compute with a tensor like x and others of this type: on Volta and newer GPUs."""
    known = x.is_cuda and {x.dtype, dtype} <= _TYPES and x.numel() > 0  # no launch has an empty grid
    return known and torch.cuda.get_device_capability(x.device) >= (7, 0)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, place: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """See `by_torch.norm`."""
    channels, batch = len(weight), x.shape[1]
    tokens = len(x) // channels
    y = torch.empty_like(x, dtype=dtype)
    mean, scale = x.new_empty(2, tokens, batch, dtype=torch.float32)
    grid, sizes = _tokens(tokens, channels, batch, max(x.itemsize, y.itemsize))
    _launch(_norm, grid, x, y, mean, scale, weight, bias, place, batch, eps, **sizes)
    return y, mean, scale


def norm_backward(
    g: Tensor, x: Tensor, weight: Tensor, place: Tensor | None, mean: Tensor, scale: Tensor, more: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `by_torch.norm_backward`."""
    channels, batch = len(weight), x.shape[1]
    dx = torch.empty_like(x)
    grid, sizes = _tokens(len(x) // channels, channels, batch, max(x.itemsize, g.itemsize))
    dweight, dbias = x.new_empty(2, math.prod(grid), channels, dtype=torch.float32)
    _launch(_norm_backward, grid, g, x, more, mean, scale, weight, place, dx, dweight, dbias, batch, **sizes)
    return dx, dweight.sum(0), dbias.sum(0)


def activate(x: Tensor, bias: Tensor) -> Tensor:
    """See `by_torch.activate`."""
    y = torch.empty_like(x)
    tiles, sizes = _columns(x.shape[1])
    _launch(_activate, (len(x) * tiles,), x, bias, y, x.shape[1], tiles, **sizes)
    return y


def activate_backward(g: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """See `by_torch.activate_backward`."""
    dx = torch.empty_like(x)
    tiles, sizes = _columns(x.shape[1])
    dbias = x.new_empty(len(x), tiles, dtype=torch.float32)
    _launch(_activate_backward, (len(x) * tiles,), g, x, bias, dx, dbias, x.shape[1], tiles, **sizes)
    return dx, dbias.sum(1)


def add(skip: Tensor | None, x: Tensor, bias: Tensor | None, index: Tensor | None) -> Tensor:
    """See `by_torch.add`."""
    dtype = x.dtype if skip is None else torch.promote_types(skip.dtype, x.dtype)
    out = torch.empty_like(x, dtype=dtype)
    grid, sizes = _rows(*x.shape)
    each = 1 if bias is None else len(x) // len(bias)
    _launch(_add, grid, x, skip, bias, index, out, *x.shape, EACH=each, **sizes)
    return out


def add_backward(g: Tensor, index: Tensor | None, biases: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """See `by_torch.add_backward`."""
    if index is None:
        return g.to(dtype), g.view(biases, -1).sum(1, dtype=torch.float32) if biases else None
    dx = torch.empty_like(g, dtype=dtype)
    grid, sizes = _rows(*g.shape)
    dbias = g.new_empty(len(g), grid[1], dtype=torch.float32) if biases else None
    _launch(_add_backward, grid, g, index, dx, dbias, *g.shape, **sizes)
    return dx, None if dbias is None else dbias.view(biases, -1).sum(1)


def _tokens(tokens: int, channels: int, batch: int, itemsize: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, a program for each token and some images, and the sizes of its blocks.

    Of more than 256 channels each sum reads them again, from the cache: with all of them in registers there is room
    for 16 images alone, and what is read of a row is short. For 768 channels that took 1.3 to 1.6 times as long.
    64 images at once, where registers have room for them, took 0.7 to 0.9 times as long as 32.
    """
    wide = itemsize == 2 and channels > 256
    block_c, block_b = (
        min(triton.next_power_of_2(channels), 256),
        min(triton.next_power_of_2(batch), 64 if wide else 32),
    )
    warps = max(1, block_c * block_b // (2048 if wide else 1024))
    sizes = {"C": channels, "BLOCK_C": block_c, "BLOCK_B": block_b, "num_warps": warps}
    return (tokens, triton.cdiv(batch, block_b)), sizes


def _columns(columns: int) -> tuple[int, dict[str, int]]:
    """How many programs share a row, and the size of their blocks of columns."""
    block = min(triton.next_power_of_2(columns), 1024)
    return triton.cdiv(columns, block), {"BLOCK": block, "num_warps": 2}


def _rows(rows: int, batch: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, programs for some rows and images, and the sizes of their blocks."""
    block_b = min(triton.next_power_of_2(batch), 128)
    block_r = 2048 // block_b
    return (triton.cdiv(rows, block_r), triton.cdiv(batch, block_b)), {"BLOCK_R": block_r, "BLOCK_B": block_b}


def _launch(kernel, grid: tuple[int, ...], first: Tensor, *arguments, **constants) -> None:
    """Run a kernel on the GPU of its first argument, which need not be the current one."""
    with torch.cuda.device_of(first):
        kernel[grid](first, *arguments, enable_fp_fusion=True, **constants)


@triton.jit
def _norm(
    x, y, mean, scale, weight, bias, place, batch, eps, C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr
):
    token, b = tl.program_id(0), tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    m, v = tl.zeros([BLOCK_B], tl.float32), tl.zeros([BLOCK_B], tl.float32)
    # Where the three loops have one round, of the same block of channels, the compiler makes one read of three.
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        m += tl.sum(_read(x, token * C + c, c < C, b, batch), 0)
    m /= C
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        apart = tl.where((c < C)[:, None], _read(x, token * C + c, c < C, b, batch) - m, 0)
        v += tl.sum(apart * apart, 0)
    s = tl.rsqrt(v / C + eps)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        normed = (_read(x, token * C + c, c < C, b, batch) - m) * s
        values = normed * _numbers(weight, c, c < C)[:, None] + _numbers(bias, c, c < C)[:, None]
        _write(y, _at(place, token * C + c, c < C), c < C, b, batch, values)
    at = token.to(tl.int64) * batch + b
    tl.store(mean + at, m, b < batch)
    tl.store(scale + at, s, b < batch)


@triton.jit
def _norm_backward(
    g, x, more, mean, scale, weight, place, dx, dweight, dbias, batch,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    token, b = tl.program_id(0), tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    at = token.to(tl.int64) * batch + b
    m, s = _numbers(mean, at, b < batch), _numbers(scale, at, b < batch)
    total, along = tl.zeros([BLOCK_B], tl.float32), tl.zeros([BLOCK_B], tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        own = _read(g, _at(place, token * C + c, c < C), c < C, b, batch)
        normed = (_read(x, token * C + c, c < C, b, batch) - m) * s
        weighted = own * _numbers(weight, c, c < C)[:, None]
        total += tl.sum(weighted, 0)
        along += tl.sum(weighted * normed, 0)
    sums = (token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * C
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        own = _read(g, _at(place, token * C + c, c < C), c < C, b, batch)
        normed = (_read(x, token * C + c, c < C, b, batch) - m) * s
        weighted = own * _numbers(weight, c, c < C)[:, None]
        values = s * (weighted - total / C - normed * (along / C))
        if more is not None:
            values += _read(more, token * C + c, c < C, b, batch)
        _write(dx, token * C + c, c < C, b, batch, values)
        tl.store(dweight + sums + c, tl.sum(own * normed, 1), c < C)
        tl.store(dbias + sums + c, tl.sum(own, 1), c < C)


@triton.jit
def _activate(x, bias, y, columns, tiles, BLOCK: tl.constexpr):
    row, n = tl.program_id(0) // tiles, (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * columns + n
    u = _numbers(x, at, n < columns) + tl.load(bias + row).to(tl.float32)
    tl.store(y + at, u * _normal(u), n < columns)


@triton.jit
def _activate_backward(g, x, bias, dx, dbias, columns, tiles, BLOCK: tl.constexpr):
    row, n = tl.program_id(0) // tiles, (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * columns + n
    u = _numbers(x, at, n < columns) + tl.load(bias + row).to(tl.float32)
    density = tl.exp(-0.5 * u * u) * 0.3989422804014327
    slope = _numbers(g, at, n < columns) * (_normal(u) + u * density)
    tl.store(dx + at, slope, n < columns)
    tl.store(dbias + tl.program_id(0), tl.sum(slope, 0))


@triton.jit
def _add(x, skip, bias, index, out, size, batch, EACH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    source = _at(index, r, r < size)
    values = _read(x, source, r < size, b, batch)
    if bias is not None:
        values += _numbers(bias, source // EACH, r < size)[:, None]
    if skip is not None:
        values += _read(skip, r, r < size, b, batch)
    _write(out, r, r < size, b, batch, values)


@triton.jit
def _add_backward(g, index, dx, dbias, size, batch, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    source = _at(index, r, r < size)
    values = _read(g, r, r < size, b, batch)
    _write(dx, source, r < size, b, batch, values)
    if dbias is not None:
        sums = dbias + source.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(sums, tl.sum(values, 1), r < size)


@triton.jit
def _normal(u):
    """The normal distribution below u."""
    return 0.5 + 0.5 * tl.erf(u * 0.7071067811865476)


@triton.jit
def _at(index, rows, real):
    """index[rows], or the rows where there is none."""
    return rows if index is None else tl.load(index + rows, real, 0)


@triton.jit
def _numbers(vector, at, real):
    """fp32; 0 where not real."""
    return tl.load(vector + at, real, 0).to(tl.float32)


@triton.jit
def _read(matrix, rows, real, b, batch):
    """Rows and columns b of [m, batch] in fp32; 0 where a row is not real or no column is."""
    return _numbers(matrix, rows.to(tl.int64)[:, None] * batch + b, real[:, None] & (b < batch))


@triton.jit
def _write(matrix, rows, real, b, batch, values):
    """The opposite of `_read`, rounded to the matrix' type."""
    tl.store(matrix + (rows.to(tl.int64)[:, None] * batch + b), values, real[:, None] & (b < batch))
