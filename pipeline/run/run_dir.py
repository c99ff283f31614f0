"""The run folder (recipe, environment, metrics, checkpoints/, done.json), its lock, and resuming from it."""

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch.distributed import Store

from widemix.distributed.signals import StopRequest
from widemix.distributed.topology import Topology, on_main
from widemix.engine.batch_norm import depends_on_batch
from widemix.errors import InputError
from widemix.files import atomic_write, parse_json, read_regular
from widemix.formats.manifest import Prepared, data_hashes, read_manifest
from widemix.lock import hold
from widemix.models.hub import timm_name
from widemix.models.registry import build_on_meta
from widemix.recipe import (
    Recipe,
    differences,
    dump_recipe,
    load_stored_recipe,
    parse_recipe,
    recipe_hash,
    run_differences,
)
from widemix.recipe.train import TrainSection
from widemix.run import checkpoint
from widemix.run.checkpoint import Checkpoint
from widemix.run.choice import best_of
from widemix.run.environment import read_environment
from widemix.run.metrics import SUPERSEDED
from widemix.run.patience import Gains
from widemix.terminal import print

_SKIPPED_RANGES = "skipped_ranges.json"
_ORIGIN = "origin.json"  # of a run that --resume PATH has started
# Written before the first step.
_OF_A_START = {".lock", "leases", "recipe.yaml", "environment.json", "deepspeed.json"}
_NOT_A_RUN = (".lock", ".recipe.yaml", "leases", "slurm")  # files that may be there before the first start
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


@dataclass(frozen=True)
class Run:
    """A run as its ranks know it, made once by whoever starts it: of a recipe that fits data, ranks and folder.

    store: of all ranks; each thread needs its own clone. verbosity: -1 prints warnings and the last line, 1 every
    line of metrics.jsonl.
    """

    recipe: Recipe
    topology: Topology
    start: ResumeState
    store: Store
    stop: StopRequest
    verbosity: int = 0

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.start.run_dir

    def note(self, text: str) -> None:
        """Print a line on rank 0, unless only warnings are wanted."""
        if self.verbosity >= 0:
            self.print(text)

    def warn(self, text: str) -> None:
        """Print a warning on rank 0."""
        self.print(f"warning: {text}")

    def print(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.topology.is_main:
            with suppress(OSError):  # nothing reads it, or the log's disk is full
                print(text, file=sys.stderr, flush=True)


def default_run_dir(recipe_path: Path, overrides: Sequence[tuple[str, str]] = ()) -> Path:
    """Return runs/<recipe>-<key>-<value>-...-<time>, with the overrides but for data.path and log."""
    own = [(name, text) for name, text in overrides if name != "data.path" and not name.startswith("log.")]
    words = [f"{name.partition('.')[2]}-{re.sub(r'[^A-Za-z0-9.+-]+', '_', text).strip('_.')}" for name, text in own]
    named = "-".join([recipe_path.stem, *words])[:100]
    return Path("runs") / f"{named}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextmanager
def acquire_run_dir(run_dir: Path, recipe: Recipe, resume: str, topology: Topology) -> Iterator[ResumeState]:
    """Create or reopen a run folder, lock it, and find the checkpoint to resume from. Every rank calls it.

    `resume` is "auto", "never" or the path of a run or checkpoint. Rank 0 holds the lock until the context ends.
    `InputError` on every rank if the folder cannot be written to, is in use, or holds anything but a run of this
    recipe. A folder that it has made is removed again where an `InputError` ends the context before the run has
    written its first line.
    """
    with ExitStack() as stack:

        def acquire() -> ResumeState:
            state, lock = _acquire(run_dir, recipe, resume, topology)
            stack.push(lock)
            return state

        yield on_main(topology, acquire)


@contextmanager
def _removing_unstarted(run_dir: Path) -> Iterator[None]:
    """Within the lock: what another process has taken meanwhile is not removed."""
    try:
        yield
    except InputError:
        written = list(run_dir.iterdir()) if run_dir.is_dir() else []
        if written and {path.name for path in written} <= _OF_A_START:
            shutil.rmtree(run_dir)
        raise


def _acquire(run_dir: Path, recipe: Recipe, resume: str, topology: Topology) -> tuple[ResumeState, ExitStack]:
    """Return where the run starts, and its lock."""
    _check_usable(run_dir, recipe, resume)
    try:
        new = _make(run_dir)
        with ExitStack() as stack:
            stack.enter_context(hold(run_dir))
            if new:
                stack.enter_context(_removing_unstarted(run_dir))
            state = _open(run_dir, recipe, resume, topology)
            return state, stack.pop_all()
    except OSError as error:
        raise InputError(f"{run_dir}: cannot be written to ({error.strerror}); name another with --run-dir") from None


def _make(run_dir: Path) -> bool:
    """Make a folder where there is none; returns whether it was this process that did."""
    try:
        run_dir.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _open(run_dir: Path, recipe: Recipe, resume: str, topology: Topology) -> ResumeState:
    """Find what to resume from, and write recipe and environment, in a locked run folder.

    Those of a complete run stay: they say what was trained, and on what.
    """
    data = data_hashes(Path(recipe.data.path), recipe.data.train_split, recipe.data.eval_split)
    checkpoint.put_back(run_dir)
    origin, problems = _find_checkpoint(run_dir, recipe, resume, data)
    prepared = Prepared.of(read_manifest(Path(recipe.data.path)))
    done = _read_json(run_dir / "done.json", dict)
    skipped_ranges = read_skipped_ranges(run_dir)
    environment = read_environment(topology)
    if done is None:
        describe_start(run_dir, recipe, environment)
    return ResumeState(run_dir, origin, done, environment, data, prepared, skipped_ranges, problems)


def describe_start(run_dir: Path, recipe: Recipe, environment: dict[str, Any]) -> None:
    """Write recipe.yaml and environment.json of a start."""
    atomic_write(run_dir / "recipe.yaml", dump_recipe(recipe))
    atomic_write(run_dir / "environment.json", json.dumps(environment, indent=1) + "\n")


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


def write_result(run_dir: Path, recipe: Recipe, result: dict[str, Any]) -> dict[str, Any]:
    """Write done.json, which marks the run as complete, and names its best checkpoint; return its content."""
    done = {**result, "recipe": recipe_hash(recipe)}
    if best := best_of(run_dir):
        done["best"] = {"step": best.step, "metric": best.metric, "value": best.value}
    atomic_write(run_dir / "done.json", json.dumps(done, indent=1) + "\n")
    return done


def read_skipped_ranges(run_dir: Path) -> list[tuple[int, int]]:
    """Return (first, stop) of each range of data steps that rollbacks have excluded, `stop` not included."""
    path = run_dir / _SKIPPED_RANGES
    ranges = _read_json(path, list) or []
    try:
        return [(int(first), int(stop)) for first, stop in ranges]
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def write_skipped_ranges(run_dir: Path, ranges: list[tuple[int, int]]) -> None:
    """Write what `read_skipped_ranges` reads."""
    atomic_write(run_dir / _SKIPPED_RANGES, json.dumps(ranges) + "\n")


def _read_json(path: Path, kind: type) -> Any:
    """Return the content of a JSON file, of this type; None if it does not exist."""
    try:
        content = parse_json(read_regular(path)) if path.exists() else None
        if content is not None and not isinstance(content, kind):
            raise ValueError("its JSON is of another file")
        return content
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); remove it to continue the run") from None


