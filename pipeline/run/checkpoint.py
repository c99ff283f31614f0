"""Checkpoints: complete or absent, readable by other tools, independent of the engine and the number of ranks.

checkpoints/<step>/ holds model.safetensors and optimizer.safetensors (full fp32 tensors by parameter name), with an
EMA ema/model.safetensors (in a folder of its own, for tools that read whole folders), state.json (position and
recipe), and COMPLETE, which has a BLAKE2b hash of each file and is written last. A checkpoint without COMPLETE is
never read; COMPLETE of a damaged one is renamed to DAMAGED. During training `widemix.run.saving` writes checkpoints.
Only tensors need torch, which takes seconds to import; listing runs reads none.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError

from widemix.errors import InputError
from widemix.files import fsync_path, open_regular, parse_json, read_regular
from widemix.formats.manifest import Prepared
from widemix.metrics import METRICS
from widemix.run.records import Gains
from widemix.terminal import print

if TYPE_CHECKING:
    from torch import Tensor

    from widemix.engine.state import State

COMPLETE, DAMAGED = "COMPLETE", "DAMAGED"
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_EMA = "ema/model.safetensors"  # only with train.ema_decay
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")  # of files that train.init_from may read
_REPLACED = ".replaced-"  # before the name of a checkpoint in whose place another is put


class UnloggedSteps(BaseModel):
    """The steps since the last line of metrics.jsonl that did not fail, and the samples that were replaced."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    losses: list[float] = []
    grad_norms: list[float] = []  # without those that are not finite
    replaced: int = 0  # on all ranks


