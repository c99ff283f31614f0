"""The sample's pictures, as many as a benchmark asks for."""

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
