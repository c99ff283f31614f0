"""Permutations of the m = S*C entries of a feature matrix, as index vectors, and how columns are permuted.

A permutation J is an int32 vector with (J x)[i] = x[index[i]]. Entries are flattened row by row: [S, C] becomes
[S*C] with the channels of a token next to each other. (The papers' vec stacks columns; the two differ by J_c.)

Columns of a matrix are permuted on a CPU by compiled code (pipeline/native/reorder.c), which moves four rows at once,
elsewhere by PyTorch's `index_select`, which on a CPU moves one number at a time.
"""

import ctypes
import functools
import inspect
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from widemix.native import BuildError
from widemix.native.library import open_library


def identity(size: int) -> Tensor:
    """J x = x."""
    return torch.arange(size, dtype=torch.int32)


def commutation(rows: int, columns: int) -> Tensor:
    """J_c: takes the flattened [rows, columns] matrix to its flattened transpose."""
    return identity(rows * columns).view(rows, columns).t().flatten()


def random(size: int, key: int | Sequence[int]) -> Tensor:
    """A uniform random permutation; the non-negative integers in `key` determine it."""
    order = np.random.default_rng(key).permutation(size)
    return torch.from_numpy(order.astype(np.int32))


def compose(second: Tensor, first: Tensor) -> Tensor:
    """The product `second @ first`: applies `first`, then `second`."""
    return first[second]


class _Reorder(torch.autograd.Function):
    """x[:, index], or with `back` x[:, inverse(index)]: each is the gradient of the other.

    PyTorch's own gradient of an index adds into zeros atomically.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, back: bool) -> Tensor:
        """[B, m] -> [B, m]."""
        return reorder_columns(x, index, back)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        """Keep the index for the gradient."""
        _, index, ctx.back = inputs
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx, gradient):
        """The gradient, in the order of the input: [B, m]."""
        (index,) = ctx.saved_tensors
        reorder = _Reorder.apply if torch.is_grad_enabled() else reorder_columns  # for a gradient of this gradient
        return reorder(gradient, index, not ctx.back), None, None


# PyTorch asks for the signature at every call, and would make it anew.
_Reorder.forward.__signature__ = inspect.signature(_Reorder.forward)  # type: ignore[attr-defined]


class Permute(nn.Module):
    """J x for any J, reshaped into rows: [B, n, d] of m = n*d entries -> [B, m / columns, columns]."""

    def __init__(self, index: Tensor, columns: int):
        super().__init__()
        self.columns = columns
        self.index: Tensor
        self.register_buffer("index", index)

    def check_indices(self) -> None:
        """Raise ValueError unless `index`, which may have been loaded, is a permutation."""
        if not torch.equal(self.index.sort().values.cpu(), identity(len(self.index))):
            raise ValueError("index is not a permutation")

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, m / columns, columns]."""
        flat = x.flatten(1)  # [B, m]
        if torch.jit.is_scripting():  # it does not support autograd.Function
            moved = flat.index_select(1, self.index)
        else:
            moved = _Reorder.apply(flat, self.index, False)
        return moved.unflatten(1, (-1, self.columns))

    def extra_repr(self) -> str:
        """For print(module)."""
        return f"{len(self.index)}, columns={self.columns}"


class Transpose(nn.Module):
    """J_c x, reshaped into rows: [B, n, d] -> [B, d, n], as a view."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, d, n]."""
        return x.transpose(1, 2)


# By bytes of a number: the threads with which PyTorch is as fast as the compiled code, which has one.
_THREADS = {2: 12, 4: 2}
_OUT_OF_RANGE = 2  # of reorder.c

_NAME = "widemix::reorder_columns"
torch.library.define(_NAME, "(Tensor x, Tensor index, bool back) -> Tensor")  # tracers see it as one operator


def inverse(index: Tensor) -> Tensor:
    """J^T, which is J^-1."""
    result = torch.empty_like(index)
    result[index] = torch.arange(len(index), dtype=index.dtype, device=index.device)
    return result


def reorder_columns(x: Tensor, index: Tensor, back: bool = False) -> Tensor:
    """x[:, index] of a matrix [B, m], or with `back` x[:, inverse(index)]; `index` is a permutation, int32 [m]."""
    if _is_compiled(x, index):
        return torch.ops.widemix.reorder_columns(x, index, back)
    return _by_torch(x, index, back)


def _is_compiled(x: Tensor, index: Tensor) -> bool:
    """Whether the compiled code takes such tensors, is faster, and nothing wants to see PyTorch's operators."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or isinstance(x, FakeTensor):
        return False
    if x.device.type != "cpu" or torch.get_num_threads() >= _THREADS.get(x.element_size(), 0):
        return False
    return index.dtype == torch.int32 and _library() is not None


def _by_torch(x: Tensor, index: Tensor, back: bool) -> Tensor:
    return x.index_select(1, inverse(index) if back else index)


def _by_compiled_code(x: Tensor, index: Tensor, back: bool) -> Tensor:
    library = _library()
    assert library is not None
    x, index, (rows, size) = x.contiguous(), index.contiguous(), x.shape
    if len(index) != size:
        raise IndexError(f"{len(index)} indices of {size} columns")
    out = torch.empty_like(x)
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, out, index))
    failed = library.reorder_columns(*pointers, ctypes.c_int64(rows), ctypes.c_int64(size), x.element_size(), back)
    if failed == _OUT_OF_RANGE:
        raise IndexError(f"index out of range of {size} columns")
    if failed:
        raise MemoryError(f"no memory to permute {size} columns")
    return out


def _batched(info, in_dims, x: Tensor, index: Tensor, back: bool) -> tuple[Tensor, int]:
    """Every x of a batch is more rows; where the indices are batched too, each x has its own."""
    x_dim, index_dim, _ = in_dims
    if index_dim is None:
        moved = _by_compiled_code(x.movedim(x_dim, 0).flatten(0, 1), index, back)
        return moved.unflatten(0, (info.batch_size, -1)), 0
    each = [x] * info.batch_size if x_dim is None else x.unbind(x_dim)
    pairs = zip(each, index.unbind(index_dim), strict=True)
    return torch.stack([_by_compiled_code(one, own, back) for one, own in pairs]), 0


torch.library.impl(_NAME, "CPU", _by_compiled_code)
torch.library.register_vmap(_NAME, _batched)


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return open_library()
    except BuildError:  # whoever reads images says so
        return None
