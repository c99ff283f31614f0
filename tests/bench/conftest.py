"""A clock that the tests of the benchmarks move."""

import pytest

from tests.conftest import System


class Clock:
    """Wall clock and CPU time, which go on where `takes` says so and nowhere else."""

    def __init__(self, system: System):
        self.seconds = 0.0
        system({f"time.{name}": lambda: self.seconds for name in ("perf_counter", "process_time")})

    def takes(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(system: System) -> Clock:
    return Clock(system)
