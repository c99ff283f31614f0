"""What environment.json says of the machine, against what it says by itself."""

import platform
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
import torch

from widemix.distributed.topology import Topology
from widemix.run import environment
from widemix.run.environment import COMMAND_VARIABLE, read_environment


@pytest.fixture
def topology():
    return Topology(1, 4, 0, 2, torch.device("cpu"))


def test_the_commit_is_that_of_the_folder_that_the_code_lies_in(topology, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_environment(topology)["commit"] is None

    def git(*words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(
            ["git", *names, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "first")
    assert [read_environment(topology)["commit"]] == git("log", "--format=%H").split()
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert read_environment(topology)["commit"] is None


def test_the_command_the_machine_and_the_packages_are_named(topology, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["widemix", "train", "a b.yaml"])
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    monkeypatch.setattr(environment, "usable_cpus", lambda: 77)
    found = read_environment(topology)
    assert shlex.split(found["command"]) == sys.argv
    assert (found["host"], found["ranks"], found["python"]) == (socket.gethostname(), 4, platform.python_version())
    assert found["device"].split()[0] == "cpu"
    assert (found["matmul_precision"], found["usable_cpus"]) == ("medium", 77)
    assert found["packages"]["numpy"] == np.__version__
    monkeypatch.setattr(environment, "version", lambda name: missing(name) if name == "ffcv" else "1.2")
    packages = read_environment(topology)["packages"]
    assert (packages["ffcv"], packages["numpy"]) == (None, "1.2")
    monkeypatch.setenv(COMMAND_VARIABLE, "widemix train c.yaml")
    for _ in range(2):  # of a second run of this process
        assert read_environment(topology)["command"] == "widemix train c.yaml"


def test_the_start_has_its_time_zone_and_the_device_is_the_runs_own(topology, monkeypatch):
    """Also on a machine whose GPUs this run does not use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU number {device.index}")
    found = read_environment(topology)
    assert abs(datetime.strptime(found["started"], "%Y-%m-%dT%H:%M:%S%z").timestamp() - time.time()) < 60
    assert found["device"] == f"cpu {platform.processor()}".strip()
    on_gpu = read_environment(replace(topology, device=torch.device("cuda", 3)))
    assert on_gpu["device"] == "cuda GPU number 3"


def missing(name: str) -> str:
    raise environment.PackageNotFoundError(name)
