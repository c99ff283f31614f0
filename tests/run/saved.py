"""Small checkpoints, and calls that are killed or fail at one of their file operations."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import HashStore

from widemix.distributed.requests import StopRequest
from widemix.distributed.topology import Topology
from widemix.engine.state import State
from widemix.recipe import load_recipe
from widemix.run.checkpoint import Position
from widemix.run.resume import ResumeState
from widemix.run.run_dir import Run

ALONE = Topology(0, 1, 0, 1, torch.device("cpu"))
DONE, FAILED, KILLED, WARNED = "done", "failed", "killed", "warned"
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.rmtree"}


def state(value: float = 1.0, ema: float | None = None) -> State:
    weights = {"fc.weight": torch.full((3, 2), value), "fc.bias": torch.full((3,), value)}
    average = {} if ema is None else {name: torch.full_like(tensor, ema) for name, tensor in weights.items()}
    optimizer = {f"exp_avg/{name}": tensor + 1 for name, tensor in weights.items()}
    return State(weights, optimizer, {"loss_scale": 2.0}, average)


def position(step: int, **others) -> Position:
    fixed = {"seconds": 1.5, "scalars": {"loss_scale": 2.0}, "recipe": {}}
    return Position(**(fixed | {"step": step, "data_step": step, "metrics": {}} | others))


def run_of(start: ResumeState | Path, topology: Topology = ALONE, verbosity: int = 0, **keys: str) -> Run:
    """A run that starts so, or in a new folder; keys: by name, section__key."""
    recipe = load_recipe("digits/mixer", [(name.replace("__", "."), value) for name, value in keys.items()])
    known = start if isinstance(start, ResumeState) else ResumeState(start)
    return Run(recipe, topology, known, HashStore(), StopRequest(), verbosity)


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def disturbed(act: Callable[[], object], at: int, how: str) -> str:
    """Act in a child process, which is killed before its change number `at` of files, or whose change fails there.

    Changes: files and folders made, renamed, linked, flushed or removed. Returns how it ended: DONE where it has
    fewer changes, WARNED where it ended though one failed.
    """
    pid = os.fork()
    if pid == 0:
        code = 4
        try:
            changes = 0

            def disturb(event: str, words: tuple) -> None:
                nonlocal changes
                # A file that is flushed by its name is opened by os.open, one that is read without waiting.
                opened = event == "open" and (
                    words[1] in ("w", "x", "xb") or (words[1] is None and not words[2] & os.O_NONBLOCK)
                )
                if opened or event in _CHANGES:
                    changes += 1
                    if changes == at and how == KILLED:
                        os._exit(2)
                    if changes == at:
                        raise OSError(errno.ENOSPC, "No space left on device")

            sys.addaudithook(disturb)
            act()
            code = 0 if changes < at else 3
        except OSError:
            code = 1
        finally:
            os._exit(code)
    return [DONE, FAILED, KILLED, WARNED][os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
