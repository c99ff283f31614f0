"""What the paged order requests from the disk, and in which order."""

import ctypes
import mmap
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemix.data import paged
from widemix.data.order import rank_slices
from widemix.data.paged import PagedOrder, request_ranges

COUNT, BATCH = 4000, 64


def order(repeats=1, scattered=False, batch=BATCH):
    """Samples of 20 to 60 bytes, in the order of the file or not; windows of about 12 steps."""
    numbers = np.random.RandomState(0)
    size = numbers.randint(20, 61, COUNT)
    offset = 100 + np.cumsum(size) - size
    by_place = numbers.permutation(COUNT) if scattered else np.arange(COUNT)
    return PagedOrder(offset[by_place], size[by_place], batch, 5, 12 * 64 * 40, repeats, page_bytes=400)


def inside(ranges, offset, size):
    """Which samples lie within the ranges, bool [n]."""
    starts, stops = ranges[np.argsort(ranges[:, 0])].T
    which = np.searchsorted(starts, offset, side="right") - 1
    return (which >= 0) & (offset + size <= stops[which])


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("repeats", [1, 3])
@settings(max_examples=20)
@given(
    ranks=st.sampled_from([(1, 1), (1, 4), (2, 2), (4, 1), (8, 8), (32, 2), (64, 1)]),
    first=st.integers(0, 61),
    data=st.data(),
)
def test_every_sample_is_requested_before_it_is_read(repeats, scattered, ranks, first, data):
    world, grad_accum_steps = ranks
    ours, rank = order(repeats, scattered), data.draw(st.integers(0, world - 1))
    parts = rank_slices(BATCH, rank, world, grad_accum_steps)
    requested = np.zeros(COUNT, bool)
    total = 0
    for step in range(first, COUNT // BATCH):
        ranges = ours.prefetch_ranges(2, step, step == first, parts)
        total += np.diff(ranges).sum()
        by_sample = np.empty(COUNT, np.int64), np.empty(COUNT, np.int64)
        place = np.argsort(ours._by_place) if scattered else np.arange(COUNT)
        by_sample = ours._offset[place], ours._size[place]
        if len(ranges):
            requested |= inside(ranges, *by_sample)
        mine = np.concatenate([ours.step(2, step)[part] for part in parts]) % COUNT
        assert requested[mine].all()
    if first == 0:
        whole = ours._size.sum()
        assert total <= whole / world / repeats * 1.15  # each rank its part of the file, and once


def test_a_lane_is_requested_by_each_rank_that_has_a_part_of_it():
    """Of three samples a lane: the last one of the first, and the first one of the second."""
    ours, part = order(batch=3 * BATCH), slice(2, 4)
    samples = ours.step(2, 0)[part]
    assert inside(ours.prefetch_ranges(2, 0, True, [part]), ours._offset[samples], ours._size[samples]).all()


def test_a_window_is_read_in_the_order_of_the_file():
    """Long runs: as many bytes in a request as lie in a lane's part of the coming step, cut by pages alone."""
    ranges = order().prefetch_ranges(0, 20, False, rank_slices(BATCH, 0, 64, 1))
    assert len(ranges) <= 2
    whole = order().prefetch_ranges(0, 0, True, rank_slices(BATCH, 0, 64, 1))
    assert np.diff(whole).mean() > 200  # pages of 400 bytes


def test_windows_are_of_about_equal_size_and_share_their_bytes_among_the_lanes():
    """Of 50 samples in each of two lanes, at 40 bytes: as many windows as needed, none of which is short."""
    size = np.full(109, 40)
    for window_bytes, window in ((2 * 30 * 40, 25), (2 * 25 * 40 - 1, 17), (2 * 50 * 40, 50), (1, 1), (1 << 20, 50)):
        dealt = PagedOrder(np.cumsum(size), size, 10, 0, window_bytes, page_bytes=99)
        assert (dealt.lanes, dealt.run, dealt.length, dealt.window, dealt.page) == (2, 5, 50, window, 2)
    assert PagedOrder(np.cumsum(size), size, 10, 0, 1, page_bytes=105).page == 3
    assert PagedOrder(np.cumsum(size), size, 10, 0, 1, page_bytes=19).page == 1  # of samples that are larger
    assert PagedOrder(np.cumsum(size), size, 192, 0, 1).page == round(2**20 / 40)  # part of every run, as are
    assert PagedOrder(np.arange(999), np.ones(999, int), 192, 0, 1).lanes == 64


def test_long_requests_are_made_in_pieces(monkeypatch):
    """Of 128 KiB: of more Linux reads the beginning alone."""
    made = []
    monkeypatch.setattr(paged, "advise", lambda *request: made.append(request))
    piece = 128 << 10
    request_ranges(7, np.array([[5, 5 + 2 * piece + 3], [10**9, 10**9 + piece], [3, 4]]))
    places = [(5, piece), (5 + piece, piece), (5 + 2 * piece, 3), (10**9, piece), (3, 1)]
    assert made == [(7, *place, "WILLNEED") for place in places]


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
