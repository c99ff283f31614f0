"""Seconds from the submission of a job to its first step, by part: queue, staging, imports, first batch ...

Each part ends where the next one begins. Launchers note when theirs end in an environment variable, which the ranks
inherit; a rank goes on from there.
"""

import os
import re
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "WIDEMIX_START_TIMES"  # PART=TIME;PART=TIME ..., s since 1970; at the first one the start began


def note_part(part: str, at: float | None = None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Note for the ranks to come that a part of the start has ended, by default now."""
    own = f"{part}={time.time() if at is None else at:.3f}"
    environ[VARIABLE] = ";".join(filter(None, (environ.get(VARIABLE), own)))


def note_process(restarted: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Note when this rank's process was created, which ends the part `ranks` of its launcher.

    restarted: whether an earlier process of this rank was of the same start. What was before is then not counted.
    """
    if restarted:
        environ.pop(VARIABLE, None)
    note_part("ranks", _process_start(), environ)


def _process_start() -> float:
    """When this process was created, s since 1970, to 10 ms; psutil's boot time is rounded to whole seconds."""
    if sys.platform != "linux":
        import psutil

        return psutil.Process().create_time()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


class StartTimes:
    """The parts of this rank's start. Takes over what launchers have noted; without that the start begins now."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ):
        noted = re.findall(r"([^;=]+)=(\d+\.?\d*)(?:;|$)", environ.pop(VARIABLE, ""))
        self._ends = [(part, float(at)) for part, at in noted] or [("began", time.time())]

    def end(self, part: str) -> None:
        """Note that a part has ended."""
        self._ends.append((part, time.time()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part, in their order."""
        pairs = zip(self._ends, self._ends[1:], strict=False)
        return {part: round(max(0.0, at - before), 3) for (_, before), (part, at) in pairs}
