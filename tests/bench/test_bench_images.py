"""The benchmarks of training images, of views and of starts: every contestant reads every image, and their rows."""

import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.bench.conftest import Clock, Processes
from tests.conftest import ROOT, System
from widemix.bench import augment, start, views
from widemix.bench.sample import jpegs, link_repeatedly, prepare
from widemix.data.decode import random_boxes
from widemix.data.loader import TrainLoader
from widemix.distributed.topology import Topology
from widemix.errors import RunError
from widemix.formats.beton import open_beton
from widemix.recipe import load_recipe
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD, DataSection
from widemix.recipe.sections import TrainSection

RECIPE = load_recipe(ROOT / "recipes/imagenet/mixer_b16.yaml").augment


def is_on_one_cpu(loader: TrainLoader, batch: int) -> bool:
    """Whether it reads all of ImageNet's classes on one thread, as the only rank, in batches of so many."""
    data, rank = loader.data, loader.topology
    alone = (rank.rank, rank.world, rank.local_rank, rank.local_world, rank.device.type)
    return (data.workers, data.num_classes, loader.train.global_batch, *alone) == (1, 1000, batch, 0, 1, 0, 1, "cpu")


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")  # torchvision 0.29
@pytest.mark.parametrize(("bench", "rows"), [(augment, 14), (views, 2 * len(views.CASES))])
def test_every_contestant_reads_every_image_in_each_round(
    bench, rows, images, processes, system, monkeypatch, tmp_path
):
    """By a CPU time that goes on by a second each time that it is read; the first row is the peer."""
    seconds = [0.0]

    def advance() -> float:
        seconds[0] += 1
        return seconds[0]

    monkeypatch.setattr(augment, "ROUND", 5)
    monkeypatch.setattr(bench, "BATCH", 5)
    link_repeatedly(jpegs(images), tmp_path, 5)
    system({"time.process_time": advance, "torch.set_num_threads": lambda number: None})
    found = bench.run(Namespace(origin=tmp_path, rounds=1))
    assert len({row["name"] for row in found}) == len(found) == rows
    assert {(row["images_per_cpu_s"], row["ratio"]) for row in found} == {(5, 1)}
    assert bench is views or found[0]["name"] == "timm + Pillow, original files"


@pytest.mark.parametrize(("number", "count"), [(4, 500), (167, 334), (501, 501)])
def test_a_round_has_whole_epochs_and_about_500_images(tmp_path, system: System, number, count):
    linked = []

    def failed(command, **_):
        linked.append(len(jpegs(Path(command[command.index("--from") + 1]))))
        return SimpleNamespace(returncode=1, stderr="enough")

    for at in range(number):
        (tmp_path / f"{at}.JPEG").touch()
    system({"subprocess.run": failed, "torch.set_num_threads": linked.append})
    with pytest.raises(RunError, match="enough"):
        augment.run(Namespace(origin=tmp_path, rounds=3))
    assert linked == [1, count]


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
def test_training_images_are_read_and_changed_as_the_rows_say(images, processes: Processes, reads, system, tmp_path):
    """The policy and the erasing are those of the full recipe."""
    files, options = link_repeatedly(jpegs(images), tmp_path / "images", 25), {}
    given, fromarray = [], Image.fromarray
    system({"PIL.Image.fromarray": lambda pixels: given.append(pixels.shape) or fromarray(pixels)})
    for name, contestant in augment.contestants(files, tmp_path / "images", tmp_path).items():
        reads.clear()
        if name.startswith("ours"):
            [loader] = contestant.loaders
            assert is_on_one_cpu(loader, 25)
            assert (loader.data.image_size, loader.data.interpolation) == (224, "bilinear")
            without = "crop and flip alone" in name, "without policy" in name
            section = loader.augment
            assert section.auto_augment == (None if any(without) else RECIPE.auto_augment)
            assert section.re_prob == (0 if without[0] else RECIPE.re_prob)
            assert (section.re_mode, section.mixup, section.cutmix) == ("pixel", 0, 0)
            stored = name.partition(", ")[2].partition(", ")[0]
            options[stored] = processes.prepared[Path(loader.data.path)]
        elif "decoding" in name:
            given.clear()
            assert contestant(7) == 25
            assert given == [(224, 224, 3)] * 25 * ("policy" in name)
            [(samples, boxes, cubic, pixels, threads)] = reads
            assert (sorted(samples), cubic.any(), threads) == ([*range(25)], False, 1)
            beton = open_beton(tmp_path / "original/train.beton")
            expected = random_boxes(
                samples, beton.height, beton.width, 0, 7, RECIPE.scale, RECIPE.ratio, RECIPE.hflip
            )
            if name.startswith("entropy"):
                ones = np.ones(25, np.int64)
                expected = np.stack([beton.height - 1, beton.width - 1, ones, ones, 0 * ones], axis=1)
            np.testing.assert_array_equal(boxes, expected)
            assert pixels.shape == ((25, 1, 1, 3) if name.startswith("entropy") else (25, 224, 224, 3))
    assert options == {
        "original bytes": ("--max-size=0", "--no-restart-markers"),
        "restart markers": ("--max-size=0",),
        "coefficients": ("--max-size=0", "--encoding=coefficients"),
        "prepared with --max-size 400": ("--max-size=400",),
    }


