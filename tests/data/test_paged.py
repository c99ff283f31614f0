"""What the paged order requests from the disk, and in which order."""

import ctypes
import mmap
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemix.data.order import rank_slices
from widemix.data.paged import PagedOrder, request_ranges

COUNT = 4000


def order_of(batch=64, repeats=1, scattered=False):
    """Samples of 20 to 60 bytes, in the order of the file or not; windows of about 12 steps; and their places."""
    numbers = np.random.RandomState(0)
    size = numbers.randint(20, 61, COUNT)
    offset = 100 + np.cumsum(size) - size
    by_place = numbers.permutation(COUNT) if scattered else np.arange(COUNT)
    offset, size = offset[by_place], size[by_place]
    return PagedOrder(offset, size, batch, 5, 12 * 64 * 40, repeats, page_bytes=400), offset, size


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
    (world, accum), (order, offset, size) = ranks, order_of(batch, repeats, scattered)
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
    order, *_ = order_of()
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
