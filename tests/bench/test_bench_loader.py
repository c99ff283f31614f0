"""`widemix bench loader`: every method loads every image, in a process of its own, and the table is the samples'."""

import json
import re
import statistics
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from widemix.bench import loader, loading
from widemix.bench.loader import powers_of_two
from widemix.bench.sample import jpegs, link_repeatedly
from widemix.cgroups import usable_cpus
from widemix.errors import InputError, RunError


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Twelve JPEGs at two depths, two with the same name, and what is none."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(12):
        file = folder / ("a" if number % 2 else "b/c") / f"{number // 2}.{'jpg' if number % 3 else 'JPEG'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(256, size=(40 + number, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "JPEG")
    (folder / "notes.txt").write_text("none")
    return folder


def test_images_of_any_folder(images, tmp_path):
    files = jpegs(images)
    assert len(files) == 12
    links = link_repeatedly(files, tmp_path, 30)
    assert len(links) == 30
    assert sorted(link.read_bytes() for link in links) == sorted(files[i % 12].read_bytes() for i in range(30))
    with pytest.raises(InputError, match="has no JPEGs"):
        jpegs(tmp_path / "none")


@pytest.mark.long
def test_our_methods_load_every_image(images, tmp_path):
    (tmp_path / "images").mkdir()
    link_repeatedly(jpegs(images), tmp_path / "images", 100)
    for kind, option in loading.PREPARED.items():
        loader.prepare("image-folder", tmp_path / "images", tmp_path / kind, "--max-size=0", option)
    for name, method in loading.METHODS.items():
        if name.startswith("ours"):  # FFCV compiles for long, others are not installed where the tests run
            epoch = method.build(tmp_path, 1)
            assert epoch(0) == 100, name
            assert epoch(1) == 100, name
    name = "ours, restart markers, uint8"
    words = [sys.executable, "-m", "widemix.bench.loading", name, str(tmp_path), "1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    timing = json.loads(done.stdout)
    assert timing["images"] == 100
    assert timing["cpu_seconds"] > 0
    assert timing["seconds"] > 0
    with pytest.raises(RunError, match="cats, 1 threads: KeyError: 'cats'"):
        loader._time("cats", tmp_path, 1)


def test_spdl_crops_every_image_within_its_borders_anew_in_each_epoch(images, tmp_path, monkeypatch):
    """With a module in its place, as it is not installed where the tests run."""
    read = []

    def decode_packets(path, filter_desc):
        read.append((path, filter_desc))
        width, height, x, y = map(
            int, re.match(r"crop=w=(\d+):h=(\d+):x=(\d+):y=(\d+):exact=1,", filter_desc).groups()
        )
        with Image.open(path) as image:
            assert 0 < width <= image.width - x
            assert 0 < height <= image.height - y
        return np.zeros((*map(int, re.search(r"scale=(\d+):(\d+)", filter_desc).groups()), 3), np.uint8)

    io = {"demux_image": str, "decode_packets": decode_packets, "convert_frames": np.copy, "to_numpy": np.copy}
    package, module = ModuleType("spdl"), ModuleType("spdl.io")
    module.__dict__.update(io)
    package.io = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spdl", package)
    monkeypatch.setitem(sys.modules, "spdl.io", module)
    files = sorted(map(str, link_repeatedly(jpegs(images), tmp_path / "images", 60)))
    epoch = loading.METHODS["SPDL, original files, uint8"].build(tmp_path, 2)
    for number in range(2):
        assert epoch(number) == 60
        assert sorted(path for path, _ in read[60 * number :]) == files
    assert not {*read[:60]} & {*read[60:]}


def test_rows_are_the_medians_of_samples_in_random_order(images, monkeypatch):
    timed = []

    def time(name, folder, threads):
        timed.append((name, threads))
        speed = {loading.PEER: 100, "ours, pixels, uint8": 400}.get(name, 200) * threads
        return {"images": 10, "seconds": 10 / speed * len(timed), "cpu_seconds": 10 / speed}

    monkeypatch.setattr(loader, "_time", time)
    monkeypatch.setattr(loader, "_price", lambda folder, rounds: {"raw": 3.0}.get(folder.name, 1.0))
    monkeypatch.setattr(loader, "usable_cpus", lambda: 3)
    monkeypatch.setattr(loader, "prepare", lambda *arguments: None)
    rows = loader.run(SimpleNamespace(origin=images, threads=None, samples=12, rounds=3))
    names = {row["name"] for row in rows}
    assert {row["threads"] for row in rows} == {1, 2, 3}
    assert len(rows) == 3 * len(names)
    orders = [timed[start : start + len(rows)] for start in range(0, len(timed), len(rows))]
    assert len(orders) == 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(orders[0]))}
    assert len({tuple(order) for order in orders}) == 3
    for row in rows:
        speeds = [sample["images"] / sample["seconds"] for sample in row["samples"]]
        assert row["images_per_s"] == pytest.approx(statistics.median(speeds), abs=0.1)
        expected = {loading.PEER: 1, "ours, pixels, uint8": 4}.get(row["name"], 2)
        assert row["cpu_ratio"] == expected
        assert row["images_per_cpu_s"] == 100 * expected * row["threads"]
        decoder = loading.METHODS[row["name"]].decodes and row["threads"] == 1
        assert row["checksums_percent"] == ((3 if "pixels" in row["name"] else 1) if decoder else None)
    with pytest.raises(InputError, match="--threads 4: this process may use 3 CPUs"):
        loader.run(SimpleNamespace(origin=images, threads=[1, 4], samples=12, rounds=3))


def test_threads_double_up_to_all():
    assert [powers_of_two(most) for most in (1, 2, 3, 4, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]
    assert powers_of_two(usable_cpus())[-1] == usable_cpus()