class Position(BaseModel):
    """The content of state.json: how far a run has come, and its recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    step: int  # optimizer steps done
    data_step: int  # steps of the data order consumed or skipped: more than `step` after a rollback
    seconds: float  # of training so far, restarts included
    scalars: dict[str, float]  # numbers of the engine's state, such as the loss scale
    metrics: dict[str, float]  # results of the evaluation at this step; empty if there was none
    recipe: dict[str, Any]
    evaluation_due: bool = False  # at this step, but the run was asked to stop
    gains: Gains | None = None  # with train.patience_epochs
    unlogged: UnloggedSteps = UnloggedSteps()
    data: dict[str, str] = {}  # hashes of the prepared files, see `data_hashes`
    prepared: Prepared = Prepared()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; only its position has been read."""

    path: Path
    position: Position

    def load(self, verify: bool = True) -> "State":
        """Read the tensors; `InputError` if a file is missing or, with `verify`, if its hash is wrong."""
        from safetensors.torch import load_file

        from widemix.engine.state import State

        if verify:
            self.verify()
        try:
            for name in (_MODEL, _OPTIMIZER):
                open_regular(self.path / name).close()
            model, optimizer = (load_file(self.path / name) for name in (_MODEL, _OPTIMIZER))
            ema = load_file(self.path / _EMA) if (self.path / _EMA).exists() else {}
        except (OSError, SafetensorError) as error:
            raise InputError(f"{self.path}: cannot be loaded ({error})") from None
        return State(model, optimizer, self.position.scalars, ema)

    def verify(self) -> None:
        """Raise `InputError` unless every file has the hash that COMPLETE lists."""
        try:
            hashes = parse_json(read_regular(self.path / COMPLETE))
            if not isinstance(hashes, dict):
                raise InputError(f"{self.path / COMPLETE}: is damaged (it holds no hashes)")
            ema = [_EMA] if _EMA in hashes or (self.path / _EMA).exists() else []
            for name in (_MODEL, _OPTIMIZER, _STATE, *ema):
                if _hash(self.path / name) != hashes.get(name):
                    raise InputError(f"{self.path / name}: is damaged (its hash is not the one in {COMPLETE})")
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self.path}: cannot be loaded ({error})") from None


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints to keep: the newest ones, the one with the best metric, and those of every n-th step."""

    newest: int
    best: str | None = None  # a metric of the evaluation, with the prefix ema_ that of the averaged weights
    every: int | None = None  # keep the checkpoints of steps that this divides

    def expired(self, run_dir: Path) -> list[Path]:
        """Return the complete checkpoints that need not be kept."""
        complete = complete_checkpoints(run_dir)
        kept = set(complete[-self.newest :])
        if self.every:
            kept |= {path for path in complete if int(path.name) % self.every == 0}
        if self.best and (found := best(run_dir, self.best)):
            kept.add(found.path)
        return [path for path in complete if path not in kept]


def best(run_dir: Path, metric: str) -> Checkpoint | None:
    """Return the complete checkpoint with the best metric, the newer of equals; None if none was evaluated."""
    sign, evaluated = 1 if METRICS[metric.removeprefix("ema_")].higher else -1, []
    for path in complete_checkpoints(run_dir):
        with contextlib.suppress(InputError, KeyError):  # damaged, of which the next start warns, or not evaluated
            evaluated.append((sign * (found := read(path)).position.metrics[metric], path, found))
    return max(evaluated)[2] if evaluated else None


def save(
    run_dir: Path,
    state: "State",
    position: Position,
    retention: RetentionPolicy,
    wrote: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint, on one rank, then remove those that `retention` no longer keeps; return its folder.

    `wrote` is called whenever a file has been written, read or flushed, which may take long.
    Raises `OSError` and leaves nothing of the new checkpoint behind if it cannot be written.
    """
    folder = run_dir / "checkpoints"
    writing, final = folder / f".writing-{position.step}", folder / f"{position.step:08d}"
    written = writing
    try:
        folder.mkdir(exist_ok=True)
        _remove_unread(folder)
        writing.mkdir()
        names = _write_files(writing, state, position, wrote)
        hashes = {}
        for name in names:
            hashes[name] = _hash(writing / name)
            wrote()
        (writing / f".{COMPLETE}").write_text(json.dumps(hashes))
        for name in (*names, f".{COMPLETE}"):
            fsync_path(writing / name)
            wrote()
        if state.ema:
            fsync_path((writing / _EMA).parent)
        if final.exists():  # saved before its evaluation, damaged, or undone by a rollback or an older checkpoint
            final.rename(folder / f"{_REPLACED}{final.name}")
        written = writing.rename(final)
        fsync_path(folder)
        wrote()
        (final / f".{COMPLETE}").rename(final / COMPLETE)
        fsync_path(final)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            _remove(written)
        with contextlib.suppress(OSError):
            put_back(run_dir)
        raise OSError(
            f"{final}: the checkpoint could not be written ({error}); earlier ones are untouched"
        ) from error
    try:
        put_back(run_dir)
        for expired in retention.expired(run_dir):
            _remove(expired)
    except OSError as error:  # on NFS a folder can't be removed while another process reads a file of it
        print(f"warning: {folder}: an old checkpoint could not be removed ({error})", file=sys.stderr, flush=True)
    return final


def keep(origin: Checkpoint, run_dir: Path) -> None:
    """Add a checkpoint of another run to a run folder, by links to its files where the file system has them."""
    folder = run_dir / "checkpoints"
    writing, final = folder / f".writing-{origin.position.step}", folder / f"{origin.position.step:08d}"
    if final.exists() and final.samefile(origin.path):  # by another path to this folder
        return
    folder.mkdir(exist_ok=True)
    _remove_unread(folder)
    if final.exists():  # a damaged copy
        _remove(final)
    shutil.copytree(origin.path, writing, copy_function=_link)
    writing.rename(final)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def put_back(run_dir: Path) -> None:
    """Undo the replacements of checkpoints during which the run was killed, unless the new one is complete."""
    for replaced in sorted((run_dir / "checkpoints").glob(f"{_REPLACED}*")):
        final = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if (final / COMPLETE).exists():
            _remove(replaced)
            continue
        if final.exists():
            shutil.rmtree(final)
        replaced.rename(final)


