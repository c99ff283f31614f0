"""The operations by PyTorch: on any device, in any precision, and what the others are held to."""

import torch
from torch import Tensor

from widemix.models.permutation import inverse


def norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, place: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """See `operations.norm`; also the mean [S, B] of each token and one over its deviation, for the gradient."""
    tokens = _exact(x).view(len(x) // len(weight), len(weight), x.shape[1])
    mean = tokens.mean(1)
    centred = tokens - mean[:, None]
    scale = (centred.square().mean(1) + eps).rsqrt()
    normed = centred * scale[:, None] * _exact(weight)[:, None] + _exact(bias)[:, None]
    return _scattered(normed.view(x.shape).to(dtype), place), mean, scale


def norm_backward(
    g: Tensor, x: Tensor, weight: Tensor, place: Tensor | None, mean: Tensor, scale: Tensor, more: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `norm` by x, weight and bias, from g [m, B] and for x `more` [m, B]."""
    shape = (len(x) // len(weight), len(weight), x.shape[1])
    own = _exact(_gathered(g, place)).view(shape)
    normed = (_exact(x).view(shape) - mean[:, None]) * scale[:, None]
    along = own * _exact(weight)[:, None]
    dx = scale[:, None] * (along - along.mean(1, keepdim=True) - normed * (along * normed).mean(1, keepdim=True))
    dx = dx.view(x.shape) if more is None else dx.view(x.shape) + _exact(more)
    return dx.to(x.dtype), (own * normed).sum((0, 2)), own.sum((0, 2))


def activate(x: Tensor, bias: Tensor) -> Tensor:
    """See `operations.activate`."""
    return torch.nn.functional.gelu(_exact(x) + _exact(bias)[:, None]).to(x.dtype)


def activate_backward(g: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `activate` by x and bias, from g [D, N]."""
    slope = torch.ops.aten.gelu_backward(_exact(g), _exact(x) + _exact(bias)[:, None])
    return slope.to(x.dtype), slope.sum(1)


def add(skip: Tensor | None, x: Tensor, bias: Tensor | None, index: Tensor | None) -> Tensor:
    """See `operations.add`; in the type that PyTorch gives a sum of both."""
    dtype = x.dtype if skip is None else torch.promote_types(skip.dtype, x.dtype)
    x = _exact(x)
    if bias is not None:
        x = (x.view(len(bias), x.numel() // len(bias)) + _exact(bias)[:, None]).view(x.shape)
    x = _gathered(x, index)
    return (x if skip is None else _exact(skip) + x).to(dtype)


def add_backward(g: Tensor, index: Tensor | None, biases: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The gradients of `add` by x, in its `dtype`, and by its bias of `biases` numbers (0: None), from g [m, B]."""
    dx = _scattered(g, index)
    return dx.to(dtype), _exact(dx).view(biases, dx.numel() // biases).sum(1) if biases else None


def _exact(x: Tensor) -> Tensor:
    """Return the type that sums are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _gathered(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)


def _scattered(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, inverse(index))
