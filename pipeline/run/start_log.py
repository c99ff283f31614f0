"""starts.jsonl: a line for each start of a run that completed a step, with the seconds until then by part."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widemix.distributed.rank_status import STATUS_DIR_VARIABLE
from widemix.distributed.startup_timing import StartTimes
from widemix.files import read_regular
from widemix.run.records import START, parse_record

if TYPE_CHECKING:  # a job's end is judged without torch
    from widemix.run.run_dir import Run

NAME = "starts.jsonl"


class StartRecord:
    """Writes the line of this start after its first step, on rank 0."""

    def __init__(self, run: "Run", times: StartTimes, memory_layout: str | None):
        self._path, self._topology = run.folder / NAME, run.topology
        self._memory_layout = memory_layout
        self._last = "compiling and first step" if run.recipe.train.compile else "first step"
        self._times: StartTimes | None = times

    def got_batch(self) -> None:
        """Note a batch; only the first one counts."""
        if self._times:
            self._times.end("first batch")

    def stepped(self, step: int) -> None:
        """Note a step, `step` with those of earlier starts; only the first one counts, and is waited for."""
        if self._times is None:
            return
        if self._topology.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._topology.device)
        self._times.end(self._last)
        times, self._times = self._times, None
        if not self._topology.is_main:
            return
        logs = os.environ.get(STATUS_DIR_VARIABLE)
        line: dict[str, Any] = {"time": round(time.time(), 3), "step": step, "ranks": self._topology.world}
        line |= {"logs": Path(logs).name} if logs else {}
        line |= {"memory_layout": self._memory_layout} if self._memory_layout else {}
        with suppress(OSError), self._path.open("a") as file:  # a full disk does not stop the run
            file.write(json.dumps(line | {"seconds": times.seconds()}) + "\n")


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of starts.jsonl, without those that a full disk or a crash has torn, and what else is none.

    Keys: time (of the first step, s since 1970), step, ranks, seconds by part; logs, the folder that the launcher
    keeps the ranks' status in, if there is one; and the memory_layout of a Mixer's blocks.
    """
    path, found = run_dir / NAME, []
    for line in read_regular(path).splitlines() if path.exists() else []:
        with suppress(ValueError):
            found.append(parse_record(line, START))
    return found