def _check_usable(run_dir: Path, recipe: Recipe, resume: str) -> None:
    """Raise `InputError` unless the folder is new, empty, or holds a run of this recipe."""
    if run_dir.exists() and not run_dir.is_dir():
        raise InputError(f"{run_dir}: is a file; name a folder with --run-dir")
    present = [p.name for p in run_dir.iterdir() if p.name not in _NOT_A_RUN] if run_dir.exists() else []
    if not present:
        return
    stored = run_dir / "recipe.yaml"
    if not stored.exists():
        raise InputError(f"{run_dir}: is not empty and not a run folder; name another with --run-dir")
    if resume != "auto" and _has_results(run_dir) and not _is_origin(run_dir, resume):
        raise InputError(
            f"{run_dir}: holds a run already; --resume {resume} needs a new folder, name it with --run-dir"
        )
    before = load_stored_recipe(stored)
    changed = run_differences(before, recipe)
    if before.train.grad_accum_steps != recipe.train.grad_accum_steps and has_batch_norms(recipe):
        changed.append("train.grad_accum_steps")  # the batch of a batch norm is a micro-batch
    if changed and _has_results(run_dir):  # an earlier start without any does not count
        if changed == ["train.epochs"] and (run_dir / "done.json").exists():
            raise InputError(
                f"{run_dir}: is complete, after train.epochs {before.train.epochs}, and its schedule ended there; to "
                f"train further, start from its weights: --run-dir ANOTHER --train.init_from {run_dir}"
            )
        raise InputError(
            f"{run_dir}: was started with another recipe ({', '.join(changed[:3])} differ); "
            "name another folder with --run-dir"
        )


def _has_results(run_dir: Path) -> bool:
    """Whether a folder holds what a run has measured or trained."""
    lines = [run_dir / name for name in ("metrics.jsonl", SUPERSEDED)]
    measured = any(path.exists() and path.stat().st_size for path in lines)
    return measured or (run_dir / "done.json").exists() or bool(checkpoint.complete_checkpoints(run_dir))


def _is_origin(run_dir: Path, resume: str) -> bool:
    """Whether the run in a folder was started from this checkpoint, or from one of this run."""
    origin = _read_json(run_dir / _ORIGIN, dict)
    if origin is None:
        return False
    path = Path(origin["checkpoint"])
    return Path(resume).resolve() in (path, path.parents[1])


def _find_checkpoint(
    run_dir: Path, recipe: Recipe, resume: str, data: dict[str, str]
) -> tuple[Checkpoint | None, list[str]]:
    """Return the verified checkpoint to resume from, if any, and what is wrong with damaged ones."""
    if resume == "never":
        return None, []
    started_from, problems = _read_json(run_dir / _ORIGIN, dict), list[str]()
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


def has_batch_norms(recipe: Recipe) -> bool:
    """Whether the recipe's network takes statistics of a batch: then its numbers depend on train.grad_accum_steps."""
    network = build_on_meta(recipe.model, recipe.data.image_size, max(1, recipe.data.num_classes))
    return any(depends_on_batch(part) or hasattr(part, "running_var") for part in network.modules())
