"""The run folder (recipe, environment, metrics, checkpoints/, done.json), its lock, and on what a run was started."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from widemix.cgroups import usable_cpus
from widemix.distributed.requests import StopRequest
from widemix.distributed.topology import Topology, on_main
from widemix.engine.batch_norm import has_batch_norms
from widemix.errors import InputError, cure_of, is_of_disk
from widemix.files import atomic_write
from widemix.formats.manifest import Prepared, data_hashes, read_manifest
from widemix.lock import hold
from widemix.recipe import (
    Recipe,
    dump_recipe,
    load_stored_recipe,
    recipe_hash,
    run_differences,
)
from widemix.run import checkpoint
from widemix.run.choice import Best
from widemix.run.metrics import SUPERSEDED
from widemix.run.resume import ResumeState, find_checkpoint, is_origin, read_skipped_ranges, read_state
from widemix.terminal import print

COMMAND_VARIABLE = "WIDEMIX_COMMAND"  # the command that a person typed, where it starts the ranks
# Written before the first step.
_OF_A_START = {".lock", "leases", "recipe.yaml", "environment.json", "deepspeed.json"}
_NOT_A_RUN = (".lock", ".recipe.yaml", "leases", "slurm")  # files that may be there before the first start


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
        cure = f"{cure_of(error)}, or " if is_of_disk(error) else ""
        reason = f"cannot be written to ({error.strerror}); {cure}name another with --run-dir"
        raise InputError(f"{run_dir}: {reason}") from None


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
    origin, problems = find_checkpoint(run_dir, recipe, resume, data)
    prepared = Prepared.of(read_manifest(Path(recipe.data.path)))
    done = read_state(run_dir / "done.json", dict)
    skipped_ranges = read_skipped_ranges(run_dir)
    environment = read_environment(topology)
    if done is None:
        describe_start(run_dir, recipe, environment)
    return ResumeState(run_dir, origin, done, environment, data, prepared, skipped_ranges, problems)


def describe_start(run_dir: Path, recipe: Recipe, environment: dict[str, Any]) -> None:
    """Write recipe.yaml and environment.json of a start."""
    atomic_write(run_dir / "recipe.yaml", dump_recipe(recipe))
    atomic_write(run_dir / "environment.json", json.dumps(environment, indent=1) + "\n")


def write_result(run_dir: Path, recipe: Recipe, result: dict[str, Any], best: Best | None = None) -> dict[str, Any]:
    """Write done.json, which marks the run as complete, and names its best checkpoint; return its content."""
    done = {**result, "recipe": recipe_hash(recipe)}
    if best:
        done["best"] = {"step": best.step, "metric": best.metric, "value": best.value}
    atomic_write(run_dir / "done.json", json.dumps(done, indent=1) + "\n")
    return done


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
    if resume != "auto" and _has_results(run_dir) and not is_origin(run_dir, resume):
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


def read_environment(topology: Topology) -> dict[str, Any]:
    """Return environment.json: host, command, device, precision of fp32 products, commit, versions of packages.

    The version of a package that is not installed is None.
    """
    packages = ("widemix", "torch", "torchvision", "timm", "deepspeed", "ffcv", "numba", "numpy", "pillow")
    device = torch.cuda.get_device_name(topology.device) if topology.device.type == "cuda" else platform.processor()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "command": os.environ.get(COMMAND_VARIABLE) or shlex.join(sys.argv),
        "ranks": topology.world,
        "device": f"{topology.device.type} {device}".strip(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "usable_cpus": usable_cpus(),
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {name: _installed_version(name) for name in packages},
    }


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    if not shutil.which("git"):
        return None
    folder = Path(__file__).parent
    answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