def test_an_image_that_timm_fails_to_change_is_changed_again():
    """As it does with Pillow 13: none is left out of what is timed."""
    errors = [ValueError(), ValueError()]

    def transform(image):
        if errors:
            raise errors.pop()
        return -image

    assert augment.apply(transform, 5) == -5


def test_timm_and_torchvision_change_images_as_the_full_recipe():
    """torchvision has no policy whose magnitude varies, nor erasing with noise."""
    timms, theirs = augment.timm_transform().transforms, augment.torchvision_transform().transforms
    assert [type(step).__name__ for step in timms[2::2]] == ["RandAugment", "Normalize"]
    assert [type(step).__name__ for step in theirs[2::2]] == ["RandAugment", "Normalize"]
    for crop, flip, *_, normalise, erase in (timms, theirs):
        assert (*crop.size, *crop.scale, *crop.ratio) == pytest.approx((224, 224, *RECIPE.scale, *RECIPE.ratio), 1e-4)
        assert flip.p == RECIPE.hflip
        assert [*map(float, (*normalise.mean, *normalise.std))] == pytest.approx([*IMAGENET_MEAN, *IMAGENET_STD])
        assert (erase.probability if hasattr(erase, "probability") else erase.p) == RECIPE.re_prob
    assert (timms[0].interpolation.value, theirs[0].antialias) == ("bilinear", True)
    assert (theirs[2].num_ops, theirs[2].magnitude) == (timms[2].num_layers, timms[2].ops[0].magnitude) == (2, 9)
    assert (timms[2].ops[0].magnitude_std, timms[-1].mode, theirs[3].scale) == (0.5, RECIPE.re_mode, True)
    assert "PosterizeIncreasing" in repr(timms[2])


JITTER = {"color_jitter": (0.4, 0.4, 0.2, 0.1), "color_jitter_prob": 0.8, "grayscale_prob": 0.2}
BLURS = [(1.0, 0.0), (0.1, 0.2), *[(0.5, 0.0)] * 8]  # and what is solarised
DINO = [JITTER | {"gaussian_blur_prob": blur, "solarize_prob": solarised} for blur, solarised in BLURS]


