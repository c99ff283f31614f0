"""What two contestants cost is compared without what their order costs."""

import pytest

from widemix.bench.timing import percent_longer


@pytest.mark.parametrize(("slower", "percent"), [(1.0, 0.0), (1.05, 5.0), (0.9, -10.0)])
@pytest.mark.parametrize(("first", "growth"), [(0.0, 0.0), (30.0, 0.0), (0.0, 0.25)])
def test_neither_a_dear_first_turn_nor_a_machine_that_slows_down_falls_on_one_of_two(slower, percent, first, growth):
    """The first turn reads a file that was not in memory; and each turn takes longer than the one before."""
    now, turns = 0.0, 0

    def takes(seconds: float):
        def turn(number: int) -> int:
            nonlocal now, turns
            now += 100 * seconds + (first if turns == 0 else 0) + growth * turns
            turns += 1
            return 50

        return turn

    found = percent_longer(takes(slower), takes(1.0), rounds=3, clock=lambda: now)
    assert found == pytest.approx(percent, abs=1e-9 if not growth else 0.3)
    if slower == 1.0:
        assert found == pytest.approx(0, abs=1e-9)
