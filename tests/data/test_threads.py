"""run_on_threads: every part once, in parallel, and no exception is lost."""

import threading

import pytest

from widemix.data.compiled import run_on_threads


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_share_runs_in_parallel(threads):
    meet, seen = threading.Barrier(threads, timeout=300), []

    def work(k: int, of: int) -> None:
        meet.wait()  # all parts must be running
        seen.append((k, of))

    run_on_threads(work, threads)
    assert sorted(seen) == [(k, threads) for k in range(threads)]


def test_an_exception_of_any_share_is_raised():
    def work(k: int, of: int) -> None:
        if k == 2:
            raise OSError("the third part")

    with pytest.raises(OSError, match="the third part"):
        run_on_threads(work, 3)
