"""Where a run starts: from which checkpoint, of which step, with which data skipped."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from widemix.errors import InputError
from widemix.files import atomic_write, parse_json, read_regular
from widemix.formats.manifest import Prepared
from widemix.models.hub import timm_name
from widemix.recipe import (
    Recipe,
    differences,
    parse_recipe,
)
from widemix.recipe.sections import TrainSection
from widemix.run import checkpoint
from widemix.run.checkpoint import Checkpoint
from widemix.run.records import Gains

_SKIPPED_RANGES = "skipped_ranges.json"
_ORIGIN = "origin.json"  # of a run that --resume PATH has started
# Keys that say which samples a step has.
_DATA_ORDER = re.compile(
    r"data\.(train_split|order|sampling|memory_gib|shuffle_window_mib)|train\.(global_batch|seed)|augment\.aug_repeats"
)


@dataclass(frozen=True)
class ResumeState:
    """Where a run starts: its folder, the checkpoint to resume from, and its result if it is already complete."""

    run_dir: Path
    checkpoint: Checkpoint | None = None
    done: dict[str, Any] | None = None  # done.json
    environment: dict[str, Any] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)  # hashes of the prepared files, see `data_hashes`
    prepared: Prepared = Prepared()  # noqa: RUF009 - it cannot be changed
    skipped_ranges: list[tuple[int, int]] = field(default_factory=list)  # see `read_skipped_ranges`
    problems: list[str] = field(default_factory=list)  # with damaged checkpoints

    @property
    def step(self) -> int:
        """Optimizer steps done so far."""
        return self.checkpoint.position.step if self.checkpoint else 0

    @property
    def is_of_another_run(self) -> bool:
        """Whether the checkpoint is one of another run, from which --resume PATH starts this one."""
        return self.checkpoint is not None and self.checkpoint.path.resolve().parents[1] != self.run_dir.resolve()

    @property
    def data_step(self) -> int:
        """Steps of the data order consumed or skipped so far."""
        return self.checkpoint.position.data_step if self.checkpoint else 0

    @property
    def seconds(self) -> float:
        """Training time so far, restarts included."""
        return self.checkpoint.position.seconds if self.checkpoint else 0.0

    def ends_early(self, train: TrainSection) -> bool:
        """Whether patience is at its end where the run starts; `InputError` if its result cannot be read."""
        try:
            ended = (self.done or {}).get("ended_early")
            saved = self.checkpoint.position.gains if self.checkpoint else None
            gains = Gains.model_validate(ended) if ended else saved
        except ValidationError as error:
            raise InputError(f"{self.run_dir / 'done.json'}: ended_early cannot be read ({error})") from None
        return gains is not None and gains.end_run(train)

    @property
    def result_step(self) -> int:
        """The step of the run's result; without one that of its checkpoint."""
        return self.done.get("step", self.step) if self.done else self.step

    def is_complete(self, last_step: int) -> bool:
        """Whether the run has its result, whatever has become of its checkpoints."""
        return self.done is not None and self.result_step >= last_step

    def evaluates(self, last_step: int) -> bool:
        """Whether the run begins with the evaluation of its checkpoint."""
        position = self.checkpoint.position if self.checkpoint else None
        return position is not None and (position.evaluation_due or position.step >= last_step)


def keep_origin(start: ResumeState) -> None:
    """Note the checkpoint of another run that this one starts from, and keep it as a checkpoint of its own.

    So the same command goes on, with --resume PATH or without, though the other run has gone on or is removed. Raises
    `OSError` if it cannot be kept.
    """
    assert start.checkpoint is not None
    origin = start.checkpoint.path.resolve()
    text = json.dumps({"checkpoint": str(origin), "step": start.step}, indent=1)
    atomic_write(start.run_dir / _ORIGIN, text + "\n")
    checkpoint.keep(start.checkpoint, start.run_dir)


def read_skipped_ranges(run_dir: Path) -> list[tuple[int, int]]:
    """Return (first, stop) of each range of data steps that rollbacks have excluded, `stop` not included."""
    path = run_dir / _SKIPPED_RANGES
    ranges = read_state(path, list) or []
    try:
        return [(int(first), int(stop)) for first, stop in ranges]
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def write_skipped_ranges(run_dir: Path, ranges: list[tuple[int, int]]) -> None:
    """Write what `read_skipped_ranges` reads."""
    atomic_write(run_dir / _SKIPPED_RANGES, json.dumps(ranges) + "\n")


def read_state(path: Path, kind: type) -> Any:
    """Return the content of a JSON file, of this type; None if it does not exist."""
    try:
        content = parse_json(read_regular(path)) if path.exists() else None
        if content is not None and not isinstance(content, kind):
            raise ValueError("its JSON is of another file")
        return content
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); remove it to continue the run") from None


def is_origin(run_dir: Path, resume: str) -> bool:
    """Whether the run in a folder was started from this checkpoint, or from one of this run."""
    origin = read_state(run_dir / _ORIGIN, dict)
    if origin is None:
        return False
    path = Path(origin["checkpoint"])
    return Path(resume).resolve() in (path, path.parents[1])


def find_checkpoint(
    run_dir: Path, recipe: Recipe, resume: str, data: dict[str, str]
) -> tuple[Checkpoint | None, list[str]]:
    """Return the verified checkpoint to resume from, if any, and what is wrong with damaged ones."""
    if resume == "never":
        return None, []
    started_from, problems = read_state(run_dir / _ORIGIN, dict), list[str]()
    if resume == "auto" or started_from:
        newest, problems = checkpoint.newest_valid(run_dir)
        if newest:
            _check_data(newest, recipe, data)
        if newest or not started_from:
            return newest, problems
    if not started_from and (timm_name(resume) or checkpoint.is_weights(Path(resume))):
        raise InputError(
            f"--resume {resume}: has weights alone, without the state of a training; start a new run from them with "
            f"--train.init_from {resume}"
        )
    origin = checkpoint.find(Path(started_from["checkpoint"] if started_from else resume))
    origin_recipe = parse_recipe(origin.position.recipe, default_origin=str(origin.path))
    changed = [
        name for name in differences(origin_recipe, recipe) if name.startswith("model.") or name == "optim.name"
    ]
    if changed:
        what = "model" if origin_recipe.model != recipe.model else "optimizer, whose state it holds"
        raise InputError(
            f"{origin.path}: is of another {what} ({', '.join(changed)} differ); train.init_from takes weights alone"
        )
    moved = [name for name in differences(origin_recipe, recipe) if _DATA_ORDER.fullmatch(name)]
    if moved:
        raise InputError(
            f"{origin.path}: its data step counts batches of another order ({', '.join(moved)} differ); "
            "train.init_from takes weights alone"
        )
    _check_data(origin, recipe, data)
    origin.verify()
    return origin, problems


def _check_data(origin: Checkpoint, recipe: Recipe, data: dict[str, str]) -> None:
    """`InputError` where a prepared file is not what the checkpoint's run had under this name."""
    known = origin.position.data
    other = sorted(name for name in data.keys() & known.keys() if data[name] != known[name])
    if other:
        raise InputError(
            f"data.path {recipe.data.path}: {other[0]} is not the file that {origin.path} was trained with; "
            "name that folder, or start a new run with train.init_from, which takes weights alone"
        )
