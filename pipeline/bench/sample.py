"""The sample's pictures, as many as a benchmark asks for, prepared by the command."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def repeated(files: Sequence[Path], folder: Path, count: int) -> list[Path]:
    """The files under `count` names, a class a folder, in `folder`/train; sorted."""
    for number in range(count):
        file = files[number % len(files)]
        link = folder / "train" / file.parent.name / f"{file.stem}_{number // len(files):04}.JPEG"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
    return sorted(folder.glob("train/*/*.JPEG"))


def prepare(source: str, origin: Path, to: Path, *options: str) -> None:
    """`widemix prep SOURCE --from ORIGIN --to TO [OPTIONS]`, in a process of its own. `RuntimeError` if it fails."""
    words = [source, "--from", str(origin), "--to", str(to), *options]
    done = subprocess.run([sys.executable, "-m", "pipeline.cli", "prep", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"widemix prep {source}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
