"""Means over classes and targets against scikit-learn's, where some have no value."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, r2_score

from widemix.evaluation.assessment import Calibration
from widemix.evaluation.evaluate import R2, AveragePrecision
from widemix.evaluation.real_labels import RealAccuracy


def test_map_is_scikit_learns_over_the_classes_that_occur():
    numbers = np.random.default_rng(0)
    scores, targets = numbers.random((40, 6)), (numbers.random((40, 6)) < 0.3).astype(int)
    targets[:, [0, 4]] = 0
    metric = AveragePrecision()
    for part in np.array_split(np.arange(40), 4):
        metric.update(torch.from_numpy(scores[part]), torch.from_numpy(targets[part]))
    occur = [1, 2, 3, 5]
    expected = average_precision_score(targets[:, occur], scores[:, occur], average="macro")
    assert metric.compute().item() == pytest.approx(expected)
    assert metric.undefined == (0, 4)


def test_without_any_positive_sample_there_is_no_map():
    metric = AveragePrecision()
    metric.update(torch.rand(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.int64))
    assert metric.compute().isnan()
    assert metric.undefined == (0, 1)


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e7])
def test_r2_is_scikit_learns_over_the_targets_that_vary(scale):
    """Whatever their unit: torchmetrics takes small ones for constant."""
    numbers = np.random.default_rng(1)
    targets = scale * (1000 + numbers.standard_normal((30, 4)))
    targets[:, 2] = 0.1
    outputs = targets + scale * numbers.standard_normal((30, 4))
    metric = R2(4)
    for part in np.array_split(np.arange(30), 4):
        metric.update(torch.from_numpy(outputs[part]), torch.from_numpy(targets[part]))
    vary = [0, 1, 3]
    assert metric.compute().item() == pytest.approx(r2_score(targets[:, vary], outputs[:, vary]), rel=1e-8)
    assert metric.undefined == (2,)


def test_an_output_that_is_nan_leaves_no_target_out():
    """R2 was the mean over the others, which were said to be all that vary."""
    outputs, targets = torch.randn(2, 9, 2, dtype=torch.float64)
    for value in (torch.nan, torch.inf, -torch.inf):
        outputs[3, 1] = value
        metric = R2(2)
        metric.update(outputs, targets)
        assert metric.compute() == -torch.inf
        assert metric.undefined == ()


def test_a_class_of_all_samples_has_its_precision():
    every = AveragePrecision()
    every.update(torch.rand(4, 2, dtype=torch.float64), torch.tensor([[1, 0]] * 4))
    assert every.compute() == 1


def of_two_ranks(one, other):
    """What a metric computes where another rank has the other's states."""
    states = iter([getattr(other, name) for name in other.metric_state])
    one.distributed_available_fn = lambda: True
    one.dist_sync_fn = lambda own, group=None: [own, torch.cat(s) if isinstance(s := next(states), list) else s]
    return one.compute()


def test_ranks_together_have_the_metric_of_all_samples():
    numbers = torch.Generator().manual_seed(0)
    scores = torch.randn(13, 3, dtype=torch.float64, generator=numbers)
    numbers_wanted = scores + torch.randn(13, 3, dtype=torch.float64, generator=numbers)
    labels = torch.randint(3, (13,), generator=numbers)
    real = [[0], [1, 2], [], [2], [0, 1], [], [1], [0, 2], [2], [1], [0], [0, 1], [2]]
    for make, targets in (
        (lambda: R2(3), numbers_wanted),
        (AveragePrecision, (numbers_wanted > 0).long()),
        (Calibration, labels),
        (lambda: RealAccuracy(real), np.arange(13)),
    ):
        one, other, whole = make(), make(), make()
        one.update(scores[:5], targets[:5])
        other.update(scores[5:], targets[5:])
        whole.update(scores, targets)
        torch.testing.assert_close(of_two_ranks(one, other), whole.compute())
