"""What a check of the doctor says, and the commands that it may propose."""

import importlib.metadata
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement

APT = "apt-get install --no-install-recommends"


@dataclass(frozen=True)
class Finding:
    """`missing`: the main job cannot run; `note`: it can, but read this. `cure`: a command where there is one."""

    found: str
    state: Literal["ok", "note", "missing"] = "ok"
    cure: str = ""


@dataclass(frozen=True)
class Check:
    """How to look, and the package to install anew when looking raises."""

    look: Callable[[], Finding]
    package: str = ""


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def install(*names: str) -> str:
    """The command that installs packages, and what they lack, at the versions that widemix asks for."""
    return f"{_pip()} install {_asked(names)}"


def repair(*names: str) -> str:
    """The command that installs packages anew though they are there. torch brings CUDA's libraries with it."""
    alone = "" if "torch" in names else "--no-deps "
    return f"{_pip()} install --force-reinstall --no-cache-dir {alone}{_asked(names)}"


def requirements(distribution: str) -> list[Requirement]:
    """What an installed distribution asks for on this platform, extras left out; empty when it is not installed."""
    try:
        asked = [Requirement(line) for line in importlib.metadata.requires(distribution) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [r for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]


def _pip() -> str:
    inside = sys.executable.startswith(os.getcwd() + os.sep)
    return f"{shlex.quote(os.path.relpath(sys.executable) if inside else sys.executable)} -m pip"


def _asked(names: tuple[str, ...]) -> str:
    wanted = {r.name: str(r) for r in requirements("widemix")}
    return " ".join(f"'{wanted.get(name, name)}'" for name in names)
