"""The run folder (recipe, environment, metrics, tb/, checkpoints/, done.json), its lock, and resuming from it."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch

from pipeline.cgroups import usable_cpus
from pipeline.distributed.topology import Topology, on_main
from pipeline.errors import InputError
from pipeline.files import atomic_write, try_lock
from pipeline.recipe import Recipe, differences, dump_recipe, load_recipe, parse_recipe, recipe_hash
from pipeline.run import checkpoint
from pipeline.run.checkpoint import Checkpoint

COMMAND_VARIABLE = "WIDEMIX_COMMAND"  # the command that a person typed, where it starts the ranks
_SKIPPED_RANGES = "skipped_ranges.json"
_NOT_A_RUN = (".lock", ".recipe.yaml", "slurm")  # files that may be there before the first start
# Keys that may differ between two starts of one run: they change no loss by more than rounding.
_CHANGEABLE = re.compile(
    r"engine\.|faults\.|log\.|eval\.|data\.(path|workers|prefetch_batches|prefetch_mib|on_corrupt)$"
    r"|train\.(max_steps|save_every_steps|keep_last|keep_best|keep_every_steps|grad_accum_steps)$"
    r"|train\.(activation_checkpointing|compile|deterministic|ema_device)$"
)
# Keys that say which samples a step has.
_DATA_ORDER = re.compile(
    r"data\.(train_split|order|memory_gib|shuffle_window_mib)|train\.(global_batch|seed)|augment\.aug_repeats"
)


@dataclass(frozen=True)
class ResumeState:
    """Where a run starts: its folder, the checkpoint to resume from, and its result if it is already complete."""

    run_dir: Path
    checkpoint: Checkpoint | None = None
    done: dict[str, Any] | None = None  # done.json
    environment: dict[str, Any] = field(default_factory=dict)
    skipped_ranges: list[tuple[int, int]] = field(default_factory=list)  # see `read_skipped_ranges`
    problems: list[str] = field(default_factory=list)  # with damaged checkpoints

    @property
    def step(self) -> int:
        """Optimizer steps done so far."""
        return self.checkpoint.position.step if self.checkpoint else 0

    @property
    def data_step(self) -> int:
        """Steps of the data order consumed or skipped so far."""
        return self.checkpoint.position.data_step if self.checkpoint else 0

    @property
    def seconds(self) -> float:
        """Training time so far, restarts included."""
        return self.checkpoint.position.seconds if self.checkpoint else 0.0


def default_run_dir(recipe_path: Path) -> Path:
    """Return runs/<recipe>-<time>."""
    return Path("runs") / f"{recipe_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextmanager
def acquire_run_dir(run_dir: Path, recipe: Recipe, resume: str, topology: Topology) -> Iterator[ResumeState]:
    """Create or reopen a run folder, lock it, and find the checkpoint to resume from. Every rank calls it.

    `resume` is "auto", "never" or the path of a run or checkpoint. Rank 0 holds the lock until the context ends.
    `InputError` on every rank if the folder cannot be written to, is in use, or holds anything but a run of this
    recipe.
    """
    with ExitStack() as stack:

        def acquire() -> ResumeState:
            state, lock = _acquire(run_dir, recipe, resume, topology)
            stack.callback(lock.close)
            return state

        yield on_main(topology, acquire)


def _acquire(run_dir: Path, recipe: Recipe, resume: str, topology: Topology) -> tuple[ResumeState, TextIO]:
    _check_usable(run_dir, recipe, resume)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = _lock(run_dir)
        origin, problems = _find_checkpoint(run_dir, recipe, resume)
        done = _read_json(run_dir / "done.json")
        skipped_ranges = read_skipped_ranges(run_dir)
        atomic_write(run_dir / "recipe.yaml", dump_recipe(recipe))
        environment = read_environment(topology)
        atomic_write(run_dir / "environment.json", json.dumps(environment, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"{run_dir}: cannot be written to ({error.strerror}); name another with --run-dir") from None
    return ResumeState(run_dir, origin, done, environment, skipped_ranges, problems), lock


def write_result(run_dir: Path, recipe: Recipe, result: dict[str, Any]) -> dict[str, Any]:
    """Write done.json, which marks the run as complete; return its content."""
    done = {**result, "recipe": recipe_hash(recipe)}
    atomic_write(run_dir / "done.json", json.dumps(done, indent=1) + "\n")
    return done


def read_skipped_ranges(run_dir: Path) -> list[tuple[int, int]]:
    """Return (first, stop) of each range of data steps that rollbacks have excluded, `stop` not included."""
    path = run_dir / _SKIPPED_RANGES
    ranges = _read_json(path) or []
    try:
        return [(int(first), int(stop)) for first, stop in ranges]
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def write_skipped_ranges(run_dir: Path, ranges: list[tuple[int, int]]) -> None:
    """Write what `read_skipped_ranges` reads."""
    atomic_write(run_dir / _SKIPPED_RANGES, json.dumps(ranges) + "\n")


def read_environment(topology: Topology) -> dict[str, Any]:
    """Return environment.json: host, command, device, and versions of packages and commit."""
    packages = ("widemix", "torch", "torchvision", "timm", "deepspeed", "ffcv", "numba", "numpy", "pillow")
    device = torch.cuda.get_device_name(topology.device) if topology.device.type == "cuda" else platform.processor()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "command": os.environ.get(COMMAND_VARIABLE) or shlex.join(sys.argv),
        "ranks": topology.world,
        "device": f"{topology.device.type} {device}".strip(),
        "usable_cpus": usable_cpus(),
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {name: version(name) for name in packages},
    }


def _read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it does not exist."""
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); remove it to continue the run") from None


def _lock(run_dir: Path) -> TextIO:
    """Lock a run folder until the returned file is closed."""
    lock = (run_dir / ".lock").open("a")
    if not try_lock(lock.fileno()):
        lock.close()
        raise InputError(f"{run_dir}: another run is writing there; name another folder with --run-dir")
    return lock


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
    if resume != "auto":
        raise InputError(
            f"{run_dir}: holds a run already; --resume {resume} needs a new folder, name it with --run-dir"
        )
    changed = [name for name in differences(load_recipe(stored), recipe) if not _CHANGEABLE.match(name)]
    metrics = run_dir / "metrics.jsonl"
    if (
        changed and metrics.exists() and metrics.stat().st_size
    ):  # an earlier start that wrote no metrics does not count
        raise InputError(
            f"{run_dir}: was started with another recipe ({', '.join(changed[:3])} differ); "
            "name another folder with --run-dir"
        )


def _find_checkpoint(run_dir: Path, recipe: Recipe, resume: str) -> tuple[Checkpoint | None, list[str]]:
    """Return the verified checkpoint to resume from, if any, and what is wrong with damaged ones."""
    if resume == "never":
        return None, []
    if resume == "auto":
        return checkpoint.newest_valid(run_dir)
    origin = checkpoint.find(Path(resume))
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
    origin.verify()
    return origin, []


def _commit() -> str | None:
    if not shutil.which("git"):
        return None
    folder = Path(__file__).parent
    answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
