"""`widemix bench trainers`: each trainer takes its steps on both loaders."""

import importlib.util
from pathlib import Path

import pytest

from tests.layouts import two_classes
from widemix import bench

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the other packages


@pytest.mark.parametrize(
    ("pair", "package", "seen"),
    [("_lightning", "lightning", 16), ("_hugging_face", "transformers", 16), ("_ffcv", "ffcv", 48)],
)
def test_each_takes_its_steps_on_both_loaders(pair, package, seen, pictures: Path, tmp_path: Path, monkeypatch):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    two_classes(tmp_path / "pictures")
    (tmp_path / "prepared").symlink_to(pictures)
    for name, value in {"STEPS": 2, "BATCH": 8, "SIDE": 32}.items():
        monkeypatch.setattr(bench, name, value)
    assert [train(0) for train in getattr(bench, pair)(tmp_path)] == [seen, seen]
