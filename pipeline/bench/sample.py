"""Data for the benchmarks: a sample of ImageNet's JPEGs under many names, and prepared by `widemix prep`."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from widemix.errors import InputError, RunError


def jpegs(folder: Path) -> list[Path]:
    """The JPEGs in a folder's `train`, or without one in the folder, at any depth, sorted; `InputError` if none."""
    inside = folder / "train" if (folder / "train").is_dir() else folder
    files = sorted(path for path in inside.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg") and path.is_file())
    if not files:
        raise InputError(f"--from {folder}: has no JPEGs (*.jpg, *.jpeg)")
    return files


def link_repeatedly(files: Sequence[Path], folder: Path, count: int) -> list[Path]:
    """Make `count` links to the files in `folder`/train, one folder a class; return them sorted."""
    targets = [file.resolve() for file in files]
    for number in range(count):
        file = files[number % len(files)]
        link = folder / "train" / file.parent.name / f"{file.stem}_{number:07}.JPEG"  # stems may occur several times
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(targets[number % len(files)])
    return sorted(folder.glob("train/*/*.JPEG"))


def prepare(source: str, origin: Path | None, to: Path, *options: str) -> None:
    """Run `widemix prep SOURCE [--from ORIGIN] --to TO [OPTIONS]` in its own process; `RunError` if it fails.

    Samples are in the order of the source.
    """
    arguments = [source, *(() if origin is None else ("--from", str(origin))), "--to", str(to)]
    arguments += ["--no-shuffle", *options]
    done = subprocess.run([sys.executable, "-m", "widemix", "prep", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"widemix prep {source}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
