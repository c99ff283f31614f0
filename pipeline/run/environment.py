"""environment.json: on what a run was started, and by which command."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from widemix.cgroups import usable_cpus
from widemix.distributed.topology import Topology

COMMAND_VARIABLE = "WIDEMIX_COMMAND"  # the command that a person typed, where it starts the ranks


def read_environment(topology: Topology) -> dict[str, Any]:
    """Return environment.json: host, command, device, precision of fp32 products, commit, versions of packages.

    The version of a package that is not installed is None.
    """
    packages = ("widemix", "torch", "torchvision", "timm", "deepspeed", "ffcv", "numba", "numpy", "pillow")
    device = torch.cuda.get_device_name(topology.device) if topology.device.type == "cuda" else platform.processor()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "command": os.environ.get(COMMAND_VARIABLE) or shlex.join(sys.argv),
        "ranks": topology.world,
        "device": f"{topology.device.type} {device}".strip(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "usable_cpus": usable_cpus(),
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {name: _installed_version(name) for name in packages},
    }


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    if not shutil.which("git"):
        return None
    folder = Path(__file__).parent
    answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
