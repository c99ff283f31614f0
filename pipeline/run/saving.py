"""Saving while the training goes on: each rank copies its own part, and threads do the rest.

A save stops the training for the copy alone. Then every rank's thread writes its part to checkpoints/.parts-<step>/
and tells so in the store; rank 0's puts the parts together into a whole checkpoint (`pipeline.run.checkpoint.save`),
so that what is on disk is independent of the ranks that wrote it.
"""

import json
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed import Store

from pipeline.distributed.topology import Topology
from pipeline.engine.state import Shard, State
from pipeline.run import checkpoint
from pipeline.run.checkpoint import Position, RetentionPolicy

_WRITTEN = "written"


class Saver:
    """Writes checkpoints one after the other. Every rank has one and calls `begin` with the others."""

    def __init__(self, run: Path, topology: Topology, store: Store, keep: RetentionPolicy):
        self._run, self._topology, self._store, self._keep = run, topology, store, keep
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._raised: Exception | None = None
        if topology.is_main:
            for left_over in (run / "checkpoints").glob(".parts-*"):
                shutil.rmtree(left_over)

    def begin(self, parts: list[Shard], position: Position) -> str | None:
        """Save these parts, which nobody may change any more. Waits only for the save before, if it still goes on.

        Returns why the save before failed, as `failure` does.
        """
        failed = self.finish()
        self._saves += 1
        self._thread = threading.Thread(target=self._save, args=(parts, position), name="saving", daemon=True)
        self._thread.start()
        return failed

    @property
    def writing(self) -> bool:
        """Whether this rank has not yet done its part of a save, which on rank 0 is all of it."""
        return self._thread is not None and self._thread.is_alive()

    def failure(self) -> str | None:
        """Why the last save failed, told once on rank 0; None if it did not, or goes on."""
        error = None if self.writing else self._raised
        if error is None:
            return None
        self._raised = None
        if not isinstance(error, OSError):
            raise error
        return str(error)

    def finish(self) -> str | None:
        """Wait for the save under way; as `failure`."""
        if self._thread:
            self._thread.join()
        return self.failure()

    def _save(self, parts: list[Shard], position: Position) -> None:
        """In the thread."""
        folder = self._run / "checkpoints" / f".parts-{position.step}"
        key = f"save {self._saves} of rank "
        if not self._topology.is_main:
            self._store.set(f"{key}{self._topology.rank}", _write(folder / f"{self._topology.rank}", parts))
            return
        try:
            others = range(1, self._topology.world)
            answers = {rank: self._store.get(f"{key}{rank}").decode() for rank in others}
            for rank, answer in answers.items():
                if answer != _WRITTEN:
                    raise OSError(f"step {position.step} was not saved: rank {rank}: {answer}")
            every_part = [*parts, *(part for rank in others for part in _read(folder / f"{rank}"))]
            state = State.of(assembled(every_part), position.scalars)
            checkpoint.save(self._run, state, position, self._keep)
        except Exception as error:
            self._raised = error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, parts: list[Shard]) -> str:
    """What a rank tells rank 0 of its part: "written", or what is wrong."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        places = {part.key: json.dumps([part.start, *part.shape]) for part in parts}
        save_file({part.key: part.values for part in parts}, path, metadata=places)
    except Exception as error:  # rank 0 waits for a word, whatever it is
        return str(error) or type(error).__name__
    return _WRITTEN


def _read(path: Path) -> Iterable[Shard]:
    try:
        with safe_open(path, framework="pt") as file:
            for key, place in (file.metadata() or {}).items():
                start, *shape = json.loads(place)
                yield Shard(key, tuple(shape), start, file.get_tensor(key))
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def assembled(parts: Iterable[Shard]) -> dict[str, torch.Tensor]:
    """The tensors that all ranks' parts make up."""
    found: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    for part in parts:
        if part.key not in found:
            found[part.key] = torch.empty(part.shape, dtype=part.values.dtype)
            missing[part.key] = found[part.key].numel()
        found[part.key].view(-1)[part.start : part.start + len(part.values)] = part.values
        missing[part.key] -= len(part.values)
    wrong = [key for key, values in missing.items() if values]
    assert not wrong, f"the ranks' parts are not the whole of {wrong[0]}"
    return found
