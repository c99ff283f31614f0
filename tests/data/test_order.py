"""Both orders: the same step on every world size, all of an epoch once, well shuffled, repeats included."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data.distributed_sampler import RepeatAugSampler

from tests.data.plain_batches import permuted, stream_of
from widemix.data import random
from widemix.data.order import RandomOrder, evaluation_samples, rank_slices, shuffled, split_views, steps_per_epoch
from widemix.data.paged import PagedOrder
from widemix.data.random import ORDER, key
from widemix.data_prep.samples import ImageFiles
from widemix.data_prep.shuffle import shuffled_order

KINDS = ["random", "paged"]
ANY = {
    "count": st.integers(1, 3000),
    "batch": st.integers(1, 300),
    "seed": st.integers(0, 2**63 - 1),
    "epoch": st.integers(0, 1000),
    "window": st.integers(1, 200_000),
}


def order_of(kind, count, batch, seed=0, repeats=1, window=20_000, page=500):
    """Samples of 20 to 60 bytes, one after the other behind a header."""
    if kind == "random":
        return RandomOrder(count, batch, seed, repeats)
    size = np.random.RandomState(count).randint(20, 61, count)
    return PagedOrder(100 + np.cumsum(size) - size, size, batch, seed, window, repeats, page)


def epoch_of(order, epoch, count, batch, first=0):
    steps = [order.step(epoch, step) for step in range(first, steps_per_epoch(count, batch))]
    return np.concatenate([np.empty(0, np.int64), *steps])


def permutation(count, seed, epoch):
    return shuffled(np.arange(count), count, key(seed, epoch, count, ORDER))


@settings(max_examples=80)
@given(count=st.integers(1, 5000), stream=st.integers(0, 2**64 - 1))
def test_shuffled_is_a_permutation(count, stream):
    assert np.array_equal(np.sort(shuffled(np.arange(count), count, stream)), np.arange(count))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(**ANY)
def test_an_epoch_has_every_sample_at_most_once_and_leaves_out_less_than_a_batch(
    kind, count, batch, seed, epoch, window
):
    view_ids = epoch_of(order_of(kind, count, batch, seed, window=window), epoch, count, batch)
    assert len(view_ids) == count // batch * batch
    assert len(np.unique(view_ids)) == len(view_ids)
    assert ((view_ids >= 0) & (view_ids < count)).all()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(**ANY, repeats=st.integers(2, 5))
def test_with_repeats_each_sample_is_shown_in_all_its_views(kind, count, batch, seed, epoch, window, repeats):
    """But for those at the ends of the lanes, whose later views fall beyond the epoch."""
    order = order_of(kind, count, batch, seed, repeats, window)
    view_ids = epoch_of(order, epoch, count, batch)
    assert len(np.unique(view_ids)) == len(view_ids)
    samples, views = view_ids % count, view_ids // count
    assert ((views >= 0) & (views < repeats)).all()
    shown, times = np.unique(samples, return_counts=True)
    lanes = getattr(order, "lanes", 1)
    assert (times == repeats).sum() >= len(shown) - lanes
    assert len(shown) <= -(-len(view_ids) // repeats) + lanes
    for sample in shown[times < repeats]:  # the first views are there, and no later one without an earlier one
        assert sorted(views[samples == sample]) == list(range((samples == sample).sum()))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(
    world=st.integers(1, 128),
    part=st.integers(1, 6),
    more=st.integers(0, 500),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 99),
    repeats=st.integers(1, 3),
    data=st.data(),
)
def test_worlds_and_restarts_see_the_same_steps(kind, world, part, more, seed, epoch, repeats, data):
    """Each rank of each start makes an order of its own; together they see what one run of one rank sees."""
    batch = world * part
    count = 3 * batch + more
    steps = steps_per_epoch(count, batch)
    alone = order_of(kind, count, batch, seed, repeats)
    expected = [alone.step(epoch, step) for step in range(steps)]
    stop = data.draw(st.integers(0, steps))
    seen = []
    for first, last in ((0, stop), (stop, steps)):
        again = order_of(kind, count, batch, seed, repeats)
        if first:
            again.step(epoch + 1, 0)  # earlier calls do not matter
        seen += [again.step(epoch, step) for step in range(first, last)]
    for step, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        parts = [ours.reshape(world, part)[rank] for rank in range(world)]
        assert np.array_equal(np.concatenate(parts), theirs), step


@given(
    length=st.integers(0, 600),
    world=st.integers(1, 128),
    other=st.integers(1, 128),
    grad_accum_steps=st.integers(1, 9),
)
def test_a_micro_batch_of_all_ranks_is_the_same_part_of_the_step_in_every_world(
    length, world, other, grad_accum_steps
):
    """And a rank of one world has nearly as many samples in each micro-batch as all others."""
    whole, sizes = np.arange(length), set()
    for number in range(grad_accum_steps):
        expected = whole[rank_slices(length, 0, 1, grad_accum_steps)[number]]
        for ranks in (world, other):
            parts = [whole[rank_slices(length, rank, ranks, grad_accum_steps)[number]] for rank in range(ranks)]
            assert np.array_equal(np.concatenate(parts), expected)
        sizes |= {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1
    assert np.array_equal(
        np.concatenate([whole[part] for part in rank_slices(length, 0, 1, grad_accum_steps)]), whole
    )


@settings(max_examples=60)
@given(count=st.integers(0, 500), world=st.integers(1, 128))
def test_evaluation_sees_every_sample_once(count, world):
    seen = np.concatenate([evaluation_samples(count, rank, world) for rank in range(world)])
    assert np.array_equal(np.sort(seen), np.arange(count))


def test_the_order_is_the_one_it_always_was():
    """A change here would change every run of every user: it needs a reason and a new major version."""
    assert permutation(10, 0, 0).tolist() == [4, 5, 6, 0, 7, 3, 1, 2, 9, 8]
    assert permutation(10, 0, 1).tolist() == [7, 3, 4, 5, 0, 8, 2, 1, 6, 9]
    assert RandomOrder(10, 5, 0).step(1, 1).tolist() == [8, 2, 1, 6, 9]
    assert RandomOrder(10, 5, 0, repeats=2).step(1, 1).tolist() == [5, 0, 14, 15, 10]
    paged = order_of("paged", 40, 12, window=800, page=160)
    assert paged.step(0, 0).tolist() == [27, 26, 9, 22, 4, 2, 16, 19, 17, 0, 37, 32]
    assert paged.step(0, 1).tolist() == [25, 28, 12, 21, 3, 14, 15, 18, 20, 39, 38, 8]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16, 33, 64])
def test_a_permutation_is_that_of_the_documented_network(count):
    for epoch in range(6):
        stream = stream_of(7, epoch, count, 0)
        assert permutation(count, 7, epoch).tolist() == [permuted(place, count, stream) for place in range(count)]


def test_numbers_beyond_those_of_32_bits_are_numbers():
    """Of places, samples and views."""
    count, step = 2**32 + 3, 2**28
    view_ids = RandomOrder(count, 9, 5, repeats=3).step(1, step)
    places, stream = range(3 * step, 3 * step + 3), stream_of(5, 1, count, 0)
    samples = [permuted(place, count, stream) for place in places]
    assert view_ids.tolist() == [sample + count * view for view in range(3) for sample in samples]
    assert RandomOrder(count, 2**10, 5).step(0, 2**22 - 1).max() > 2**31
    assert evaluation_samples(2**33, 2**32 + 1, 2**32 + 2).tolist() == [2**32 + 1]


def test_uses_of_random_numbers_have_the_numbers_that_they_always_had():
    names = "ORDER CROP FLIP AUGMENT ERASE MIX NETWORK COLOR_JITTER PAGE WINDOW INTERPOLATION REPLACE DROPOUT"
    assert [getattr(random, name) for name in names.split()] == list(range(13))


def test_the_last_step_of_an_epoch_is_dropped_or_has_what_is_left():
    assert [steps_per_epoch(count, 4) for count in (3, 4, 7, 8)] == [0, 1, 1, 2]
    assert [steps_per_epoch(count, 4, drop_last=False) for count in (3, 4, 7, 8)] == [1, 1, 2, 2]
    order = RandomOrder(7, 4, 0)
    assert [len(order.step(0, step)) for step in range(2)] == [4, 3]


def test_repeats_leave_an_epoch_as_long_as_timms():
    """timm's sampler, all ranks together, for a global batch that 256 divides."""
    count, batch, repeats = 5000, 512, 3
    timm = [len(RepeatAugSampler(range(count), world, 0, num_repeats=repeats)) for world in (1, 2, 4)]
    for world, length in zip((1, 2, 4), timm, strict=True):
        assert length // (batch // world) == steps_per_epoch(count, batch)
    view_ids = epoch_of(RandomOrder(count, batch, 0, repeats), 0, count, batch)
    sampler = RepeatAugSampler(range(count), 1, 0, num_repeats=repeats)
    theirs = np.array(list(sampler))[: len(view_ids)]
    assert len(np.unique(view_ids % count)) == len(np.unique(theirs))


