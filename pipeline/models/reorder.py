"""Permutes the columns of a matrix: on a CPU by compiled code, elsewhere by PyTorch's `index_select`.

PyTorch moves one number at a time on a CPU; the compiled code moves four rows at once (pipeline/native/reorder.c).
"""

import ctypes
import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from widemix.native import BuildError
from widemix.native.library import open_library

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
