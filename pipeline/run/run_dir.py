"""The run folder (recipe, environment, metrics, tb/, checkpoints/, done.json) and who may write there."""

import json
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch

from pipeline.cgroups import usable_cpus
from pipeline.distributed.topology import Topology
from pipeline.errors import InputError
from pipeline.files import atomic_write, try_lock
from pipeline.recipe import Recipe, differences, dump_recipe, load_recipe, parse_recipe, recipe_hash
from pipeline.run import checkpoint
from pipeline.run.checkpoint import Checkpoint

_LEFT_OUT = "skipped_ranges.json"
_BEFORE = (".lock", ".recipe.yaml", "slurm")  # what may be there before there is a recipe
# What may differ between two starts of one run: nothing here moves a loss by more than rounding.
_FREE = re.compile(
    r"engine\.|faults\.|log\.|eval\.|data\.(path|workers|prefetch_batches|prefetch_mib)$"
    r"|train\.(max_steps|save_every_steps|keep_last|keep_best|keep_every_steps|grad_accum_steps)$"
)


@dataclass(frozen=True)
class Start:
    """What rank 0 found: from which checkpoint to go on, and the result if the run was already finished."""

    folder: Path
    checkpoint: Checkpoint | None
    done: dict[str, Any] | None
    environment: dict[str, Any]
    skipped_ranges: list[tuple[int, int]]  # of the data's order, by faults
    complaints: list[str]  # about damaged checkpoints

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self.checkpoint.position.step if self.checkpoint else 0

    @property
    def order(self) -> int:
        """Steps of the data's order done so far."""
        return self.checkpoint.position.order if self.checkpoint else 0

    @property
    def seconds(self) -> float:
        """Of training so far."""
        return self.checkpoint.position.seconds if self.checkpoint else 0.0


def default_folder(recipe_path: Path) -> Path:
    return Path("runs") / f"{recipe_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def claim(folder: Path, recipe: Recipe, resume: str, topology: Topology) -> tuple[Start, TextIO]:
    """Make the folder ours, on rank 0: `InputError` if it is somebody else's. Keep the lock file open."""
    _refuse_strangers(folder, recipe, resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder)
        origin, complaints = _origin(folder, recipe, resume)
        finished = _read_json(folder / "done.json")
        skipped_ranges = read_skipped_ranges(folder)
        atomic_write(folder / "recipe.yaml", dump_recipe(recipe))
        here = environment(topology)
        atomic_write(folder / "environment.json", json.dumps(here, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written to ({error.strerror}); name another with --run-dir") from None
    return Start(folder, origin, finished, here, skipped_ranges, complaints), lock


def finish(folder: Path, recipe: Recipe, result: dict[str, Any]) -> dict[str, Any]:
    """Write done.json, the sign that the run is complete."""
    done = {**result, "recipe": recipe_hash(recipe)}
    atomic_write(folder / "done.json", json.dumps(done, indent=1) + "\n")
    return done


def read_skipped_ranges(folder: Path) -> list[tuple[int, int]]:
    """First and stop of each stretch of the data's order that faults have ruled out."""
    path = folder / _LEFT_OUT
    found = _read_json(path) or []
    try:
        return [(int(first), int(stop)) for first, stop in found]
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def write_skipped_ranges(folder: Path, stretches: list[tuple[int, int]]) -> None:
    """The reverse of `read_skipped_ranges`."""
    atomic_write(folder / _LEFT_OUT, json.dumps(stretches) + "\n")


def environment(topology: Topology) -> dict[str, Any]:
    """Where and with what the run was started."""
    packages = ("widemix", "torch", "torchvision", "timm", "deepspeed", "ffcv", "numba", "numpy", "pillow")
    device = torch.cuda.get_device_name(topology.device) if topology.device.type == "cuda" else platform.processor()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "command": sys.argv,
        "ranks": topology.world,
        "device": f"{topology.device.type} {device}".strip(),
        "usable_cpus": usable_cpus(),
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {name: version(name) for name in packages},
    }


def _read_json(path: Path) -> Any:
    """What `atomic_write` wrote there, or None."""
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); remove it and the run goes on") from None


def _locked(folder: Path) -> TextIO:
    """The folder's lock file, ours until it is closed."""
    lock = (folder / ".lock").open("a")
    if not try_lock(lock.fileno()):
        lock.close()
        raise InputError(f"{folder}: another run is writing there; name another folder with --run-dir")
    return lock


def _refuse_strangers(folder: Path, recipe: Recipe, resume: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; name a folder with --run-dir")
    present = [p.name for p in folder.iterdir() if p.name not in _BEFORE] if folder.exists() else []
    if not present:
        return
    ours = folder / "recipe.yaml"
    if not ours.exists():
        raise InputError(f"{folder}: is not empty and not a run folder; name another with --run-dir")
    if resume != "auto":
        raise InputError(
            f"{folder}: holds a run already; --resume {resume} needs a new folder, name it with --run-dir"
        )
    changed = [name for name in differences(load_recipe(ours), recipe) if not _FREE.match(name)]
    record = folder / "metrics.jsonl"
    if changed and record.exists() and record.stat().st_size:  # otherwise that start came to nothing
        raise InputError(
            f"{folder}: was started with another recipe ({', '.join(changed[:3])} differ); "
            "name another folder with --run-dir"
        )


def _origin(folder: Path, recipe: Recipe, resume: str) -> tuple[Checkpoint | None, list[str]]:
    """A verified checkpoint to go on from."""
    if resume == "never":
        return None, []
    if resume == "auto":
        return checkpoint.newest_sound(folder)
    found = checkpoint.find(Path(resume))
    theirs = parse_recipe(found.position.recipe, default_origin=str(found.path))
    changed = [name for name in differences(theirs, recipe) if name.startswith("model.") or name == "optim.name"]
    if changed:
        what = "model" if theirs.model != recipe.model else "optimiser, whose state it holds"
        raise InputError(
            f"{found.path}: is of another {what} ({', '.join(changed)} differ); train.init_from takes weights alone"
        )
    found.verify()
    return found, []


def _commit() -> str | None:
    if not shutil.which("git"):
        return None
    folder = Path(__file__).parent
    answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
