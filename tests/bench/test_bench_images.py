"""The benchmarks of training images, of views and of starts: every contestant reads every image, and their rows."""

import os
import sys
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from widemix.bench import augment, start, views
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.formats.beton import open_beton

COUNT = 4


@pytest.fixture
def origin(tmp_path, monkeypatch):
    """A folder of four small JPEGs, which the benchmarks prepare in this process and take for whole batches."""
    for number in range(COUNT):
        file = tmp_path / "origin" / "ab"[number % 2] / f"{number}.JPEG"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(256, size=(20 + number, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "JPEG")

    def prepare(source, folder, to, *options):
        words = ["prep", source, "--from", folder, "--to", to, "--no-shuffle", "--processes", "1", *options]
        words = ["--max-size=100" if word == "--max-size=0" else word for word in words]  # for smaller files
        assert run_command(make_parser(), argv=[str(word) for word in words]) == 0

    for bench in (augment, start, views):
        monkeypatch.setattr(bench, "prepare", prepare)
        monkeypatch.setattr(bench, "BATCH", COUNT)
    return tmp_path / "origin"


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")  # torchvision 0.29
@pytest.mark.parametrize(("bench", "contestants"), [(augment, 14), (views, 2 * len(views.CASES))])
def test_every_contestant_reads_every_image_in_each_round(bench, contestants, origin, monkeypatch):
    def count(contestants, rounds, peer):
        assert peer in contestants
        return [{"name": name, "images": contestant(rounds)} for name, contestant in contestants.items()]

    monkeypatch.setattr(augment, "ROUND", COUNT)
    monkeypatch.setattr(bench, "compare_loaders", count)
    rows = bench.run(Namespace(origin=origin, rounds=3))
    assert {row["images"] for row in rows} == {COUNT}
    assert len({row["name"] for row in rows}) == len(rows) == contestants


def test_an_image_that_timm_fails_to_change_is_changed_again():
    """As it does with Pillow 13: none is left out of what is timed."""
    errors = [ValueError(), ValueError()]

    def transform(image):
        if errors:
            raise errors.pop()
        return -image

    assert augment._apply(transform, 5) == -5


def test_starts_are_compared_with_the_first_and_each_of_a_round_has_a_cache_of_its_own(origin, monkeypatch):
    """The ratio is the median over rounds of the second start's CPU time, which is not the ratio of the medians."""
    first, second = [9.0, 5.0, 7.0], {"FFCV": [2.0, 8.0, 9.0], "ours": [1.0, 2.0, 6.0]}
    caches = []

    def begin(name, data, cache):
        assert open_beton(data / "train.beton").size.shape == (COUNT,)
        caches.append((name, cache))
        seconds = second[name] if caches.count((name, cache)) == 2 else first
        number = sum(each == name for each, _ in caches) - 1
        return start.Cost(10 * seconds[number // 2], seconds[number // 2])

    monkeypatch.setattr(start, "_start", begin)
    monkeypatch.setattr(start, "STARTS", dict.fromkeys(second))
    theirs, ours = start.run(Namespace(origin=origin, rounds=3))
    same = {"first_s": 70, "first_cpu_s": 7}
    assert theirs == {"name": "FFCV", **same, "second_s": 80, "second_cpu_s": 8, "ratio": 1}
    assert ours == {"name": "ours", **same, "second_s": 20, "second_cpu_s": 2, "ratio": 2}
    assert len({cache for _, cache in caches}) == 6


def test_a_start_costs_what_its_process_takes_in_an_environment_with_its_cache(tmp_path, monkeypatch):
    clock, used = [5.0], [7.0]

    def run(command, env, check):
        assert (command, check) == ([sys.executable, "-m", "widemix.bench.start", "ours", str(tmp_path)], True)
        assert env == os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        clock[0] += 3
        used[0] += 2

    monkeypatch.setattr(start, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(start, "children_cpu_seconds", lambda: used[0])
    monkeypatch.setattr(start, "subprocess", SimpleNamespace(run=run))
    assert start._start("ours", tmp_path, tmp_path / "cache") == (3, 2)
