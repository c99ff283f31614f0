"""Checkpoints: whole or absent, readable without us, for any engine and any number of ranks.

checkpoints/<step>/ holds model.safetensors and optimizer.safetensors (fp32, whole, by parameter name; with an EMA
ema.safetensors too), state.json (position and recipe) and COMPLETE, written last, with a BLAKE2b of each file. One
without COMPLETE is never read.
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

from pipeline.engine.contract import State
from pipeline.errors import InputError

MARK = "COMPLETE"
_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "ema.safetensors")  # the last with an EMA


class Position(BaseModel):
    """Where a run stands: what the next step is, and how it got there."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    step: int  # optimiser steps done
    seconds: float  # of training so far, restarts included
    scalars: dict[str, float]  # of the engine
    recipe: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, its position read, its tensors not yet."""

    path: Path
    position: Position

    def load(self) -> State:
        """The tensors, verified against the hashes that COMPLETE holds."""
        try:
            hashes = json.loads((self.path / MARK).read_text())
            for name in {*_FILES[:3], *hashes} & set(_FILES):
                if _hash(self.path / name) != hashes.get(name):
                    raise InputError(f"{self.path / name}: is damaged (its hash is not the one written with it)")
            model, optimizer = (load_file(self.path / name) for name in _FILES[:2])
            ema = load_file(self.path / _FILES[3]) if _FILES[3] in hashes else {}
        except (OSError, ValueError, SafetensorError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self.path}: cannot be loaded ({error})") from None
        return State(model, optimizer, self.position.scalars, ema)


def save(run: Path, state: State, position: Position, keep: int) -> Path:
    """Write a checkpoint on rank 0 and remove all but the `keep` newest. Raises OSError with nothing left behind."""
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
            save_file(state.ema, writing / _FILES[3])
        names = [path.name for path in writing.iterdir()]
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
    complete = sorted(path.parent for path in folder.glob(f"*/{MARK}"))
    for old in complete[:-keep]:
        (old / MARK).unlink()  # first, so that half a removal never reads as whole
        shutil.rmtree(old)
    return final


def newest(run: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run folder."""
    marks = sorted(run.glob(f"checkpoints/*/{MARK}"))
    return read(marks[-1].parent) if marks else None


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
