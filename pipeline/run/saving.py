"""Saving during training: each rank copies its shards of the state, and threads write it.

Training waits only for the copy. Then a thread of every rank writes its shards to a new file in
checkpoints/.parts-<step>/ and names it in the process group's store; rank 0's thread joins the shards to full tensors
and writes the checkpoint (`widemix.run.checkpoint.save`), so that what is on disk does not depend on the ranks that
wrote it.
"""

import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed import Store

from widemix.distributed.topology import Topology, on_main
from widemix.engine.state import Shard, State
from widemix.errors import RunError, cure_of
from widemix.run import checkpoint
from widemix.run.checkpoint import Position, RetentionPolicy, complete_checkpoints

_WRITTEN = "written"  # the key of how many files all ranks have written
_POLL_S = 0.05  # between two looks whether they have
_MOVED = "was renamed or removed while the run wrote to it; move it back, and start the run again"


class Saver:
    """Writes checkpoints in the background, one at a time. Every rank has one, and all call `begin` together.

    waits: called again and again with how many files all ranks have written while one waits for them.
    """

    def __init__(
        self,
        run_dir: Path,
        topology: Topology,
        store: Store,
        retention: RetentionPolicy,
        waits: Callable[[int], None] = lambda _: None,
    ):
        self._run_dir, self._topology, self._store, self._retention = run_dir, topology, store, retention
        self._waits, self._main_store = waits, store.clone()  # a thread that asks a store blocks all that use it
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._raised: Exception | None = None
        if topology.is_main:
            for stale in (run_dir / "checkpoints").glob(".parts-*"):
                shutil.rmtree(stale)

    def begin(self, shards: list[Shard], position: Position) -> str | None:
        """Start saving these shards, whose memory must not change any more; first wait for the previous save.

        Returns why the previous save failed, as `failure` does.
        """
        failed = self.finish()
        self._saves += 1
        self._thread = threading.Thread(target=self._save, args=(shards, position), name="saving", daemon=True)
        self._thread.start()
        return failed

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing: its own shards, on rank 0 the whole checkpoint."""
        return self._thread is not None and self._thread.is_alive()

    def failure(self) -> str | None:
        """Return, once and on rank 0, why the last save failed; None if it did not, or has not ended."""
        error = None if self.writing else self._raised
        if error is None:
            return None
        self._raised = None
        if not isinstance(error, OSError):
            raise error
        return str(error)

    def finish(self) -> str | None:
        """Wait until rank 0 has ended the current save; return why it failed, as `failure` does."""
        while self.writing or not (self._topology.is_main or self._has_ended()):
            self._waits(self._main_store.add(_WRITTEN, 0))
            assert self._thread
            self._thread.join(_POLL_S)
            if not self._thread.is_alive() and not self._topology.is_main:
                time.sleep(_POLL_S)
        return self.failure()

    def _has_ended(self) -> bool:
        """Whether rank 0 has ended the current save, if there is one."""
        return not self._saves or self._main_store.check([f"save {self._saves} ended"])

    def _note_written(self) -> None:
        """In the thread: note that a file has been written, or is going to be."""
        self._store.add(_WRITTEN, 1)

    def finish_all_ranks(self) -> None:
        """Wait for the current save; `RunError` on every rank if it failed. Every rank calls it.

        No rank returns before rank 0 has written the checkpoint: launchers may kill the ranks that outlive the first.
        """
        failed = self.finish()
        failed = on_main(self._topology, lambda: failed and f"{failed}; {cure_of(failed)}, and {self._onward()}")
        if failed is not None:
            raise RunError(failed)

    def _onward(self) -> str:
        complete = complete_checkpoints(self._run_dir)
        onward = f"goes on from step {int(complete[-1].name)}" if complete else "begins anew, since none is complete"
        return f"start the same command again: it {onward}"

    def _save(self, shards: list[Shard], position: Position) -> None:
        """In the thread."""
        folder = self._run_dir / "checkpoints" / f".parts-{position.step}"
        key = f"save {self._saves} of rank "
        self._note_written()
        if not self._topology.is_main:
            # A name that no process of an earlier attempt has, which may still write there.
            path = folder / f"{self._topology.rank}-{uuid.uuid4().hex}"
            self._store.set(f"{key}{self._topology.rank}", json.dumps([path.name, _write(path, shards)]))
            self._note_written()
            return
        try:
            others = range(1, self._topology.world)
            answers = {rank: json.loads(self._store.get(f"{key}{rank}")) for rank in others}
            for rank, (_, error) in answers.items():
                if error is not None:
                    raise OSError(f"step {position.step} was not saved: rank {rank}: {error}")
            every_shard = [*shards, *(shard for name, _ in answers.values() for shard in _read(folder / name))]
            state = State.of(assembled(every_shard), position.scalars)
            checkpoint.save(self._run_dir, state, position, self._retention, self._note_written)
        except Exception as error:
            moved = isinstance(error, OSError) and not self._run_dir.exists()
            self._raised = RunError(f"{self._run_dir}: {_MOVED}") if moved else error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._store.set(f"save {self._saves} ended", "")


def _write(path: Path, shards: list[Shard]) -> str | None:
    """Write a rank's shards to a file; return the error, if there is one."""
    try:
        if path.parents[2].exists():  # the run folder itself is not made again where it has been moved
            path.parent.mkdir(parents=True, exist_ok=True)
        places = {shard.key: json.dumps([shard.start, *shard.shape]) for shard in shards}
        save_file({shard.key: shard.values for shard in shards}, path, metadata=places)
    except Exception as error:  # rank 0 waits for the message, whatever the error is
        return str(error) or type(error).__name__
    return None


def _read(path: Path) -> Iterable[Shard]:
    try:
        with safe_open(path, framework="pt") as file:
            for key, place in (file.metadata() or {}).items():
                start, *shape = json.loads(place)
                yield Shard(key, tuple(shape), start, file.get_tensor(key))
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def assembled(shards: Iterable[Shard]) -> dict[str, torch.Tensor]:
    """Join the shards of all ranks to full tensors, by key."""
    tensors: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    for shard in shards:
        if shard.key not in tensors:
            tensors[shard.key] = torch.empty(shard.shape, dtype=shard.values.dtype)
            missing[shard.key] = tensors[shard.key].numel()
        tensors[shard.key].view(-1)[shard.start : shard.start + len(shard.values)] = shard.values
        missing[shard.key] -= len(shard.values)
    incomplete = [key for key, values in missing.items() if values]
    assert not incomplete, f"the ranks' shards are not the whole of {incomplete[0]}"
    return tensors