def test_views_of_a_sample_do_not_lie_side_by_side():
    view_ids = RandomOrder(1000, 96, 0, repeats=3).step(0, 0)
    assert np.array_equal(view_ids // 1000, np.repeat([0, 1, 2], 32))
    assert (np.diff(view_ids % 1000) != 0).all()


def test_each_view_has_the_samples_in_the_order_of_the_sequence():
    """Whatever NumPy's sort does with equal numbers."""
    places, views = split_views(10, 6000, 3)
    expected = [position for view in range(3) for position in range(10, 6010) if position % 3 == view]
    assert places.tolist() == [position // 3 for position in expected]
    assert views.tolist() == [position % 3 for position in expected]


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_and_seeds_differ(kind):
    orders = [order_of(kind, 100, 10, seed) for seed in range(10)]
    found = {tuple(epoch_of(order, epoch, 100, 10)) for order in orders for epoch in range(10)}
    assert len(found) == 100


@pytest.mark.parametrize("count", [10, 100, 1437])
def test_positions_are_uniform(count):
    """Chi-squared of where samples land over 4,000 epochs, and of which sample follows which."""
    epochs = 4000
    orders = np.stack([permutation(count, 7, epoch) for epoch in range(epochs)])
    bins = 10
    for watched in (0, count // 2, count - 1):
        positions = (orders == watched).argmax(axis=1)
        _assert_uniform(np.bincount(positions * bins // count, minlength=bins), bins, count)
    steps = (orders[:, 1] - orders[:, 0]) % count - 1  # uniform over 0..count-2
    _assert_uniform(np.bincount(steps * bins // (count - 1), minlength=bins), bins, count - 1)


@pytest.mark.long
def test_paged_positions_are_uniform():
    """The same of the paged order: no sample is early, late or left out more often than others."""
    count, batch, bins, epochs = 1030, 64, 10, 4000
    order = order_of("paged", count, batch, 7, window=4000, page=300)
    steps = np.stack([epoch_of(order, epoch, count, batch) for epoch in range(epochs)])
    taken = steps.shape[1]
    for watched in (0, count // 2, count - 1):
        where, when = np.nonzero(steps == watched)
        assert abs(len(where) / epochs - taken / count) < 4 * (taken / count * (1 - taken / count) / epochs) ** 0.5
        _assert_uniform(np.bincount(when * bins // taken, minlength=bins), bins, taken)


def test_each_epoch_has_its_pages_in_another_order():
    """Whatever the sample that it begins with: one lane and windows of a sample leave the pages as they are."""
    count, page = 1000, 10
    order = PagedOrder(50 * np.arange(count), np.full(count, 50), 1, 3, window_bytes=1, page_bytes=50 * page)
    epochs = [epoch_of(order, epoch, count, 1) for epoch in range(5)]
    jumps = np.stack([np.diff(samples)[page - 1 :: page] % count for samples in epochs])
    assert len({samples[0] % page for samples in epochs}) > 1  # nor do they begin at the same samples
    for one, other in itertools.pairwise(jumps):
        assert (one == other).mean() < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_balanced_and_neighbours_parted_as_by_chance(kind):
    """On a file sorted by class. A page is small against a window here, as a MiB is against 4 GiB."""
    count, classes, batch = 20_000, 20, 200
    order = order_of(kind, count, batch, 3, window=400_000, page=400)  # half the file, 10 samples
    squares, side_by_side, together = [], 0, 0
    for epoch in range(30):
        steps = epoch_of(order, epoch, count, batch).reshape(-1, batch)
        labels = steps * classes // count
        counts = np.apply_along_axis(np.bincount, 1, labels, minlength=classes)
        squares.append(((counts - batch / classes) ** 2).mean())
        side_by_side += (np.abs(np.diff(steps, axis=1)) == 1).sum()
        together += (np.diff(np.sort(steps, axis=1), axis=1) == 1).sum()
    fraction = 1 / classes
    hypergeometric = batch * fraction * (1 - fraction) * (count - batch) / (count - 1)
    pairs = 30 * (count // batch) * (batch - 1)
    if kind == "random":
        assert np.mean(squares) == pytest.approx(hypergeometric, rel=0.03)
        assert abs(side_by_side - pairs * 2 / count) < 4 * (pairs * 2 / count) ** 0.5
        assert together == pytest.approx(pairs * batch / count, rel=0.05)
    else:
        assert np.mean(squares) < 1.3 * hypergeometric  # 1.17
        assert together < 3 * pairs * batch / count  # 2.67: half the file at a time, and pages


def _assert_uniform(found, bins, count):
    exact = np.bincount(np.arange(count) * bins // count, minlength=bins) / count
    expected = exact[exact > 0] * found.sum()
    chi2 = ((found[exact > 0] - expected) ** 2 / expected).sum()
    assert chi2 < 33.7  # 9 degrees of freedom: 1 in 10,000


@pytest.mark.parametrize(("stored", "least", "most"), [("shuffled", 0.8, 1.1), ("class by class", 3.0, 99)])
def test_a_shuffled_file_in_paged_order_mixes_classes_as_a_shuffle_does(stored, least, most):
    """The variance of the classes' counts over 20 steps, over that of a uniform shuffle; ImageNet's sizes, a quarter
    of its usual batch and window."""
    count, classes, batch = 64_000, 50, 256
    size = np.random.RandomState(0).gamma(4, 27_500, count).astype(np.int64) + 5000
    samples = ImageFiles("", [f"{i}.JPEG" for i in range(count)], np.arange(count) * classes // count)
    chosen = shuffled_order(samples, 0) if stored == "shuffled" else np.arange(count)
    label, size = np.asarray(samples.labels)[chosen], size[chosen]
    paged = PagedOrder(np.cumsum(size) - size, size, batch, 1, 1024 << 20)
    found = [class_variance(order, label) for order in (paged, RandomOrder(count, batch, 1))]
    assert least < found[0] / found[1] < most


def class_variance(order, label) -> float:
    parts = [np.concatenate([label[order.step(0, first + k)] for k in range(20)]) for first in range(0, 240, 20)]
    return float(np.mean([np.bincount(part, minlength=50).var() for part in parts]))
