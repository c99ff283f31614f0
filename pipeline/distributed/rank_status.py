"""How each rank ended, in a folder, for launchers that lose exit codes or start again whatever did not end with 0.

torchrun restarts a rank that ends with 75 as if it had crashed, pdsh forgets codes, mpirun keeps one of them. Where
WIDEMIX_OUTCOME names a folder, every rank leaves a word there: `rank-3.json` with its host, its exit code (null until
it has ended by itself) and its message; an end that no restart would mend is then 0 to the launcher.
"""

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.files import atomic_write

VARIABLE = "WIDEMIX_OUTCOME"
_ORDERLY = (0, 2, 75)  # done, wrong input, stopped with a checkpoint: a launcher has nothing to mend


@dataclass(frozen=True)
class RankStatus:
    """The last of a rank, or the first where `code` is None: it runs, or was killed."""

    rank: int
    host: str
    code: int | None
    message: str
    time: float  # seconds since 1970


def node_name() -> str:
    """What the batch system calls this node, or it itself."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def write_rank_status(code: int | None, message: str = "") -> int:
    """Leave this rank's word, if anybody asked for it; the exit code that its launcher should see."""
    folder, rank = os.environ.get(VARIABLE), os.environ.get("RANK")
    if not folder or not rank:
        return code or 0
    word = RankStatus(int(rank), node_name(), code, message, time.time())
    path = Path(folder) / f"rank-{rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(asdict(word)) + "\n")
    except OSError:  # nobody will read it: the exit code has to say it
        return code or 0
    return 0 if code in _ORDERLY else code or 0


def read_rank_statuses(folder: Path) -> list[RankStatus]:
    """What the ranks left, by rank."""
    words = [RankStatus(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]
    return sorted(words, key=lambda word: word.rank)
