"""What each release wrote is read by this one: the files are kept in released/, as VERSION.tar.xz.

0.2.0: `prepared`, of the digits, two of each class in train; `run`, of a Mixer that was trained on them for 4 steps.
"""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import widemix
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser

RELEASED = Path(__file__).parent / "released"


@pytest.fixture(scope="module", params=sorted(path.name.removesuffix(".tar.xz") for path in RELEASED.iterdir()))
def files(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    with tarfile.open(RELEASED / f"{request.param}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_prepared_folders_are_verified_and_loaded(files: Path) -> None:
    folder = files / "prepared"
    assert run_command(make_parser(), argv=["verify", str(folder)]) == 0
    settings = {"mean": (0, 0, 0), "std": (1, 1, 1), "crop_pct": 1.0}
    loader = widemix.Loader(folder, "test", 360, 8, is_training=False, device="cpu", num_workers=1, **settings)
    ((images, labels),) = loader
    digits = load_digits()
    known = {image.tobytes(): label for image, label in zip(as_bytes(digits.images), digits.target, strict=True)}
    assert [known[image[0].tobytes()] for image in as_bytes(images.numpy() * 16)] == labels.tolist()


def as_bytes(images: np.ndarray) -> np.ndarray:
    return np.round(images).astype(np.uint8)


def test_a_run_is_evaluated_and_goes_on(files: Path, capsys) -> None:
    run, data = str(files / "run"), str(files / "prepared")
    assert run_command(make_parser(), argv=["eval", run, "--data", data]) == 0
    done = json.loads((files / "run/done.json").read_text())
    assert f"{done['top1']:.2f}" in capsys.readouterr().out
    more = ["--run-dir", run, "--data.path", data, "--train.max_steps", "6"]
    assert run_command(make_parser(), argv=["train", str(files / "run/recipe.yaml"), *more]) == 0
    assert json.loads((files / "run/done.json").read_text())["step"] == 6
