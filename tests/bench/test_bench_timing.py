"""Clocks and sums of the benchmarks: what is timed, what is divided by what, and the machine that is named."""

import json
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from widemix.bench import timing
from widemix.bench.report import machine, markdown, report
from widemix.bench.timing import compare_loaders, compute_clock, elapsed, percent_longer, time_in_turns, wall_clock
from widemix.cgroups import usable_cpus


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


def test_a_gpus_work_is_waited_for_before_a_clock_is_read_and_a_cpus_is_the_time_of_its_threads(monkeypatch):
    """Wall clock and CPU time go on by 100 and by 1 each time that they are read, and a GPU's work by 10."""
    wall, cpu = [0], [0]

    def advance(clock: list[int], by: int) -> int:
        clock[0] += by
        return clock[0]

    clocks = {"perf_counter": lambda: advance(wall, 100), "process_time": lambda: advance(cpu, 1)}
    monkeypatch.setattr(timing, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: advance(wall, 10))
    found = {
        kind: [read(torch.device(kind)) for read in (wall_clock, compute_clock)]
        + [elapsed(lambda: advance(wall, 1000), torch.device(kind))]
        for kind in ("cpu", "cuda")
    }
    assert found == {"cpu": [100, 1, 1100], "cuda": [1410, 1520, 1110]}


@pytest.mark.parametrize("shown", [{}, {"shown": False}])
def test_each_turn_is_timed_from_when_all_are_ready_per_unit_after_the_rounds_that_warm_up(shown, monkeypatch):
    now, events, tallies = [0.0], [], []

    def takes(name: str, seconds: float):
        def turn(number: int) -> int:
            events.append((name, number))
            now[0] += seconds * (1 + number)
            return 2

        return turn

    def wait() -> None:
        events.append("all are ready")
        now[0] += 50

    def track(turns, *words):
        tallies.append(words)
        return turns

    monkeypatch.setattr(timing, "track", track)
    contestants = {"a": takes("a", 1.0), "b": takes("b", 3.0)}
    found = time_in_turns(contestants, 3, lambda: now[0], warmup=2, before=wait, **shown)
    assert found == {"a": [1.5, 2.0, 2.5], "b": [4.5, 6.0, 7.5]}
    assert events == [event for number in range(5) for name in "ab" for event in ("all are ready", (name, number))]
    assert tallies == ([] if shown else [("turns timed", 10, "turns")])


def test_loaders_are_compared_by_cpu_time_and_with_the_peer_in_the_same_round(monkeypatch):
    """The median of the ratios, which is not that of the medians; the first round is not counted."""
    now, speeds = [0.0], {"peer": [1, 100, 200, 800], "ours": [1, 400 / 3, 400, 100 / 3]}

    def loads(own: Iterator[float]):
        def epoch(number: int) -> int:
            now[0] += 30 / next(own)
            return 30

        return epoch

    monkeypatch.setattr(timing, "time", SimpleNamespace(process_time=lambda: now[0]))
    rows = compare_loaders({name: loads(iter(own)) for name, own in speeds.items()}, 3, peer="peer")
    assert rows == [
        {"name": "peer", "images_per_cpu_s": 200, "ratio": 1},
        {"name": "ours", "images_per_cpu_s": 133.3, "ratio": 1.333},
    ]


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="this system has no /proc/cpuinfo")
def test_the_machine_is_named_with_its_cpus_gpu_and_versions(monkeypatch):
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    cpus = f"{usable_cpus()} x {model[1] if model else platform.processor()}"
    rest = f", Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}"
    assert machine("torch").partition("+")[0] == cpus + rest
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    assert machine("torch").partition("+")[0] == cpus + ", NVIDIA H100" + rest


def test_parts_of_each_row_are_fractions_of_its_own_sum(capsys):
    rows = [{"name": "first", "time": {"a": 1.0, "b": 3.0}}, {"name": "second", "time": {"a": 8.0, "b": 2.0}}]
    report(rows, (), None)
    lines = capsys.readouterr().out.partition("time of first:\n")[2].splitlines()
    shown = [line.split()[1:] for line in lines if not line.startswith("time")]
    assert shown == [["25%", "a"], ["75%", "b"], ["80%", "a"], ["20%", "b"]]


def test_rows_are_printed_as_a_table_and_kept_whole_in_the_file(tmp_path, capsys):
    """A list is in the file alone; what is unknown is a dash."""
    rows = [
        {"name": "first", "rate": 1234567.0, "layout": "plain", "gib": None, "samples": [1, 2], "time": {"a": 0.0}},
        {"name": "second", "rate": 0.1234567, "layout": "rows", "gib": 0, "samples": [3], "time": {"a": 2.0}},
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
        ["2", "100%", "a"],
    ]
    assert json.loads((tmp_path / "rows.json").read_text()) == {"machine": first, "rows": rows}
    assert markdown([{"name": "a|b", "rate": 12345.6, "samples": [1], "time": {}, "gib": None}]) == (
        "| name | rate | gib |\n| --- | ---: | ---: |\n| a\\|b | 12,345.6 | - |\n"
    )
