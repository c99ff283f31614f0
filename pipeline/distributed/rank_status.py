"""The exit status of each rank, as a file in a folder, for launchers that lose exit codes or restart on any but 0.

torchrun restarts a rank that exits with 75 as if it had crashed, pdsh drops exit codes, mpirun keeps one of them.
Where WIDEMIX_RANK_STATUS_DIR names a folder, every rank writes `rank-3.json` there with its host, its exit code (null
while it runs, or if it was killed) and its message. Exit codes that no restart would change are then 0 to the
launcher.
"""

import json
import os
import platform
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from widemix.distributed.launchers import read_place
from widemix.files import atomic_write

STATUS_DIR_VARIABLE = "WIDEMIX_RANK_STATUS_DIR"
_NO_RESTART = (0, 2, 75)  # done, wrong input, stopped with a checkpoint


@dataclass(frozen=True)
class RankStatus:
    """The exit status of a rank; `code` is None while it runs, or if it was killed."""

    rank: int
    host: str
    code: int | None
    message: str
    time: float  # of writing, in seconds since 1970


def node_name() -> str:
    """Return the name that Slurm has for this node; elsewhere its host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def write_rank_status(code: int | None, message: str = "") -> int:
    """Write this rank's status if WIDEMIX_RANK_STATUS_DIR is set; return the exit code for the launcher.

    `code` is None at the start of a run. Where no status can be written the code is returned as it is.
    """
    path = _own_path()
    if path is None:
        return code or 0
    status = RankStatus(int(os.environ["RANK"]), node_name(), code, message, time.time())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(asdict(status)) + "\n")
    except OSError:  # then the exit code itself has to tell the launcher
        return code or 0
    return 0 if code in _NO_RESTART else code or 0


def remove_earlier_statuses() -> None:
    """Remove what this node's ranks wrote in an attempt before, in which they had other numbers; on local rank 0."""
    path, place = _own_path(), read_place(os.environ)
    if path is None or place.local_rank:
        return
    own = range(place.rank, place.rank + place.local_world)
    for status in read_rank_statuses(path.parent):
        if status.host == node_name() and status.rank not in own:
            path.with_name(f"rank-{status.rank}.json").unlink(missing_ok=True)


def has_rank_status() -> bool:
    """Whether this rank, or a rank of its number before a restart, has written a status."""
    path = _own_path()
    return path is not None and path.exists()


def _own_path() -> Path | None:
    folder, rank = os.environ.get(STATUS_DIR_VARIABLE), os.environ.get("RANK")
    return Path(folder) / f"rank-{rank}.json" if folder and rank and rank.isdecimal() else None


def read_rank_statuses(folder: Path) -> list[RankStatus]:
    """Read all statuses of a folder, sorted by rank. One that a full disk or a crash has torn has no code."""
    return sorted((_read(path) for path in folder.glob("rank-*.json")), key=lambda status: status.rank)


def _read(path: Path) -> RankStatus:
    try:
        return RankStatus(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        rank = int(re.sub(r"\D", "", path.stem) or "0")
        return RankStatus(rank, "a host unknown", None, f"{path}: is damaged", path.stat().st_mtime)