@pytest.mark.parametrize("case", views.CASES)
def test_views_are_those_of_the_rows(case, images, processes, tmp_path):
    """DINO's augmentation is that of its `main_dino.py`."""
    link_repeatedly(jpegs(images), tmp_path / "images", 32)
    prepare("image-folder", tmp_path / "images", tmp_path / "data")
    sides = [int(side) for number, side in re.findall(r"(\d+) of (\d+)", case) for _ in range(int(number))]
    scales = {224: (0.4, 1.0), 96: (0.05, 0.4)} if 96 in sides else {224: (0.08, 1.0)}
    options = DINO if case.startswith("DINO") else [{}] * len(sides)
    expected = [AugmentSection(scale=scales[side], **own) for side, own in zip(sides, options, strict=True)]
    (separate, several), (together, one) = views.contestants(case, tmp_path / "data").items()
    assert (separate, together) == (f"{case}; a loader for each view", f"{case}; one loader")
    [loader] = one.loaders
    made = [(view.section, view.augment) for view in loader.source.views]
    assert made == [(each.data, each.augment) for each in several.loaders]
    assert [(data.image_size, section) for data, section in made] == [*zip(sides, expected, strict=True)]
    assert all(
        is_on_one_cpu(each, 32) and each.data.path == str(tmp_path / "data") for each in (loader, *several.loaders)
    )


@pytest.mark.parametrize(("number", "count"), [(12, 50), (70, 70)])
def test_starts_are_compared_with_the_first(
    number, count, images, processes: Processes, clock: Clock, system, tmp_path
):
    """Each of a round has a cache of its own, in its environment, and reads a batch of images that were not changed.

    The ratio is the median over rounds of the second start's CPU time, which is not the ratio of the medians.
    """
    first, theirs, ours = [9.0, 5.0, 7.0], [2.0, 8.0, 9.0], [1.0, 2.0, 6.0]
    names = list(start.STARTS)
    second, caches, used = dict(zip(names, (theirs, ours, ours), strict=True)), [], [0.0]

    def begin(command, env, check):
        name, data = command[3:]
        assert (command[:3], check) == ([sys.executable, "-m", "widemix.bench.start"], True)
        assert open_beton(Path(data) / "train.beton").size.shape == (count,)
        assert env == os.environ | {"XDG_CACHE_HOME": env["XDG_CACHE_HOME"]}
        caches.append((name, env["XDG_CACHE_HOME"]))
        seconds = second[name] if caches.count(caches[-1]) == 2 else first
        used[0] += seconds[(sum(each == name for each, _ in caches) - 1) // 2]
        clock.takes(10 * seconds[(sum(each == name for each, _ in caches) - 1) // 2])

    processes.other = begin
    system({"os.times": lambda: SimpleNamespace(children_user=used[0], children_system=0.0)})
    origin = tmp_path / "origin"
    link_repeatedly(jpegs(images), origin, number)
    rows = start.run(Namespace(origin=origin, rounds=3))
    same = {"first_s": 70, "first_cpu_s": 7}
    assert rows[0] == {"name": names[0], **same, "second_s": 80, "second_cpu_s": 8, "ratio": 1}
    assert rows[1:] == [{"name": name, **same, "second_s": 20, "second_cpu_s": 2, "ratio": 2} for name in names[1:]]
    assert names[0].startswith("FFCV")
    assert len({cache for _, cache in caches}) == 9
    assert list(processes.prepared.values()) == [("--max-size=0",)]


@pytest.mark.parametrize("name", [name for name in start.STARTS if name.startswith("ours")])
def test_our_starts_read_the_batch_that_their_rows_say(name, images, processes, tmp_path):
    """Of one rank on one thread; the policy and the erasing are those of the full recipe."""
    link_repeatedly(jpegs(images), tmp_path / "images", 60)
    prepare("image-folder", tmp_path / "images", tmp_path / "data")
    policy = (RECIPE.auto_augment, RECIPE.re_prob) if "RandAugment and erasing" in name else (None, 0)
    data = DataSection(path=str(tmp_path / "data"), num_classes=1000, image_size=224, workers=1)
    section = AugmentSection(auto_augment=policy[0], re_prob=policy[1])
    loader = TrainLoader(
        data, section, TrainSection(epochs=1, global_batch=50), Topology(0, 1, 0, 1, torch.device("cpu"))
    )
    with loader.batches(0) as batches:
        expected = next(batches)
    found = start.STARTS[name](tmp_path / "data")
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.targets, expected.targets)
