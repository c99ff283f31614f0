"""The benchmarks of training images, of views and of starts: every contestant reads every image, and their rows."""

import os
import re
import sys
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from tests.conftest import ROOT
from widemix.bench import augment, start, views
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.data.decode import random_boxes
from widemix.formats.beton import open_beton
from widemix.recipe import load_recipe
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD

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


class Loader:
    """In place of the training loader: keeps in `used` what it is made of where an epoch is read, 25 and 3 images."""

    used: ClassVar[list[tuple]] = []

    def __init__(self, *given, views=()):
        self.given = (*given, tuple(views))

    @contextmanager
    def batches(self, epoch):
        self.used.append((epoch, *self.given))
        yield iter([range(25), range(3)])


@pytest.fixture
def used(monkeypatch):
    """What the loaders that were read are made of: (epoch, data, augment, train, topology, views)."""
    monkeypatch.setattr(Loader, "used", [])
    for bench in (augment, views):
        monkeypatch.setattr(bench, "TrainLoader", Loader)
    monkeypatch.setattr("widemix.data.loader.TrainLoader", Loader)
    return Loader.used


@pytest.fixture
def prepared(monkeypatch):
    """What is asked of `widemix prep`, by folder."""
    found = {}
    for bench in (augment, start, views):
        monkeypatch.setattr(
            bench, "prepare", lambda source, origin, to, *options: found.update({to: (source, origin, *options)})
        )
    return found


def on_one_cpu(data, train, topology, batch):
    """Whether a loader reads all of ImageNet's classes on one thread, as the only rank, in batches of so many."""
    alone = (topology.rank, topology.world, topology.local_rank, topology.local_world, topology.device.type)
    return (data.workers, data.num_classes, train.global_batch, *alone) == (1, 1000, batch, 0, 1, 0, 1, "cpu")


def test_training_images_are_read_and_changed_as_the_rows_say(used, prepared, monkeypatch, tmp_path):
    """The policy and the erasing are those of the full recipe."""
    reads, beton = [], SimpleNamespace(height=np.array([300, 40, 500]), width=np.array([200, 80, 400]))
    beton = type("Beton", (SimpleNamespace,), {"__len__": lambda self: 3})(**vars(beton))
    decoder = SimpleNamespace(read=lambda *given, threads: reads.append((*given, threads)))
    monkeypatch.setattr(augment, "open_split", lambda data, *_: reads.append(data) or beton)
    monkeypatch.setattr(augment, "Decoder", lambda given: decoder)
    monkeypatch.setattr(augment, "_apply", lambda step, image: reads.append(step) or image)
    contestants = augment._contestants([], tmp_path / "images", tmp_path)
    opened = [(Path(reads.pop(0).path), name) for name in list(contestants) if "decoding" in name]
    recipe = load_recipe(ROOT / "recipes/imagenet/mixer_b16.yaml").augment
    options = {}
    for name, contestant in contestants.items():
        if name.startswith("ours"):
            assert contestant(7) == 28
            epoch, data, section, train, topology, others = used.pop()
            assert (epoch, data.image_size, data.interpolation, others) == (7, 224, "bilinear", ())
            assert on_one_cpu(data, train, topology, 25)
            without = "crop and flip alone" in name, "without policy" in name
            assert section.auto_augment == (None if any(without) else recipe.auto_augment)
            assert section.re_prob == (0 if without[0] else recipe.re_prob)
            assert (section.re_mode, section.mixup, section.cutmix) == ("pixel", 0, 0)
            options[name.partition(", ")[2].partition(", ")[0]] = prepared[Path(data.path)]
    whole = ("image-folder", tmp_path / "images", "--max-size=0")
    original = (*whole, "--no-restart-markers")
    assert options == {
        "original bytes": original,
        "restart markers": whole,
        "coefficients": (*whole, "--encoding=coefficients"),
        "prepared with --max-size 400": ("image-folder", tmp_path / "images", "--max-size=400"),
    }
    ones, boxes = np.ones(3, np.int64), (recipe.scale, recipe.ratio, recipe.hflip)
    crops = random_boxes(np.arange(3), beton.height, beton.width, 0, 7, *boxes)
    last = np.stack([beton.height - 1, beton.width - 1, ones, ones, 0 * ones], axis=1)
    for folder, name in opened:
        assert prepared[folder] == original
        assert contestants[name](7) == 3
        samples, found, cubic, images, threads = reads.pop(0)
        assert (samples.tolist(), cubic.any(), threads) == ([0, 1, 2], False, 1)
        pixels = (1, 1) if name.startswith("entropy") else (224, 224)
        assert images.shape == (3, *pixels, 3)
        np.testing.assert_array_equal(found, last if pixels == (1, 1) else crops)
        if "timm's policy" in name:
            steps = [reads.pop(0) for _ in range(len(reads))]
            assert [repr(step) for step in steps] == 3 * [
                repr(step) for step in augment._timm_transform().transforms[2:]
            ]
    assert reads == []


def test_timm_and_torchvision_change_images_as_the_full_recipe(monkeypatch):
    """torchvision has no policy whose magnitude varies, nor erasing with noise."""
    recipe, theirs = load_recipe(ROOT / "recipes/imagenet/mixer_b16.yaml").augment, []
    monkeypatch.setattr(v2, "Compose", theirs.extend)
    augment._torchvision([])
    timms = augment._timm_transform().transforms
    assert [type(step).__name__ for step in timms[2::2]] == ["RandAugment", "Normalize"]
    assert [type(step).__name__ for step in theirs[2::2]] == ["RandAugment", "Normalize"]
    for crop, flip, *_, normalise, erase in (timms, theirs):
        assert (*crop.size, *crop.scale, *crop.ratio) == pytest.approx((224, 224, *recipe.scale, *recipe.ratio), 1e-4)
        assert flip.p == recipe.hflip
        assert [*map(float, (*normalise.mean, *normalise.std))] == pytest.approx([*IMAGENET_MEAN, *IMAGENET_STD])
        assert (erase.p if erase in theirs else erase.probability) == recipe.re_prob
    assert timms[0].interpolation.value == "bilinear"
    assert theirs[0].antialias
    assert (theirs[2].num_ops, theirs[2].magnitude) == (timms[2].num_layers, timms[2].ops[0].magnitude) == (2, 9)
    assert (timms[2].ops[0].magnitude_std, timms[-1].mode, theirs[3].scale) == (0.5, recipe.re_mode, True)
    assert "PosterizeIncreasing" in repr(timms[2])


