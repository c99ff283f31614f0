"""Linear layers with frozen random masks on their weights.

A masked weight is stored as its nonzero values, with their positions in compressed rows and columns: weights,
gradients and optimizer state are p times those of the dense matrix. `multiplies_sparsely` decides how it is
multiplied: as a sparse matrix, or scattered into a dense one, which is faster on a GPU and with many rows.

Shapes: B batch, I inputs, O outputs, N nonzero values.
"""

import warnings

import numpy as np
import torch
from timm.models import register_notrace_module
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

DENSE_ENTRIES = 1 << 28  # largest dense copy of a weight, in entries: 1 GiB in fp32


def row_counts(outputs: int, inputs: int, density: float, generator: np.random.Generator) -> np.ndarray:
    """Sample the number of nonzeros in each row of a Bernoulli(density) mask [outputs, inputs]: int [outputs]."""
    if density == 1:
        return np.full(outputs, inputs)
    # The same numbers with every numpy: Generator.binomial gives others since 2.5, RandomState never will.
    return np.random.RandomState(generator.bit_generator).binomial(inputs, density, size=outputs)


def multiplies_sparsely(
    device: torch.device, density: float, entries: int, rows: int = 1, dtype: torch.dtype = torch.float32
) -> bool:
    """Whether to multiply a matrix [rows, I] in this precision as with a sparse matrix: always above `DENSE_ENTRIES`.

    Otherwise on a CPU alone, where that is faster: at densities up to 0.3, for as many rows as the limit allows.
    """
    if entries > DENSE_ENTRIES or device.type != "cpu":
        return entries > DENSE_ENTRIES
    return density <= 0.3 and density * rows <= (10 if dtype.itemsize == 2 else 30)


