"""Runs compiled functions, which release the GIL, on several threads.

Python threads instead of numba's prange: nothing is compiled twice, no threading layer has to be installed, and
numba's cache is not involved, which confuses the parallel and the serial code of a function.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def run_on_threads(work: Callable[[int, int], None], threads: int) -> None:
    """Call `work(k, threads)` for each k in range(threads) in parallel. The first exception is raised here."""
    if threads == 1:
        work(0, 1)
    else:
        for _ in _pool(threads).map(work, range(threads), [threads] * threads):
            pass


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="images")


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of the threads, and would wait
