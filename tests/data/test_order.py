"""The order of samples: the same set in a step on every world size, all of an epoch, well shuffled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.order import evaluation_samples, shuffled, step_samples, steps_per_epoch

CASE = {"count": st.integers(1, 3000), "seed": st.integers(0, 2**63), "epoch": st.integers(0, 1000)}


@settings(deadline=None, max_examples=60)
@given(**CASE)
def test_an_epoch_is_a_permutation(count, seed, epoch):
    order = shuffled(np.arange(count), count, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(count))


@settings(deadline=None, max_examples=60)
@given(**CASE, batch=st.integers(1, 640))
def test_the_steps_of_an_epoch_are_its_permutation_cut_into_batches(count, seed, epoch, batch):
    steps = steps_per_epoch(count, batch)
    taken = [step_samples(count, seed, epoch, step, batch) for step in range(steps)]
    whole = shuffled(np.arange(count), count, seed, epoch)[: steps * batch]
    assert np.array_equal(np.concatenate([*taken, whole[:0]]), whole)


@settings(deadline=None, max_examples=60)
@given(count=st.integers(0, 500), world=st.integers(1, 128))
def test_evaluation_sees_every_sample_once(count, world):
    seen = np.concatenate([evaluation_samples(count, rank, world) for rank in range(world)])
    assert np.array_equal(np.sort(seen), np.arange(count))


def test_the_order_is_the_one_it_always_was():
    """A change here would change every run of every user: it needs a reason and a new major version."""
    assert shuffled(np.arange(10), 10, seed=0, epoch=0).tolist() == [4, 5, 6, 0, 7, 3, 1, 2, 9, 8]
    assert shuffled(np.arange(10), 10, seed=0, epoch=1).tolist() == [7, 3, 4, 5, 0, 8, 2, 1, 6, 9]


def test_epochs_and_seeds_differ():
    orders = {tuple(shuffled(np.arange(100), 100, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize("count", [10, 100, 1437])
def test_positions_are_uniform(count):
    """Chi-squared of where samples land over 4,000 epochs, and of which sample follows which."""
    epochs = 4000
    orders = np.stack([shuffled(np.arange(count), count, 7, epoch) for epoch in range(epochs)])
    bins = 10
    for watched in (0, count // 2, count - 1):
        positions = (orders == watched).argmax(axis=1)
        _assert_uniform(np.bincount(positions * bins // count, minlength=bins), bins, count)
    steps = (orders[:, 1] - orders[:, 0]) % count - 1  # uniform over 0..count-2
    _assert_uniform(np.bincount(steps * bins // (count - 1), minlength=bins), bins, count - 1)


def _assert_uniform(found, bins, count):
    exact = np.bincount(np.arange(count) * bins // count, minlength=bins) / count
    expected = exact[exact > 0] * found.sum()
    chi2 = ((found[exact > 0] - expected) ** 2 / expected).sum()
    assert chi2 < 33.7  # 9 degrees of freedom: 1 in 10,000