def _csr(starts: Tensor, indices: Tensor, values: Tensor, columns: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        size = (len(starts) - 1, columns)
        return torch.sparse_csr_tensor(starts, indices, values, size, check_invariants=False)


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Sparse products exist in fp32 and fp64 only."""
    kind = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return [t.to(kind) for t in tensors]


@torch.library.custom_op("widemix::sparse_product", mutates_args=())
def sparse_product(x: Tensor, values: Tensor, starts: Tensor, indices: Tensor, outputs: int) -> Tensor:
    """[B, I] times the transpose of the compressed-row matrix [O, I] -> [B, O]."""
    x_wide, values_wide = _wide(x, values)
    with torch.autocast(x.device.type, enabled=False):
        return (_csr(starts, indices, values_wide, x.shape[1]) @ x_wide.T).T.to(x.dtype).contiguous()


@sparse_product.register_fake
def _(x, values, starts, indices, outputs):
    return x.new_empty(x.shape[0], outputs)


@torch.library.custom_op("widemix::sampled_product", mutates_args=())
def sampled_product(gradient: Tensor, x: Tensor, values: Tensor, starts: Tensor, indices: Tensor) -> Tensor:
    """The entries of gradient^T x [O, I] at the nonzero positions alone: the gradient of the values, [N]."""
    gradient_wide, x_wide, values_wide = _wide(gradient, x, values)
    pattern = _csr(starts, indices, values_wide, x.shape[1])
    with torch.autocast(x.device.type, enabled=False):
        sampled = torch.sparse.sampled_addmm(pattern, gradient_wide.T.contiguous(), x_wide.contiguous(), beta=0.0)
    return sampled.values().to(values.dtype, copy=True)


@sampled_product.register_fake
def _(gradient, x, values, starts, indices):
    return torch.empty_like(values)


@register_flop_formula(torch.ops.widemix.sparse_product)
def _sparse_product_flops(x_shape, values_shape, *args, **kwargs) -> int:
    return 2 * x_shape[0] * values_shape[0]


@register_flop_formula(torch.ops.widemix.sampled_product)
def _sampled_product_flops(gradient_shape, x_shape, values_shape, *args, **kwargs) -> int:
    return 2 * x_shape[0] * values_shape[0]


class _SparseProduct(torch.autograd.Function):
    """x W^T with W by compressed rows, its gradient for x by compressed columns, for the values by sampling."""

    @staticmethod
    def forward(ctx, x, values, row_starts, columns, column_starts, rows, order):
        """[B, I] -> [B, O]."""
        ctx.save_for_backward(x, values, row_starts, columns, column_starts, rows, order)
        return sparse_product(x, values, row_starts, columns, len(row_starts) - 1)

    @staticmethod
    def backward(ctx, gradient):
        """The gradients of x, [B, I], and of the values, [N]: [B, O] -> both."""
        x, values, row_starts, columns, column_starts, rows, order = ctx.saved_tensors
        for_x = for_values = None
        if ctx.needs_input_grad[0]:
            for_x = sparse_product(gradient, values[order], column_starts, rows, x.shape[1])
        if ctx.needs_input_grad[1]:
            for_values = sampled_product(gradient, x, values, row_starts, columns)
        return for_x, for_values, None, None, None, None, None


def _layout(counts: np.ndarray, columns: np.ndarray, inputs: int) -> dict[str, np.ndarray]:
    """Where the values are, by rows and by columns: int32 arrays. `counts` are the values in each row."""
    order = np.argsort(columns, kind="stable")
    layout = {
        "row_starts": np.concatenate([[0], np.cumsum(counts)]),
        "columns": columns,
        "column_starts": np.concatenate([[0], np.cumsum(np.bincount(columns, minlength=inputs))]),
        "rows": np.repeat(np.arange(len(counts)), counts)[order],
        "order": order,
    }
    return {name: array.astype(np.int32) for name, array in layout.items()}


@register_notrace_module  # torch.fx cannot follow how it chooses the product
class SparseLinear(nn.Module):
    """(M * W) x + b with a frozen mask M ~ Bernoulli(density): [B, I] -> [B, O].

    Values start as N(0, 1 / (density * I)): the paper's N(0, 1/I) with the mask scaled by 1 / sqrt(density).
    """

    matrices_on_one_axis = ("values",)  # they decay as other matrices do: pipeline/optim/build.py

    def __init__(self, inputs: int, outputs: int, density: float, key: tuple[int, ...], bias: bool = True):
        super().__init__()
        self.inputs, self.outputs, self.density = inputs, outputs, density
        self.rule_device: torch.device | None = None  # whose rule decides on the product; None: the input's
        generator = np.random.default_rng(key)
        counts = row_counts(outputs, inputs, density, generator)
        chosen = [np.sort(generator.choice(inputs, count, replace=False, shuffle=False)) for count in counts]
        columns = np.concatenate(chosen)
        self.row_starts: Tensor
        self.columns: Tensor
        self.values = nn.Parameter(torch.randn(len(columns)) * (density * inputs) ** -0.5)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        for name, array in _layout(counts, columns, inputs).items():
            self.register_buffer(name, torch.from_numpy(array).to(self.values.device))

    def check_indices(self) -> None:
        """Raise ValueError unless the positions of the values, which may have been loaded, fit each other."""
        row_starts, columns = self.row_starts.cpu().numpy(), self.columns.cpu().numpy()
        counts = np.diff(row_starts)
        if row_starts[0] != 0 or row_starts[-1] != len(columns) or counts.min() < 0:
            raise ValueError("row_starts does not divide the values into rows")
        if columns.min() < 0 or columns.max() >= self.inputs:
            raise ValueError(f"columns has entries outside of 0 to {self.inputs - 1}")
        for name, array in _layout(counts, columns, self.inputs).items():
            if not np.array_equal(self.get_buffer(name).cpu().numpy(), array):
                raise ValueError(f"{name} does not fit row_starts and columns")

    def dense_weight(self) -> Tensor:
        """M * W as a matrix [O, I], differentiable in the values."""
        per_row = self.row_starts[1:] - self.row_starts[:-1]
        row = torch.arange(self.outputs, device=self.values.device)
        row = row.repeat_interleave(per_row, output_size=len(self.values))
        return self._dense(row)

    def _dense(self, row: Tensor) -> Tensor:
        """The matrix of values in these rows, [N] -> [O, I]."""
        index = row * self.inputs + self.columns
        empty = self.values.new_zeros(self.outputs * self.inputs)
        return empty.index_put_((index,), self.values).view(self.outputs, self.inputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, I] -> [B, O]."""
        # TorchScript does not support autograd.Function.
        return self._densely(x) if torch.jit.is_scripting() else self._by_rule(x)

    def _densely(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dense_weight(), self.bias)

    def _by_rule(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():  # a program runs where our sparse product is not; ONNX repeats no entries
            order, rows = self.get_buffer("order").long(), self.get_buffer("rows").long()
            dense = self._dense(torch.zeros_like(order).scatter(0, order, rows))
            return nn.functional.linear(x, dense, self.bias)
        device = self.rule_device or x.device
        rounds = device.type == "cpu" and torch.is_autocast_enabled("cpu")  # which no other device's rule depends on
        dtype = torch.get_autocast_dtype("cpu") if rounds else x.dtype
        if not multiplies_sparsely(device, self.density, self.inputs * self.outputs, x.shape[0], dtype):
            return self._densely(x)
        layout = (self.row_starts, self.columns, self.column_starts, self.rows, self.order)
        product = _SparseProduct.apply(x, self.values, *layout)
        return product if self.bias is None else product + self.bias

    def extra_repr(self) -> str:
        """For print(module)."""
        return f"{self.inputs}, {self.outputs}, density={self.density}, nonzero={len(self.values)}"
