"""Both orders are their documented formulas, see an epoch once, and mix as a shuffle does."""

import ctypes
import mmap
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data.distributed_sampler import RepeatAugSampler

from tests.data.plain_batches import paged_views_of_step, views_of_step
from widemix.data import random
from widemix.data.order import RandomOrder, evaluation_samples, rank_slices, steps_per_epoch
from widemix.data.paged import PagedOrder, request_ranges

KINDS = ["random", "paged"]
SEEDS, EPOCHS, REPEATS = st.integers(0, 2**63 - 1), st.integers(0, 1000), st.sampled_from([1, 1, 2, 3, 5])


def places_of(count: int, scattered: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Samples of 20 to 60 bytes behind a header, in the order of the file or not."""
    size = np.random.RandomState(count).randint(20, 61, count)
    by_place = np.random.RandomState(0).permutation(count) if scattered else np.arange(count)
    return (100 + np.cumsum(size) - size)[by_place], size[by_place]


def order_of(kind, count, batch, seed=0, repeats=1, window=20_000, page=500):
    if kind == "random":
        return RandomOrder(count, batch, seed, repeats)
    return PagedOrder(*places_of(count), batch, seed, window, repeats, page)


def epoch_of(order, epoch, count, batch):
    steps = [order.step(epoch, step) for step in range(steps_per_epoch(count, batch))]
    return np.concatenate([np.empty(0, np.int64), *steps])


@settings(max_examples=60)
@given(
    count=st.integers(1, 700),
    batch=st.integers(1, 200),
    numbers=st.tuples(SEEDS, REPEATS, EPOCHS),
    step=st.floats(0, 1),
    window=st.integers(1, 40_000),
    page=st.integers(1, 3000),
    scattered=st.booleans(),
)
def test_a_step_is_that_of_the_plain_order(count, batch, numbers, step, window, page, scattered):
    """Whatever was asked for before: each rank of each start has an order of its own."""
    (seed, repeats, epoch), batch = numbers, min(batch, count)
    step = int(step * (count // batch - 1))
    random_order = RandomOrder(count, batch, seed, repeats)
    assert random_order.step(epoch, step).tolist() == views_of_step(count, batch, seed, repeats, epoch, step)[1]
    offset, size = places_of(count, scattered)
    paged = PagedOrder(offset, size, batch, seed, window, repeats, page)
    paged.step(epoch + 1, 0)
    plain = offset.tolist(), size.tolist(), batch, seed, window, repeats, page, epoch, step
    assert paged.step(epoch, step).tolist() == paged_views_of_step(*plain)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(1, 300), SEEDS, REPEATS, EPOCHS, st.integers(1, 200_000))
def test_an_epoch_has_every_view_at_most_once(kind, count, batch, seed, repeats, epoch, window):
    """And leaves out less than a batch, but for later views of samples at the ends of the lanes."""
    order = order_of(kind, count, batch, seed, repeats, window)
    view_ids = epoch_of(order, epoch, count, batch)
    assert len(view_ids) == len(np.unique(view_ids)) == count // batch * batch
    samples, views = view_ids % count, view_ids // count
    assert ((views >= 0) & (views < repeats)).all()
    shown, times = np.unique(samples, return_counts=True)
    lanes = getattr(order, "lanes", 1)
    assert (times == repeats).sum() >= len(shown) - lanes
    assert len(shown) <= -(-len(view_ids) // repeats) + lanes
    for sample in shown[times < repeats]:  # the first views are there, and no later one without an earlier one
        assert sorted(views[samples == sample]) == list(range((samples == sample).sum()))


@given(st.integers(0, 600), st.integers(1, 128), st.integers(1, 9))
def test_a_micro_batch_is_the_same_in_every_world(length, world, accum):
    """And a rank has nearly as many samples in each micro-batch as all others."""
    whole, sizes = np.arange(length), set()
    parts = [rank_slices(length, rank, world, accum) for rank in range(world)]
    for number, alone in enumerate(rank_slices(length, 0, 1, accum)):
        assert np.array_equal(np.concatenate([whole[own[number]] for own in parts]), whole[alone])
        sizes |= {len(whole[own[number]]) for own in parts}
    assert max(sizes) - min(sizes) <= 1
    assert np.array_equal(np.concatenate([whole[part] for part in rank_slices(length, 0, 1, accum)]), whole)


def test_the_order_is_the_one_it_always_was():
    """A change here would change every run of every user: it needs a reason and a new major version."""
    assert RandomOrder(10, 10, 0).step(0, 0).tolist() == [4, 5, 6, 0, 7, 3, 1, 2, 9, 8]
    assert RandomOrder(10, 5, 0).step(1, 1).tolist() == [8, 2, 1, 6, 9]
    assert RandomOrder(10, 5, 0, repeats=2).step(1, 1).tolist() == [5, 0, 14, 15, 10]
    paged = order_of("paged", 40, 12, window=800, page=160)
    assert paged.step(0, 0).tolist() == [27, 26, 9, 22, 4, 2, 16, 19, 17, 0, 37, 32]
    assert paged.step(0, 1).tolist() == [25, 28, 12, 21, 3, 14, 15, 18, 20, 39, 38, 8]
    names = "ORDER CROP FLIP AUGMENT ERASE MIX NETWORK COLOR_JITTER PAGE WINDOW INTERPOLATION REPLACE DROPOUT"
    assert [getattr(random, name) for name in names.split()] == list(range(13))


def test_numbers_beyond_those_of_32_bits_are_numbers():
    count, step = 2**32 + 3, 2**28
    view_ids = RandomOrder(count, 9, 5, repeats=3).step(1, step)
    assert view_ids.tolist() == views_of_step(count, 9, 5, 3, 1, step)[1]
    assert view_ids.max() > 2**33
    assert RandomOrder(count, 2**10, 5).step(0, 2**22 - 1).max() > 2**31
    assert evaluation_samples(2**33, 2**32 + 1, 2**32 + 2).tolist() == [2**32 + 1]


@pytest.mark.parametrize(("count", "dropped", "kept"), [(3, 0, 1), (4, 1, 1), (7, 1, 2), (8, 2, 2)])
def test_the_last_step_is_dropped_or_has_what_is_left(count, dropped, kept):
    assert (steps_per_epoch(count, 4), steps_per_epoch(count, 4, drop_last=False)) == (dropped, kept)
    assert sum(len(RandomOrder(count, 4, 0).step(0, step)) for step in range(kept)) == count


def test_repeats_leave_an_epoch_as_long_as_timms():
    """timm's sampler, all ranks together, for a global batch that 256 divides."""
    count, batch, repeats = 5000, 512, 3
    for world in (1, 2, 4):
        timms = RepeatAugSampler(range(count), world, 0, num_repeats=repeats)
        assert len(timms) // (batch // world) == steps_per_epoch(count, batch)
    view_ids = epoch_of(RandomOrder(count, batch, 0, repeats), 0, count, batch)
    theirs = np.array(list(RepeatAugSampler(range(count), 1, 0, num_repeats=repeats)))[: len(view_ids)]
    assert len(np.unique(view_ids % count)) == len(np.unique(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_balanced_and_neighbours_parted(kind):
    """As by chance, on a file sorted by class. A page is small against a window, as a MiB is against 4 GiB."""
    count, classes, batch = 20_000, 20, 200
    order = order_of(kind, count, batch, 3, window=400_000, page=400)  # half the file, 10 samples
    steps = np.concatenate([epoch_of(order, epoch, count, batch).reshape(-1, batch) for epoch in range(30)])
    counts = np.apply_along_axis(np.bincount, 1, steps * classes // count, minlength=classes)
    squares, fraction = ((counts - batch / classes) ** 2).mean(), 1 / classes
    side_by_side = (np.abs(np.diff(steps, axis=1)) == 1).sum()
    together = (np.diff(np.sort(steps, axis=1), axis=1) == 1).sum()
    hypergeometric = batch * fraction * (1 - fraction) * (count - batch) / (count - 1)
    pairs = len(steps) * (batch - 1)
    if kind == "random":
        assert squares == pytest.approx(hypergeometric, rel=0.03)
        assert abs(side_by_side - pairs * 2 / count) < 4 * (pairs * 2 / count) ** 0.5
        assert together == pytest.approx(pairs * batch / count, rel=0.05)
    else:
        assert squares < 1.3 * hypergeometric  # 1.17
        assert together < 3 * pairs * batch / count  # 2.67: half the file at a time, and pages


# What the paged order requests from the disk, and in which order.

COUNT = 4000


def paged_order(batch=64, repeats=1, scattered=False):
    """Of windows of about 12 steps, and the places of its samples."""
    places = places_of(COUNT, scattered)
    return PagedOrder(*places, batch, 5, 12 * 64 * 40, repeats, page_bytes=400), *places


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("repeats", [1, 3])
@settings(max_examples=20)
@given(
    ranks=st.sampled_from([(1, 1), (1, 4), (2, 2), (4, 1), (8, 8), (32, 2), (64, 1)]),
    batch=st.sampled_from([64, 64, 192]),  # of one sample a lane, of three
    first=st.integers(0, 19),
    data=st.data(),
)
def test_every_sample_is_requested_before_it_is_read(repeats, scattered, ranks, batch, first, data):
    (world, accum), (order, offset, size) = ranks, paged_order(batch, repeats, scattered)
    parts = rank_slices(batch, data.draw(st.integers(0, world - 1)), world, accum)
    requested, total = np.zeros(COUNT, bool), 0
    for step in range(first, COUNT // batch):
        ranges = order.prefetch_ranges(2, step, step == first, parts)
        total += np.diff(ranges).sum()
        if len(ranges):
            starts, stops = ranges[np.argsort(ranges[:, 0])].T
            which = np.searchsorted(starts, offset, side="right") - 1
            requested |= (which >= 0) & (offset + size <= stops[which])
        assert requested[np.concatenate([order.step(2, step)[part] for part in parts]) % COUNT].all()
    if first == 0 and batch == 64:
        assert total <= size.sum() / world / repeats * 1.15  # each rank its part of the file, and once


def test_a_window_is_read_in_the_order_of_the_file():
    """Long runs: as many bytes in a request as lie in a lane's part of the coming step, cut by pages alone."""
    order, *_ = paged_order()
    assert len(order.prefetch_ranges(0, 20, False, rank_slices(64, 0, 64, 1))) <= 2
    whole = order.prefetch_ranges(0, 0, True, rank_slices(64, 0, 64, 1))
    assert np.diff(whole).mean() > 200  # pages of 400 bytes


def test_pages_have_a_mebibyte_in_up_to_64_lanes():
    order = PagedOrder(40 * np.arange(999), np.full(999, 40), 192, 0, 1)
    assert (order.page, order.lanes) == (round(2**20 / 40), 64)


def test_long_requests_are_made_in_pieces(system):
    """Of 128 KiB: of more Linux reads the beginning alone."""
    made: list[tuple[int, ...]] = []
    system({"os.posix_fadvise": lambda *request: made.append(request)})
    piece = 128 << 10
    request_ranges(7, np.array([[5, 5 + 2 * piece + 3], [10**9, 10**9 + piece], [3, 4]]))
    places = [(5, piece), (5 + piece, piece), (5 + 2 * piece, 3), (10**9, piece), (3, 1)]
    assert made == [(7, *place, os.POSIX_FADV_WILLNEED) for place in places]


def resident(path):
    """Which pages of a file lie in memory: mincore's answer, bool [pages]."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        answer = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), answer.ctypes) == 0
        del view
    return answer & 1 > 0


def test_requested_bytes_come_into_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 << 20))
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(path).any():
        pytest.skip("this file system keeps its files in memory")
    with path.open("rb") as file:
        path = path.rename(tmp_path / "renamed")
        request_ranges(file.fileno(), np.array([[1 << 20, 3 << 20]]))
        # Reading the last of them waits for it, and for nothing else.
        file.seek((3 << 20) - 4096)
        file.read(4096)
    there = resident(path)
    assert there[256:768].mean() > 0.9
    assert not there[:128].any()
