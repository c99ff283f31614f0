"""What environment.json says of the machine, against what it says by itself."""

import platform
import shlex
import socket
import subprocess
import sys
import time
from datetime import datetime
from importlib import metadata

import numpy as np
import pytest
import torch

from tests.clone import ROOT
from widemix.cgroups import usable_cpus
from widemix.distributed.topology import Topology
from widemix.run.run_dir import COMMAND_VARIABLE, read_environment


def topology(device: str = "cpu") -> Topology:
    return Topology(1, 4, 0, 2, torch.device(device))


def test_the_commit_is_that_of_the_folder_of_the_code(tmp_path, monkeypatch):
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert read_environment(topology())["commit"] == (git.stdout.strip() or None)
    monkeypatch.chdir(tmp_path)  # whose it is not
    assert read_environment(topology())["commit"] == (git.stdout.strip() or None)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(ROOT))
    monkeypatch.setenv("GIT_DIR", str(tmp_path))  # as where there is no repository
    assert read_environment(topology())["commit"] is None
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert read_environment(topology())["commit"] is None


def test_the_command_the_machine_and_the_packages_are_named(monkeypatch, system):
    system({"sys.argv": ["widemix", "train", "a b.yaml"], "torch.get_float32_matmul_precision": lambda: "medium"})
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    found = read_environment(topology())
    assert shlex.split(found["command"]) == sys.argv
    assert (found["host"], found["ranks"], found["python"]) == (socket.gethostname(), 4, platform.python_version())
    assert (found["matmul_precision"], found["usable_cpus"]) == ("medium", usable_cpus())
    assert abs(datetime.strptime(found["started"], "%Y-%m-%dT%H:%M:%S%z").timestamp() - time.time()) < 60
    assert found["packages"]["numpy"] == np.__version__
    for name, version in found["packages"].items():
        installed = next(metadata.distributions(name=name), None)
        assert version == (installed and installed.version)
    monkeypatch.setenv(COMMAND_VARIABLE, "widemix train c.yaml")
    for _ in range(2):  # of a second run of this process
        assert read_environment(topology())["command"] == "widemix train c.yaml"


@pytest.mark.parametrize(
    ("device", "named"), [("cpu", f"cpu {platform.processor()}".strip()), ("cuda:3", "cuda GPU number 3")]
)
def test_the_device_is_the_runs_own(system, device, named):
    """Also on a machine whose GPUs this run does not use."""
    system(
        {"torch.cuda.is_available": lambda: True, "torch.cuda.get_device_name": lambda at: f"GPU number {at.index}"}
    )
    assert read_environment(topology(device))["device"] == named
