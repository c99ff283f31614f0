"""The losses of `train.loss` against their formulas, in NumPy's doubles."""

import numpy as np
import pytest
import torch

from widemix.recipe.losses import LOSSES


def softmax(x: np.ndarray, p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.exp(x) / np.exp(x).sum(1, keepdims=True))).sum(1)


def sigmoid(x: np.ndarray, p: np.ndarray) -> np.ndarray:
    on = 1 / (1 + np.exp(-x))
    return -(p * np.log(on) + (1 - p) * np.log(1 - on)).sum(1)


def squared(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return ((x - y) ** 2).mean(1)


@pytest.mark.parametrize(("name", "formula"), [("softmax", softmax), ("sigmoid", sigmoid), ("mse", squared)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_a_loss_is_the_mean_of_its_formula(name, formula, kind):
    """Computed in float32 of outputs in any precision; of mixed and smoothed targets too."""
    torch.manual_seed(0)
    outputs, targets = 3 * torch.randn(3, 5), torch.rand(3, 5)  # no distributions: sums are not 1
    outputs = outputs.to(kind)
    found = LOSSES[name].compute(outputs, targets)
    assert (found.dtype, found.shape) == (torch.float32, ())
    expected = formula(outputs.double().numpy(), targets.double().numpy()).mean()
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_each_loss_is_for_some_targets():
    assert {name: loss.targets for name, loss in LOSSES.items()} == {
        "softmax": ("class",),
        "sigmoid": ("class", "multilabel"),
        "mse": ("regression",),
    }