def _remove_unread(folder: Path) -> None:
    """Remove what a kill left of checkpoints being written, and those whose removal was interrupted, or failed."""
    for stale in folder.glob(".writing-*"):
        shutil.rmtree(stale)
    for unread in folder.iterdir():
        if unread.name.isdecimal() and not any((unread / mark).exists() for mark in (COMPLETE, DAMAGED)):
            shutil.rmtree(unread, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint's folder, its COMPLETE first, so that an interrupted removal is never read."""
    (path / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(path)


def save_tensors(tensors: "dict[str, Tensor]", path: Path) -> None:
    """Write a .safetensors file."""
    from safetensors.torch import save_file

    save_file(tensors, path)


def _write_files(folder: Path, state: "State", position: Position, wrote: Callable[[], None]) -> list[str]:
    """Write tensors and position; return the names of the files."""
    text = json.dumps(position.model_dump(mode="json"), indent=1)  # pydantic's own takes no names of any bytes
    (folder / _STATE).write_text(text)
    tensors = {_MODEL: state.model, _OPTIMIZER: state.optimizer}
    if state.ema:
        (folder / _EMA).parent.mkdir()
        tensors[_EMA] = state.ema
    for name, each in tensors.items():
        save_tensors(each, folder / name)
        shutil.copymode(folder / _STATE, folder / name)  # safetensors writes files that only their owner can read
        wrote()
    return [*tensors, _STATE]


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, oldest first; folders whose name is no number are ignored."""
    return sorted(m.parent for m in run_dir.glob(f"checkpoints/*/{COMPLETE}") if m.parent.name.isdecimal())


def newest(run_dir: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run folder, unverified; None if there is none."""
    complete = complete_checkpoints(run_dir)
    return read(complete[-1]) if complete else None


def newest_valid(run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint whose hashes are right, and what is wrong with newer ones.

    The newer ones are marked as damaged.
    """
    problems: list[str] = []
    for path in reversed(complete_checkpoints(run_dir)):
        try:
            candidate = read(path)
            candidate.verify()
            return candidate, problems
        except InputError as error:
            problems.append(str(error))
            mark_damaged(path)
    return None, problems


def mark_damaged(path: Path) -> None:
    """Rename a checkpoint's COMPLETE to DAMAGED, so that nothing reads it again."""
    (path / COMPLETE).rename(path / DAMAGED)


def find(path: Path) -> Checkpoint:
    """Return the checkpoint at a path: a checkpoint folder, or a run folder, of which the newest is taken.

    `InputError` if there is none.
    """
    if not path.is_dir():
        what = "is a file; name a run or checkpoint folder" if path.exists() else "no such run or checkpoint folder"
        raise InputError(f"{path}: {what}")
    if (path / COMPLETE).exists():
        return read(path)
    checkpoint = newest(path)
    if checkpoint is None:
        what = "is an incomplete checkpoint" if (path / _STATE).exists() else "holds no complete checkpoint"
        what = "holds weights alone" if is_weights(path) else what
        run = path.parent if path.name == "checkpoints" else "one that `widemix train` has written"
        raise InputError(f"{path}: {what}; name the run folder, {run}")
    return checkpoint


def is_weights(path: Path) -> bool:
    """Whether weights lie at a path without the rest of a checkpoint: a file, or a folder such as an export."""
    if path.is_dir():
        return (path / _MODEL).exists() and not any((path / name).exists() for name in (_STATE, COMPLETE))
    return path.is_file() and path.suffix in _WEIGHTS and not (path.parent / COMPLETE).exists()


def read(path: Path) -> Checkpoint:
    """Read a checkpoint folder's position, and none of its tensors; `InputError` if that fails."""
    try:
        return Checkpoint(path, Position.model_validate(parse_json(read_regular(path / _STATE))))
    except (OSError, ValueError) as error:
        raise InputError(f"{path / _STATE}: cannot be read ({str(error).splitlines()[0]})") from None


def _hash(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
