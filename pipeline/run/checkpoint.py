"""Checkpoints: whole or absent, readable without us, for any engine and any number of ranks.

checkpoints/<step>/ holds model.safetensors and optimizer.safetensors (fp32, whole, by parameter name; with an EMA
ema/model.safetensors too, in a folder of its own for tools that read whole folders), state.json (position and recipe)
and COMPLETE, written last, with a BLAKE2b of each file. One without COMPLETE is never read; one that is found damaged
loses it. `pipeline.run.saving` writes them beside the training.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pipeline.engine.state import State
from pipeline.errors import InputError

MARK, DAMAGED = "COMPLETE", "DAMAGED"
_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "ema/model.safetensors")  # the last with an EMA


class Position(BaseModel):
    """Where a run stands: what the next step is, and how it got there."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    step: int  # optimiser steps done
    order: int  # steps of the data's order done: more than `step` where a fault has left some out
    seconds: float  # of training so far, restarts included
    scalars: dict[str, float]  # of the engine
    figures: dict[str, float]  # of the evaluation at this step, if there was one
    recipe: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, its position read, its tensors not yet."""

    path: Path
    position: Position

    def load(self, verify: bool = True) -> State:
        """The tensors; verified, unless this was done already."""
        if verify:
            self.verify()
        try:
            model, optimizer = (load_file(self.path / name) for name in _FILES[:2])
            ema = load_file(self.path / _FILES[3]) if (self.path / _FILES[3]).exists() else {}
        except (OSError, SafetensorError) as error:
            raise InputError(f"{self.path}: cannot be loaded ({error})") from None
        return State(model, optimizer, self.position.scalars, ema)

    def verify(self) -> None:
        """`InputError` unless every file has the hash that COMPLETE holds."""
        try:
            hashes = json.loads((self.path / MARK).read_text())
            for name in {*_FILES[:3], *hashes} & set(_FILES):
                if _hash(self.path / name) != hashes.get(name):
                    raise InputError(f"{self.path / name}: is damaged (its hash is not the one written with it)")
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self.path}: cannot be loaded ({error})") from None


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints stay: the `newest`, that with the best figure, and those at every so many steps."""

    newest: int
    best: str | None = None  # of the figures of an evaluation; losses are best when small
    every: int | None = None

    def expired(self, run: Path) -> list[Path]:
        """The complete checkpoints that may go."""
        complete = all_complete(run)
        stay = set(complete[-self.newest :])
        if self.every:
            stay |= {path for path in complete if int(path.name) % self.every == 0}
        if self.best:
            stay |= {path for path in (best(run, self.best),) if path}
        return [path for path in complete if path not in stay]


def best(run: Path, figure: str) -> Path | None:
    """The complete checkpoint with the best figure, the newer of equals; None if none was evaluated."""
    found = []
    for path in all_complete(run):
        try:
            value = read(path).position.figures.get(figure)
        except InputError:  # damaged: the next start will tell
            continue
        if value is not None:
            found.append((-value if figure.endswith("loss") else value, path))
    return max(found)[1] if found else None


def save(run: Path, state: State, position: Position, keep: RetentionPolicy) -> Path:
    """Write a checkpoint, on one rank, and remove those that need not stay.

    Raises OSError with nothing of it left behind.
    """
    folder = run / "checkpoints"
    writing, final = folder / f".writing-{position.step}", folder / f"{position.step:08d}"
    try:
        folder.mkdir(exist_ok=True)
        for left_over in folder.glob(".writing-*"):
            shutil.rmtree(left_over)
        writing.mkdir()
        save_file(state.model, writing / _FILES[0])
        save_file(state.optimizer, writing / _FILES[1])
        (writing / _FILES[2]).write_text(position.model_dump_json(indent=1))
        if state.ema:
            (writing / _FILES[3]).parent.mkdir()
            save_file(state.ema, writing / _FILES[3])
        names = [name for name in _FILES if (writing / name).exists()]
        hashes = {name: _hash(writing / name) for name in names}
        for name in names:
            _flush(writing / name)
        _write_flushed(writing / f".{MARK}", json.dumps(hashes))
        if final.exists():  # unmarked, or from a future that a rerun does not share
            shutil.rmtree(final)
        writing.rename(final)
        _flush(folder)
        (final / f".{MARK}").rename(final / MARK)
        _flush(final)
    except (OSError, SafetensorError) as error:
        for unmarked in (writing, *(final for _ in final.glob(f".{MARK}"))):
            shutil.rmtree(unmarked, ignore_errors=True)
        raise OSError(
            f"{final}: the checkpoint could not be written ({error}); earlier ones are untouched"
        ) from error
    for old in keep.expired(run):
        (old / MARK).unlink()  # first, so that half a removal never reads as whole
        shutil.rmtree(old)
    return final


def all_complete(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first; folders that someone else has named are not ours."""
    return sorted(mark.parent for mark in run.glob(f"checkpoints/*/{MARK}") if mark.parent.name.isdecimal())


def newest(run: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run folder."""
    complete = all_complete(run)
    return read(complete[-1]) if complete else None


def newest_sound(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose hashes are right, and what is wrong with newer ones, which lose their mark."""
    complaints: list[str] = []
    for path in reversed(all_complete(run)):
        try:
            found = read(path)
            found.verify()
            return found, complaints
        except InputError as error:
            complaints.append(str(error))
            retire(path)
    return None, complaints


def retire(path: Path) -> None:
    """Take a checkpoint's mark away: nothing reads it any more."""
    (path / MARK).rename(path / DAMAGED)


def find(path: Path) -> Checkpoint:
    """The checkpoint that a user names: its own folder, or a run folder whose newest is meant."""
    if not path.is_dir():
        raise InputError(f"{path}: no such run or checkpoint folder")
    if (path / MARK).exists():
        return read(path)
    found = newest(path)
    if found is None:
        what = "is an unfinished checkpoint" if (path / _FILES[0]).exists() else "holds no complete checkpoint"
        raise InputError(f"{path}: {what}")
    return found


def read(path: Path) -> Checkpoint:
    try:
        return Checkpoint(path, Position.model_validate_json((path / _FILES[2]).read_bytes()))
    except (OSError, ValidationError) as error:
        raise InputError(f"{path / _FILES[2]}: cannot be read ({str(error).splitlines()[0]})") from None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _write_flushed(path: Path, text: str) -> None:
    path.write_text(text)
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
