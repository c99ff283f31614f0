"""The result of a check of the doctor, and the commands that it may suggest."""

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
    """The result of a check.

    text: what was found.
    state: `missing`: preparing, training or evaluating cannot run; `note`: they can, but something should be known.
    fix: a command, if there is one.
    """

    text: str
    state: Literal["ok", "note", "missing"] = "ok"
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """A check, the package to reinstall if it raises, and who alone needs that package, if not everybody."""

    run: Callable[[], Finding]
    package: str = ""
    only_for: str = ""


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    return (str(error).strip().splitlines() or [""])[0]


def install(*names: str) -> str:
    """Return the command that installs packages at the versions that widemix requires."""
    return f"{_pip()} install {_pinned(names)}"


def repair(*names: str) -> str:
    """Return the command that reinstalls packages; without their dependencies, except torch's CUDA libraries."""
    alone = "" if "torch" in names else "--no-deps "
    return f"{_pip()} install --force-reinstall --no-cache-dir {alone}{_pinned(names)}"


def requirements(distribution: str, extra: str = "") -> list[Requirement]:
    """Return what an installed distribution requires on this platform, and its `extra`; [] if it is not installed."""
    try:
        required = [Requirement(line) for line in importlib.metadata.requires(distribution) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [r for r in required if r.marker is None or r.marker.evaluate({"extra": extra})]


def _pip() -> str:
    inside = sys.executable.startswith(os.getcwd() + os.sep)
    return f"{shlex.quote(os.path.relpath(sys.executable) if inside else sys.executable)} -m pip"


def _pinned(names: tuple[str, ...]) -> str:
    wanted = {r.name: f"{r.name}{r.specifier}" for r in requirements("widemix", extra="ffcv")}
    return " ".join(f"'{wanted.get(name, name)}'" for name in names)
