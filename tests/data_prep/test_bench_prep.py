"""The other writers of `widemix bench prep`."""

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from widemix.bench import prep as bench
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings


def test_writers_that_are_not_installed_are_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench._peers([]) == {}
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" is not installed")[0] for line in said] == ["litdata", "mosaicml-streaming"]


def test_litdata_gets_every_byte_and_removes_nothing_of_others(tmp_path, jpeg, monkeypatch):
    pytest.importorskip("litdata", reason="litdata is not installed: pip install 'widemix[bench]'")
    from litdata import StreamingDataset

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of which it removes `data`, by default
    (tmp_path / "data").mkdir()
    files = [tmp_path / f"{i}.JPEG" for i in range(3)]
    for i, file in enumerate(files):
        file.write_bytes(jpeg(i))
    bench._litdata(files, tmp_path / "out")
    stored = StreamingDataset(str(tmp_path / "out/litdata"))
    assert sorted(sample["image"] for sample in stored) == sorted(file.read_bytes() for file in files)
    assert (tmp_path / "data").is_dir()


def test_cpu_time_is_that_of_all_processes_also_of_ended_ones_without_waiting(monkeypatch):
    times = namedtuple("times", "user system children_user children_system iowait")
    child = SimpleNamespace(cpu_times=lambda: times(100, 200, 400, 800, 5000))
    this = SimpleNamespace(cpu_times=lambda: times(1, 2, 4, 8, 5000), children=lambda recursive: [child] * recursive)
    monkeypatch.setattr(bench, "psutil", SimpleNamespace(Process=lambda: this))
    assert bench._cpu_seconds() == 1515


def test_the_loss_of_stored_images_is_that_of_their_middle(tmp_path):
    """Two of 120 x 80 pixels, grey but for a frame: 48 x 48 pixels of them are compared."""

    def write(name, value, frame):
        pixels = np.full((80, 120, 3), frame, np.uint8)
        pixels[8:72, 32:88] = value
        file = tmp_path / name / "train/a"
        file.mkdir(parents=True, exist_ok=True)
        number = len(list(file.iterdir()))
        Image.fromarray(pixels).save(file / f"{number}.JPEG", quality=100)
        return file / f"{number}.JPEG"

    same = [write("stored", value, 0) for value in (100, 50)]
    prepare("image-folder", tmp_path / "stored", tmp_path / "data", PrepSettings())
    assert bench._psnr(tmp_path / "data/train.beton", same) == 100
    others = [write("others", value, 255) for value in (110, 20)]
    error = (10**2 + 30**2) / 2
    assert bench._psnr(tmp_path / "data/train.beton", others) == pytest.approx(10 * np.log10(255**2 / error))
