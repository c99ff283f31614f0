"""The seconds to a run's first step, by part."""

import json
import subprocess
import sys
import time

import pytest
import torch

from tests.run.saved import run_of
from widemix.distributed.rank_status import STATUS_DIR_VARIABLE
from widemix.distributed.startup_timing import VARIABLE, StartTimes, note_part
from widemix.distributed.topology import Topology
from widemix.run.start_log import StartRecord, read_starts

OWN = ["imports", "rendezvous", "data and run folder", "network and checkpoint", "first batch", "first step"]


def test_the_parts_are_the_times_between_what_was_noted():
    environ: dict[str, str] = {}
    for part, at in (("submitted", 100.0), ("queue", 160.5), ("batch script", 161.0)):
        note_part(part, at, environ)
    times = StartTimes(environ)
    assert environ == {}  # another run of this process begins anew
    before = time.time()
    times.end("imports")
    seconds = times.seconds()
    assert list(seconds) == ["queue", "batch script", "imports"]
    assert (seconds["queue"], seconds["batch script"]) == (60.5, 0.5)
    assert before - 0.1 <= 100 + sum(seconds.values()) <= time.time() + 0.1


PROGRAM = """
from widemix.distributed.startup_timing import VARIABLE, StartTimes, note_process
for restarted in (False, True):
    environ = {VARIABLE: "submitted=100"}
    note_process(restarted, environ)
    print(environ[VARIABLE].rpartition("=")[2], end=" ")
    times = StartTimes(environ)
    times.end("imports")
    print(*times.seconds(), sep=",", end=" ")
"""


def test_a_process_knows_when_it_was_created():
    """To better than psutil, which rounds the time of the boot; what was before a restart is not counted."""
    for _ in range(3):
        before = time.time()
        said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True).stdout
        first, parts, second, parts_again = said.split()
        assert before - 0.05 < float(first) < time.time()
        assert float(second) == pytest.approx(float(first), abs=0.02)
        assert (parts, parts_again) == ("ranks,imports", "imports")


@pytest.mark.parametrize(
    ("noted", "seconds"),
    [
        ("submitted=100;queue=90;staging=95", {"queue": 0, "staging": 5}),  # a clock that was set back
        ("submitted=;queue=90;staging=95;;x", {"staging": 5}),  # what the batch script did not find
    ],
)
def test_no_part_is_negative_or_made_up(noted, seconds):
    assert StartTimes({VARIABLE: noted}).seconds() == seconds


@pytest.mark.parametrize(
    ("logs", "layout", "known"),
    [
        ("/runs/slurm/7.1", "plain", {"logs": "7.1", "memory_layout": "plain"}),
        ("", None, {}),
        (None, None, {}),
    ],
)
def test_only_rank_0_writes_a_line_of_its_first_step(tmp_path, monkeypatch, logs, layout, known):
    monkeypatch.delenv(STATUS_DIR_VARIABLE, raising=False)
    if logs is not None:
        monkeypatch.setenv(STATUS_DIR_VARIABLE, logs)
    began = time.time()
    for rank in (0, 1):
        topology = Topology(rank, 2, rank, 2, torch.device("cpu"))
        times = StartTimes({VARIABLE: "submitted=100;queue=103"})
        run = run_of(tmp_path, topology, train__compile="true" if layout else "false")
        record = StartRecord(run, times, layout)
        for step in (5, 6):
            record.got_batch()
            record.stepped(step)
    (line,) = read_starts(tmp_path)
    assert list(line.pop("seconds")) == ["queue", "first batch", "compiling and first step"[0 if layout else 14 :]]
    assert began - 0.1 <= line.pop("time") <= time.time() + 0.1
    assert line == {"step": 5, "ranks": 2, **known}


def test_lines_that_a_crash_has_torn_are_left_out(tmp_path):
    (tmp_path / "starts.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\n\0\0\0\0\n{"step"\n{"step": 2}\n{"time": 1, "st')
    assert [start["step"] for start in read_starts(tmp_path)] == [1, 2]


def test_a_disk_that_is_full_does_not_stop_a_run(tmp_path):
    StartRecord(run_of(tmp_path / "none"), StartTimes({}), None).stepped(1)
    assert read_starts(tmp_path / "none") == []


def test_a_start_on_two_ranks_and_one_that_resumes(train, tmp_path):
    began = time.time()
    for steps, world in (("3", 2), ("5", 0)):
        code, output = train("run", "--train.max_steps", steps, world=world).wait()
        assert code == 0, output
    first, second = read_starts(tmp_path / "run")
    assert [(start["step"], start["ranks"]) for start in (first, second)] == [(1, 2), (4, 1)]
    assert list(first["seconds"]) == list(second["seconds"]) == OWN
    for start in (first, second):
        assert all(seconds > 0 for seconds in start["seconds"].values())
        assert start["memory_layout"] in ("plain", "batch_last")
        assert sum(start["seconds"].values()) < time.time() - began
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert first["time"] <= next(line["time"] for line in steps if line["step"] == 1)
