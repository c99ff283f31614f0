"""Sums over samples against scikit-learn's and numpy's."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, mean_absolute_error, top_k_accuracy_score

from widemix.evaluation.sums import Accuracy, Confusion, Mean, MeanAbsoluteError

PARTS = (7, 1, 32)


@pytest.fixture
def batches():
    numbers = np.random.default_rng(0)
    logits, labels = (
        torch.from_numpy(numbers.standard_normal((40, 6))),
        torch.from_numpy(numbers.integers(6, size=40)),
    )
    return logits, labels, [*zip(logits.split(PARTS), labels.split(PARTS), strict=True)]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_accuracy_is_scikit_learns(batches, k):
    logits, labels, parts = batches
    metric = Accuracy(k)
    for part in parts:
        metric.update(*part)
    assert metric.compute().item() == top_k_accuracy_score(labels, logits, k=k, labels=range(6))


def test_confusions_are_scikit_learns(batches):
    logits, labels, parts = batches
    metric = Confusion(6)
    for part in parts:
        metric.update(*part)
    assert metric.compute().tolist() == confusion_matrix(labels, logits.argmax(1), labels=range(6)).tolist()


def test_the_mean_absolute_error_is_scikit_learns(batches):
    targets, _, parts = batches
    metric = MeanAbsoluteError(torch.float64)
    for part, _ in parts:
        metric.update(part.square(), part)
    assert metric.compute().item() == pytest.approx(mean_absolute_error(targets, targets.square()), rel=1e-14)


def test_a_mean_is_numpys_and_nan_if_one_value_is(batches):
    values, metric = batches[0].flatten(), Mean(torch.float64)
    for part in values.split(100):
        metric.update(part)
    assert metric.compute().item() == pytest.approx(np.mean(values.numpy()), rel=1e-14)
    metric.update(torch.tensor([torch.nan]))
    assert metric.compute().isnan()
