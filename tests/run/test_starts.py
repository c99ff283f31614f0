"""The seconds to a run's first step, by part."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import torch

from widemix.distributed.rank_status import STATUS_DIR_VARIABLE
from widemix.distributed.start_times import VARIABLE, StartTimes, note_part, note_process
from widemix.run.starts import StartRecord, read_starts

OWN = ["imports", "rendezvous", "data and run folder", "network and checkpoint", "first batch", "first step"]


def test_the_parts_are_the_times_between_what_was_noted():
    environ: dict[str, str] = {}
    for part, at in (("submitted", 100.0), ("queue", 160.5), ("batch script", 161.0)):
        note_part(part, at, environ)
    times = StartTimes(environ)
    assert environ == {}  # another run of this process begins anew
    before = time.time()
    times.end("imports")
    after = time.time()
    seconds = times.seconds()
    assert list(seconds) == ["queue", "batch script", "imports"]
    assert (seconds["queue"], seconds["batch script"]) == (60.5, 0.5)
    assert before - 0.1 <= 100 + sum(seconds.values()) <= after + 0.1


def test_what_was_before_a_restart_is_not_counted():
    for restarted, parts in ((False, ["ranks", "imports"]), (True, ["imports"])):
        environ = {VARIABLE: f"submitted={time.time() - 50}"}
        note_process(restarted, environ)
        times = StartTimes(environ)
        times.end("imports")
        assert list(times.seconds()) == parts


def test_a_process_knows_when_it_was_created():
    """To better than psutil, which rounds the time of the boot to seconds."""
    program = "from widemix.distributed.start_times import _process_start; print(_process_start())"
    for _ in range(3):
        before = time.time()
        created = float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
        assert before - 0.05 < created < time.time()


def test_a_clock_that_was_set_back_makes_no_negative_part():
    assert StartTimes({VARIABLE: "submitted=100;queue=90;staging=95"}).seconds() == {"queue": 0, "staging": 5}


def test_a_time_that_the_batch_script_did_not_find_is_left_out():
    assert StartTimes({VARIABLE: "submitted=;queue=90;staging=95;;x"}).seconds() == {"staging": 5}


def test_only_rank_0_writes_a_line_and_only_of_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv(STATUS_DIR_VARIABLE, "/runs/slurm/7.1")
    for rank in (0, 1):
        topology = SimpleNamespace(is_main=rank == 0, world=2, device=torch.device("cpu"))
        record = StartRecord(
            tmp_path,
            StartTimes({VARIABLE: "submitted=100;queue=103"}),
            topology,
            compiled=True,
            memory_layout="plain",
        )
        for step in (5, 6):
            record.got_batch()
            record.stepped(step)
    (line,) = read_starts(tmp_path)
    assert (line["step"], line["ranks"], line["logs"], line["memory_layout"]) == (5, 2, "7.1", "plain")
    assert list(line["seconds"]) == ["queue", "first batch", "compiling and first step"]
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"time": 1, "st')
    assert read_starts(tmp_path) == [line]


def test_a_disk_that_is_full_does_not_stop_a_run(tmp_path):
    topology = SimpleNamespace(is_main=True, world=1, device=torch.device("cpu"))
    StartRecord(tmp_path / "none", StartTimes({}), topology, compiled=False, memory_layout=None).stepped(1)
    assert read_starts(tmp_path / "none") == []


def test_lines_that_a_crash_has_torn_are_left_out(tmp_path):
    (tmp_path / "starts.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\n\0\0\0\0\n{"step"\n{"step": 2}\n')
    assert [start["step"] for start in read_starts(tmp_path)] == [1, 2]


def test_a_start_on_two_ranks_and_one_that_resumes(train, tmp_path):
    began = time.time()
    for steps, world in (("3", 2), ("5", 0)):
        code, output = train("run", "--train.max_steps", steps, world=world).wait()
        assert code == 0, output
    first, second = read_starts(tmp_path / "run")
    assert (first["step"], first["ranks"]) == (1, 2)
    assert (second["step"], second["ranks"]) == (4, 1)
    assert list(first["seconds"]) == list(second["seconds"]) == OWN
    for start in (first, second):
        assert all(seconds > 0 for seconds in start["seconds"].values())
        assert start["memory_layout"] in ("plain", "batch_last")
        assert sum(start["seconds"].values()) < time.time() - began
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert first["time"] <= next(line["time"] for line in steps if line["step"] == 1)


def test_a_start_without_a_launchers_logs_and_without_a_layout_names_neither(tmp_path, monkeypatch):
    topology = SimpleNamespace(is_main=True, world=1, device=torch.device("cpu"))
    began = time.time()
    for logs in (None, ""):
        monkeypatch.delenv(STATUS_DIR_VARIABLE, raising=False)
        if logs is not None:
            monkeypatch.setenv(STATUS_DIR_VARIABLE, logs)
        StartRecord(tmp_path, StartTimes({}), topology, compiled=False, memory_layout=None).stepped(1)
    lines = read_starts(tmp_path)
    assert len(lines) == 2
    for line in lines:
        assert list(line) == ["time", "step", "ranks", "seconds"]
        assert list(line["seconds"]) == ["first step"]
        assert began - 0.1 <= line["time"] <= time.time() + 0.1
