"""`widemix bench trainers`: each trainer takes its steps on both loaders. TIMM_TRAIN=path/to/train.py adds timm's."""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.layouts import two_classes
from widemix.bench import trainers as bench

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the other packages


@pytest.mark.long
@pytest.mark.parametrize(
    ("pair", "package", "seen"),
    [("_lightning", "lightning", 16), ("_hugging_face", "transformers", 16), ("_ffcv", "ffcv", 48)],
)
def test_each_takes_its_steps_on_both_loaders(pair, package, seen, images: Path, tmp_path: Path, monkeypatch):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert images_of(getattr(bench, pair), images, tmp_path, monkeypatch) == [seen, seen]


def test_timms_train_script_takes_its_steps_on_both_loaders(images: Path, tmp_path: Path, monkeypatch):
    script = os.environ.get("TIMM_TRAIN")
    if not script:
        pytest.skip("TIMM_TRAIN is not set; it names train.py of a timm checkout")
    assert images_of(bench._timm_train(Path(script)), images, tmp_path, monkeypatch) == [48, 48]


def images_of(pair, images: Path, folder: Path, monkeypatch) -> list[int]:
    two_classes(folder / "images")
    (folder / "prepared").symlink_to(images)
    for name, value in {"STEPS": 2, "BATCH": 8, "SIDE": 32}.items():
        monkeypatch.setattr(bench, name, value)
    return [train(0) for train in pair(folder)]
