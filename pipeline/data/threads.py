"""Compiled functions that hold no GIL, on as many threads as a rank has CPUs.

Plain threads instead of numba's prange: nothing is compiled a second time for them, no threading layer need be
installed, and numba's cache, which does not tell the parallel code of a function from its serial code, is not asked.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def run_on_threads(work: Callable[[int, int], None], threads: int) -> None:
    """Call `work(k, threads)` for each k at once, each to do its k-th share. Its first exception is raised here."""
    if threads == 1:
        work(0, 1)
    else:
        for _ in _pool(threads).map(work, range(threads), [threads] * threads):
            pass


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="pictures")
