"""Clocks and sums of the benchmarks: what is timed, what is divided by what, and the machine that is named."""

import json
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.bench.conftest import Clock
from tests.conftest import System
from widemix.bench.report import machine, markdown, report
from widemix.bench.timing import compare_loaders, compute_clock, elapsed, percent_longer, time_in_turns, wall_clock
from widemix.cgroups import usable_cpus


@pytest.mark.parametrize(("slower", "percent"), [(1.0, 0.0), (1.05, 5.0), (0.9, -10.0)])
@pytest.mark.parametrize(("first", "growth"), [(0.0, 0.0), (30.0, 0.0), (0.0, 0.25)])
def test_a_dear_first_turn_and_a_slowing_machine_burden_both(slower, percent, first, growth):
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


def test_clocks_wait_for_a_gpu_and_add_a_cpus_threads(system: System):
    """Wall clock and CPU time go on by 100 and by 1 each time that they are read, and a GPU's work by 10."""
    wall, cpu = [0], [0]

    def advance(clock: list[int], by: int) -> int:
        clock[0] += by
        return clock[0]

    clocks = {"time.perf_counter": lambda: advance(wall, 100), "time.process_time": lambda: advance(cpu, 1)}
    system(clocks | {"torch.cuda.synchronize": lambda device: advance(wall, 10)})
    found = {
        kind: [read(torch.device(kind)) for read in (wall_clock, compute_clock)]
        + [elapsed(lambda: advance(wall, 1000), torch.device(kind))]
        for kind in ("cpu", "cuda")
    }
    assert found == {"cpu": [100, 1, 1100], "cuda": [1410, 1520, 1110]}


@pytest.mark.parametrize("shown", [{}, {"shown": False}])
def test_turns_are_timed_per_unit_after_the_warm_up(shown, clock: Clock, capsys):
    events = []

    def takes(name: str, seconds: float):
        def turn(number: int) -> int:
            events.append((name, number))
            clock.takes(seconds * (1 + number))
            return 2

        return turn

    def wait() -> None:
        events.append("all are ready")
        clock.takes(50)

    contestants = {"a": takes("a", 1.0), "b": takes("b", 3.0)}
    found = time_in_turns(contestants, 3, lambda: clock.seconds, warmup=2, before=wait, **shown)
    assert found == {"a": [1.5, 2.0, 2.5], "b": [4.5, 6.0, 7.5]}
    assert events == [event for number in range(5) for name in "ab" for event in ("all are ready", (name, number))]
    assert ("turns timed" in capsys.readouterr().err) == (not shown)


def test_loaders_are_compared_by_cpu_time_within_a_round(clock: Clock):
    """The median of the ratios, which is not that of the medians; the first round is not counted."""
    speeds = {"peer": [1, 100, 200, 800], "ours": [1, 400 / 3, 400, 100 / 3]}

    def loads(own: Iterator[float]):
        def epoch(number: int) -> int:
            clock.takes(30 / next(own))
            return 30

        return epoch

    rows = compare_loaders({name: loads(iter(own)) for name, own in speeds.items()}, 3, peer="peer")
    assert rows == [
        {"name": "peer", "images_per_cpu_s": 200, "ratio": 1},
        {"name": "ours", "images_per_cpu_s": 133.3, "ratio": 1.333},
    ]


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="this system has no /proc/cpuinfo")
def test_the_machine_is_named_with_its_cpus_gpu_and_versions(system: System):
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    cpus = f"{usable_cpus()} x {model[1] if model else platform.processor()}"
    rest = f", Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}"
    assert machine("torch").partition("+")[0] == cpus + rest
    system({"torch.cuda.is_available": lambda: True, "torch.cuda.get_device_name": lambda: "NVIDIA H100"})
    assert machine("torch").partition("+")[0] == cpus + ", NVIDIA H100" + rest


def test_rows_are_printed_as_a_table_and_kept_whole(tmp_path, capsys):
    """A list is in the file alone; what is unknown is a dash; parts are fractions of their own row's sum."""
    rows = [
        {"name": "first", "rate": 1234567.0, "layout": "plain", "gib": None, "samples": [1, 2], "time": {"a": 0.0}},
        {
            "name": "second",
            "rate": 0.1234567,
            "layout": "rows",
            "gib": 0,
            "samples": [3],
            "time": {"a": 8.0, "b": 2.0},
        },
    ]
    report(rows, ("torch",), tmp_path / "rows.json")
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == machine("torch")
    assert [line.split() for line in lines] == [
        ["rate", "layout", "gib"],
        ["1.23457e+06", "plain", "-", "first"],
        ["0.123457", "rows", "0", "second"],
        ["time", "of", "first:"],
        ["0", "0%", "a"],
        ["time", "of", "second:"],
        ["8", "80%", "a"],
        ["2", "20%", "b"],
    ]
    assert json.loads((tmp_path / "rows.json").read_text()) == {"machine": first, "rows": rows}
    assert markdown([{"name": "a|b", "rate": 12345.6, "samples": [1], "time": {}, "gib": None}]) == (
        "| name | rate | gib |\n| --- | ---: | ---: |\n| a\\|b | 12,345.6 | - |\n"
    )