def test_a_round_has_whole_epochs_of_all_images_and_of_at_least_500(monkeypatch):
    counts = []
    monkeypatch.setattr(augment, "jpegs", lambda number: [Path("a.JPEG")] * number)
    monkeypatch.setattr(augment, "link_repeatedly", lambda files, folder, count: files[:1] * count)
    monkeypatch.setattr(augment, "_contestants", lambda files, images, folder: counts.append(len(files)))
    monkeypatch.setattr(augment, "compare_loaders", lambda contestants, rounds, peer: [rounds, peer])
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    for number in (4, 167, 501):
        assert augment.run(Namespace(origin=number, rounds=3)) == [3, "timm + Pillow, original files"]
    assert counts == [1, 500, 1, 334, 1, 501]


def test_views_are_those_of_the_rows(used, prepared, monkeypatch):
    """DINO's augmentation is that of its `main_dino.py`."""
    called, links, threads = [], [], []

    def compare(contestants, rounds, peer):
        called.append((list(contestants), rounds, peer, {name: each(5) for name, each in contestants.items()}))
        return [{"name": name} for name in contestants]

    monkeypatch.setattr(views, "compare_loaders", compare)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(views, "jpegs", lambda origin: origin)
    monkeypatch.setattr(views, "link_repeatedly", lambda *given: links.append(given))
    rows = views.run(Namespace(origin=[Path("a.JPEG")] * COUNT, rounds=3))
    [(files, images, count)] = links
    assert (len(files), count, threads) == (COUNT, 32, [1])  # a batch
    [(folder, options)] = prepared.items()
    assert options == ("image-folder", images, "--max-size=0")
    jitter = {"color_jitter": (0.4, 0.4, 0.2, 0.1), "color_jitter_prob": 0.8, "grayscale_prob": 0.2}
    blurs = [(1.0, 0.0), (0.1, 0.2), *[(0.5, 0.0)] * 8]  # and what is solarised
    dino = [jitter | {"gaussian_blur_prob": blur, "solarize_prob": solarised} for blur, solarised in blurs]
    for names, rounds, peer, counts in called:
        assert rounds == 3
        assert [row["name"] for row in rows][: len(names)] == names
        del rows[: len(names)]
        case, _, way = peer.partition(";")
        assert (way, counts) == (" a loader for each view", {peer: 28, f"{case}; one loader": 28})
        sides = [int(side) for number, side in re.findall(r"(\d+) of (\d+)", case) for _ in range(int(number))]
        scales = {224: (0.4, 1.0), 96: (0.05, 0.4)} if 96 in sides else {224: (0.08, 1.0)}
        options = dino if case.startswith("DINO") else [{}] * len(sides)
        expected = [AugmentSection(scale=scales[side], **own) for side, own in zip(sides, options, strict=True)]
        separate, together = used[: len(sides)], used[len(sides)]
        assert [(data.image_size, section) for _, data, section, *_ in separate] == [
            *zip(sides, expected, strict=True)
        ]
        assert together[-1] == tuple((data, section) for _, data, section, *_ in separate)
        assert together[1:3] == separate[0][1:3]
        for epoch, data, _, train, topology, _ in used[: len(sides) + 1]:
            assert (epoch, data.path) == (5, str(folder))
            assert on_one_cpu(data, train, topology, 32)
        del used[: len(sides) + 1]
    assert len(called) == 3
    assert rows == used == []


def test_our_starts_read_a_batch_of_what_their_rows_say(used, tmp_path):
    """The policy and the erasing are those of the full recipe."""
    recipe = load_recipe(ROOT / "recipes/imagenet/mixer_b16.yaml").augment
    for name, begin in start.STARTS.items():
        if name.startswith("ours"):
            begin(tmp_path)
            epoch, data, section, train, topology, _ = used.pop()
            assert (epoch, data.path, data.image_size) == (0, str(tmp_path), 224)
            assert on_one_cpu(data, train, topology, 50)
            expected = (recipe.auto_augment, recipe.re_prob) if "RandAugment and erasing" in name else (None, 0)
            assert (section.auto_augment, section.re_prob) == expected


def test_starts_read_a_whole_batch_of_unchanged_images(prepared, monkeypatch):
    counts = []
    monkeypatch.setattr(start, "jpegs", lambda number: [Path("a.JPEG")] * number)
    monkeypatch.setattr(start, "link_repeatedly", lambda files, folder, count: counts.append((folder.name, count)))
    monkeypatch.setattr(start, "_start", lambda name, data, cache: start.Cost(1.0, 1.0))
    for number in (4, 70):
        rows = start.run(Namespace(origin=number, rounds=1))
        assert [row["name"] for row in rows] == list(start.STARTS)
    assert counts == [("images", 50), ("images", 70)]
    assert next(iter(start.STARTS)).startswith("FFCV")  # with which all are compared
    for folder, (source, origin, *options) in prepared.items():
        assert (folder.name, source, origin.name, options) == ("data", "image-folder", "images", ["--max-size=0"])
