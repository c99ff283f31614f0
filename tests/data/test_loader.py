"""Batches: the same images for every world size, thread count and restart; unreadable samples are named."""

import gc
import hashlib
import io
import os
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import transforms

import widemix.data.decode
from tests.data.plain_batches import CROP, FLIP, Numbers, stream_of, uniform
from tests.layouts import two_classes
from tests.sections import train_section
from widemix.data import images as images_module
from widemix.data import loader as loader_module
from widemix.data.augment import batch as augment_module
from widemix.data.batches import prefetch_count
from widemix.data.decode import Decoder, centre_boxes, padded_boxes, random_boxes
from widemix.data.loader import EvalLoader, TrainLoader, _warn_of_sorted_classes
from widemix.data.order import FileOrder, RandomOrder
from widemix.data.paged import PagedOrder
from widemix.data.prefetch import Prefetch
from widemix.data.split import open_split
from widemix.data.threads import run_on_threads
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection

BATCH = 16
TRAIN = train_section(BATCH, seed=7)
FULL = AugmentSection(
    auto_augment="rand-m9-mstd0.5-inc1",
    color_jitter=(0.4, 0.4, 0.4, 0.1),
    gaussian_blur_prob=0.3,
    re_prob=0.5,
    mixup=0.8,
    cutmix=1.0,
    mix_group=4,
    smoothing=0.1,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Seventy JPEGs of many sizes in two classes, prepared: 53 to train on, 17 to evaluate on."""
    source, target = tmp_path_factory.mktemp("jpegs"), tmp_path_factory.mktemp("prepared")
    two_classes(source)
    prepare("image-folder", source, target, PrepSettings())
    return target


def section(folder: Path, **changes) -> DataSection:
    return DataSection(path=str(folder), **{"num_classes": 2, "image_size": 24, "workers": 1, **changes})


def place(rank=0, world=1) -> Topology:
    """Each rank on a machine of its own."""
    return Topology(rank, world, 0, 1, torch.device("cpu"))


def training(
    folder, world=1, grad_accum_steps=1, first=0, epoch=1, augment=FULL, **changes
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every step of an epoch from `first` on: its micro-batches one after the other, each of all ranks together."""
    parts = []
    for rank in range(world):
        loader = TrainLoader(
            section(folder, **changes), augment, train_section(BATCH, grad_accum_steps, 7), place(rank, world)
        )
        with loader.batches(epoch, first) as batches:
            parts.append([(batch.inputs, batch.targets) for batch in batches])
    steps = []
    for step in range(len(parts[0]) // grad_accum_steps):
        numbers = range(step * grad_accum_steps, (step + 1) * grad_accum_steps)
        mine = [rank[number] for number in numbers for rank in parts]
        steps.append(tuple(torch.cat(tensors) for tensors in zip(*mine, strict=True)))
    return steps


def digest(steps) -> list[str]:
    return [hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest() for x, y in steps]


@pytest.mark.parametrize(
    "way",
    [
        {"world": 2},
        {"world": 4},
        {"grad_accum_steps": 2},
        {"world": 2, "grad_accum_steps": 2},
        {"workers": 2},
        {"workers": 3},
        {"prefetch_batches": 1},
        {"first": 1},
        {"world": 2, "workers": 2, "first": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "setting",
    [{}, {"order": "paged", "shuffle_window_mib": 1}, {"augment": FULL.model_copy(update={"aug_repeats": 3})}],
    ids=["random", "paged", "repeats"],
)
def test_the_images_do_not_depend_on_how_they_are_loaded(folder, setting, way):
    """Nor on the step from which an epoch is resumed."""
    expected = digest(training(folder, **setting))
    assert len(set(expected)) == 3
    assert digest(training(folder, **setting, **way)) == expected[way.get("first", 0) :]


@settings(max_examples=8)
@given(
    world=st.integers(2, 4),
    grad_accum_steps=st.integers(2, 3),
    group=st.sampled_from([2, 4]),
    order=st.sampled_from(["random", "paged"]),
)
def test_a_micro_batch_of_all_ranks_is_that_of_one_rank(folder, world, grad_accum_steps, group, order):
    """Mixed images, targets, samples and the keys of stochastic depth."""
    augment = AugmentSection(mixup=0.8, cutmix=1.0, mix_group=group, smoothing=0.1)
    batch = world * grad_accum_steps * group
    train = train_section(batch * max(1, 24 // batch), grad_accum_steps, 7)
    data = section(folder, order=order, shuffle_window_mib=1)
    found = {}
    for ranks in (1, world):
        loaders = [TrainLoader(data, augment, train, place(rank, ranks)) for rank in range(ranks)]
        found[ranks] = []
        for loader in loaders:
            with loader.batches(1) as batches:
                found[ranks].append(list(batches))
    assert len(found[1][0]) == 53 // train.global_batch * grad_accum_steps
    for one, *several in zip(*found[1], *found[world], strict=True):
        for name in ("inputs", "targets", "keys"):
            assert torch.equal(torch.cat([getattr(part, name) for part in several]), getattr(one, name)), name
        assert np.array_equal(np.concatenate([part.samples for part in several]), one.samples)


def test_views_of_a_sample_differ_and_the_first_is_the_one_that_it_always_is(folder):
    """The same epoch's crop, flip and policy without repeats, for the samples of its first views."""
    plain, repeated = (AugmentSection(auto_augment="3a", aug_repeats=repeats) for repeats in (0, 3))
    found = {}
    for name, augment in (("plain", plain), ("repeated", repeated)):
        with TrainLoader(section(folder), augment, TRAIN, place()).batches(1) as batches:
            found[name] = [
                (int(sample), inputs.numpy().tobytes())
                for batch in batches
                for sample, inputs in zip(batch.samples, batch.inputs, strict=True)
            ]
    views = {
        sample: {data for other, data in found["repeated"] if other == sample} for sample, _ in found["repeated"]
    }
    assert len(views) == 16
    assert all(len(seen) == 3 for seen in views.values())
    once = dict(found["plain"])
    assert len(once.keys() & views.keys()) > 8
    assert all(once[sample] in seen for sample, seen in views.items() if sample in once)


def test_auto_takes_pages_where_the_file_is_larger_than_the_stated_memory(folder):
    size = (folder / "train.beton").stat().st_size / 2**30
    for memory, kind in ((size * 1.01, RandomOrder), (size * 0.99, PagedOrder)):
        loader = TrainLoader(section(folder, order="auto", memory_gib=memory), FULL, TRAIN, place())
        assert isinstance(loader.order, kind)


@pytest.mark.parametrize(("mib", "ahead"), [(1, 1), (4, 1), (5, 2), (6, 2), (7, 3), (1024, 3)])
def test_batches_ahead_are_bounded_in_bytes(folder, mib, ahead):
    """A batch of 16 images of 224 pixels has 2.3 MiB."""
    loader = TrainLoader(section(folder, image_size=224, prefetch_mib=mib), FULL, TRAIN, place())
    with loader.batches(0) as batches:
        inside = next(batches).inputs.numel()  # as many bytes before they are made float32
        assert prefetch_count(loader.data, loader.source, loader.micro_batch_size) == ahead
    assert inside * ahead <= max(mib << 20, inside)


@pytest.mark.parametrize(
    ("order", "shuffle", "kind"),
    [
        ("random", True, RandomOrder),
        ("paged", True, PagedOrder),
        ("random", False, FileOrder),
        ("paged", False, FileOrder),
    ],
)
def test_an_order_has_the_batch_seed_and_repeats_of_the_recipe(folder, order, shuffle, kind):
    augment, train = AugmentSection(aug_repeats=3), train_section(24, seed=9)
    found = TrainLoader(section(folder, order=order), augment, train, place(), shuffle=shuffle).order
    assert type(found) is kind
    assert (found.count, found.seed, found.repeats) == (53, 9, 3)
    assert len(found.step(0, 0)) == 24
    assert len(set(found.step(0, 0) % 53)) < 24


def test_a_rank_asks_the_disk_for_what_it_reads_soon(folder, monkeypatch):
    """In the first step that it reads also for what it reads at once."""
    loader = TrainLoader(section(folder, order="paged"), AugmentSection(), train_section(BATCH, 2, 7), place(1, 2))
    asked, requested = [], []
    monkeypatch.setattr(loader.order, "prefetch_ranges", lambda *of: asked.append(of) or np.full((1, 2), len(asked)))
    monkeypatch.setattr(loader_module, "request_ranges", lambda file, of: requested.append((file, of.tolist())))
    with loader.batches(4, 1) as batches:
        assert len(list(batches)) == 4
    parts = [slice(4, 8), slice(12, 16)]
    assert asked == [(4, 1, True, parts), (4, 2, False, parts)]
    assert requested == [(loader.source.descriptor, [[number, number]]) for number in (1, 2)]


@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_batches_ahead_are_those_of_a_ranks_micro_batch(folder, kind, monkeypatch):
    """Of 4 images of 224 pixels, 0.57 MiB: three in 2 MiB, in which there is no room for the 16 of a step."""
    ahead = []

    class Counted(Prefetch):
        def __init__(self, source, count):
            ahead.append(count)
            super().__init__(source, count)

    monkeypatch.setattr(loader_module, "Prefetch", Counted)
    data = section(folder, image_size=224, prefetch_mib=2, prefetch_batches=9)
    if kind == "training":
        loader = TrainLoader(data, AugmentSection(), train_section(BATCH, 2, 7), place(1, 2))
        batches = loader.batches(0)
    else:
        batches = EvalLoader(data, 4, place(1, 2)).batches()
    with batches:
        assert ahead == [3]


def test_threads_are_those_asked_for_or_the_ranks_share(folder, monkeypatch):
    monkeypatch.setattr(images_module, "share_cpus", lambda topology: 10 + topology.rank)
    for workers, threads in ((3, 3), (40, 40), (0, 12)):
        assert EvalLoader(section(folder, workers=workers), 4, place(2, 4)).source.threads == threads


@pytest.mark.parametrize(("kind", "steps"), [("evaluation", 1), ("training", 3), ("views", 5)])
def test_each_step_of_a_batch_is_on_as_many_threads(folder, kind, steps, monkeypatch):
    """Decoding, and of each view a policy and colour jitter."""
    used = []

    def run(work, threads):
        used.append(threads)
        run_on_threads(work, threads)

    for module in (widemix.data.decode, augment_module):
        monkeypatch.setattr(module, "run_on_threads", run)
    data, augment = (
        section(folder, workers=3),
        AugmentSection(auto_augment="rand-m9-mstd0.5-inc1", color_jitter=(0.2,) * 4),
    )
    views = [(data, augment), (data.model_copy(update={"image_size": 16}), augment)] if kind == "views" else ()
    if kind == "evaluation":
        loader = EvalLoader(data, 4, place())
    else:
        loader = TrainLoader(data, AugmentSection() if views else augment, TRAIN, place(), views=views)
    loader.source.read(np.arange(4), np.arange(4), 0)
    assert used == [3] * steps


def test_epochs_differ(folder):
    assert digest(training(folder, epoch=0)) != digest(training(folder, epoch=1))


@pytest.mark.parametrize("world", [1, 2, 3, 20])
def test_evaluation_sees_every_sample_once(folder, world):
    seen = []
    for rank in range(world):
        with EvalLoader(section(folder), 4, place(rank, world)).batches() as batches:
            seen += [sample for batch in batches for sample in batch.samples]
    assert sorted(seen) == list(range(17))


def test_evaluation_of_some_samples_and_from_a_step_on(folder):
    """In their order, those of a rank in turns; ranks with fewer have as many batches, of which one is empty."""
    label = open_beton(folder / "val.beton").label
    numbers = np.array([16, 3, 5, 0, 9])
    for rank, first, expected in (
        (0, 0, [[16, 5], [9]]),
        (1, 0, [[3, 0], []]),
        (0, 1, [[9]]),
        (1, 1, [[]]),
        (0, 2, []),
    ):
        loader = EvalLoader(section(folder), 2, place(rank, 2), samples=numbers)
        assert len(loader) == 5
        with loader.batches(first) as batches:
            found = list(batches)
        assert [batch.samples.tolist() for batch in found] == expected
        assert [batch.targets.tolist() for batch in found] == [label[each].tolist() for each in expected]
        assert [batch.inputs.shape for batch in found] == [(len(each), 3, 24, 24) for each in expected]
    with EvalLoader(section(folder), 4, place(1, 3)).batches(1) as batches:
        assert [batch.samples.tolist() for batch in batches] == [[13, 16]]


def by_timm(monkeypatch, view_id, height, width, scale, ratio) -> list[int]:
    """timm's crop with the numbers of our stream, as [top, left, height, width]."""
    numbers: Any = Numbers(
        stream_of(1, 2, view_id, CROP),
        real=lambda reals, _: 4 * (reals // 2) + reals % 2,
        whole=lambda reals, wholes: 4 * (reals // 2 - 1) + 2 + wholes,
    )
    monkeypatch.setattr(transforms, "random", numbers)
    return list(
        transforms.RandomResizedCropAndInterpolation.get_params(Image.new("L", (width, height)), scale, ratio)
    )


def test_crops_of_long_images_are_timms(monkeypatch):
    """Most attempts fail there, and after ten the largest crop that the ratio allows is the image's centre."""
    sizes = [(30, 400), (400, 30), (17, 90), (90, 17), (31, 30), (200, 333), (5, 7)]
    height, width = np.array(sizes).T
    ids, scale, ratio = np.arange(60 * len(sizes)), (0.1, 1.0), (0.6, 1.25)
    boxes = random_boxes(ids, height, width, 1, 2, scale, ratio, 0.0)
    fallbacks = 0
    for view_id, box in zip(ids.tolist(), boxes.tolist(), strict=True):
        h, w = sizes[view_id % len(sizes)]
        assert box[:4] == by_timm(monkeypatch, view_id, h, w, scale, ratio), (view_id, h, w)
        fallbacks += (h, w) in sizes[:4] and (box[2] == h or box[3] == w)
    assert 100 < fallbacks < 200  # of 240: many of the others at a late attempt


def test_a_crop_has_at_least_one_pixel():
    """Of an image of 2 x 3 pixels and a scale that rounds to none; where no attempt gives any, the whole image."""
    boxes = random_boxes(np.arange(50), np.array([2]), np.array([3]), 1, 2, (0.01, 0.2), (0.3, 3.0), 0.0)
    assert boxes[:, 2:4].min() == 1
    none = random_boxes(np.arange(5), np.array([2]), np.array([3]), 1, 2, (0.001, 0.002), (0.5, 2.0), 0.0)
    assert none.tolist() == [[0, 0, 2, 3, 0]] * 5


def test_random_boxes_follow_torchvisions_law(folder):
    """Inside the image; area and aspect of accepted crops uniform and log-uniform over their ranges."""
    count = 20_000
    height, width = np.full(count, 300), np.full(count, 400)
    boxes = random_boxes(np.arange(count), height, width, 1, 2, (0.25, 0.5), (3 / 4, 4 / 3), 0.5)
    top, left, h, w, flip = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + h <= 300).all()
    assert (left + w <= 400).all()
    for found, low, high in ((h * w / 120_000, 0.25, 0.5), (np.log(w / h), np.log(3 / 4), np.log(4 / 3))):
        counts, _ = np.histogram(found, bins=10, range=(low, high))
        assert counts.sum() > 0.99 * count
        assert ((counts - count / 10) ** 2 / (count / 10)).sum() < 45  # rounding to whole pixels moves a few
    assert abs(flip.mean() - 0.5) < 0.02
    assert abs((top / (300 - h + 1)).mean() - 0.5) < 0.01


def test_crops_reach_both_ends_of_an_image_and_of_its_border():
    """Of an image of 9 x 12 pixels: squares of 8 in a border of 2, and those of half its area, of 7 pixels."""
    ids, height, width = np.arange(2000), np.array([9]), np.array([12])
    padded = padded_boxes(ids, height, width, 8, 2, 1, 2, 0.5)
    random = random_boxes(ids, height, width, 1, 2, (49 / 108, 49 / 108), (1.0, 1.0), 0.5)
    for boxes, side, border in ((padded, 8, 2), (random, 7, 0)):
        assert set(boxes[:, 2]) == set(boxes[:, 3]) == {side}
        assert set(boxes[:, 0]) == set(range(-border, 9 + border - side + 1))
        assert set(boxes[:, 1]) == set(range(-border, 12 + border - side + 1))


def test_a_image_too_wide_for_the_ratio_gives_its_centre():
    boxes = random_boxes(np.array([0]), np.array([10]), np.array([1000]), 0, 0, (1.0, 1.0), (3 / 4, 4 / 3), 0.0)
    assert boxes.tolist() == [[0, (1000 - 13) // 2, 10, 13, 0]]
    for height, width in ((100, 70), (70, 80)):  # and one that is not, all of it
        whole = random_boxes(np.array([0]), np.array([height]), np.array([width]), 0, 0, (1.0, 1.0), (0.6, 1.25), 0.0)
        assert whole.tolist() == [[0, 0, height, width, 0]]


def test_padded_boxes_are_uniform():
    count = 20_000
    sides = np.full(count, 32)
    top, left, height, width, flip = padded_boxes(np.arange(count), sides, sides, 32, 4, 1, 2, 0.5).T
    for found in (top, left):
        counts = np.bincount(found + 4, minlength=9)
        assert len(counts) == 9
        assert ((counts - count / 9) ** 2 / (count / 9)).sum() < 30
    assert (height == 32).all()
    assert (width == 32).all()
    assert abs(flip.mean() - 0.5) < 0.02


def test_each_view_has_a_padded_crop_and_a_flip_of_its_own():
    """By its id, of two images that differ in height and width."""
    height, width, ids = np.array([30, 9]), np.array([17, 40]), np.arange(7, 100)
    boxes = padded_boxes(ids, height, width, 10, 3, 5, 2, 0.3)
    for view_id, (top, left, *size, flip) in zip(ids.tolist(), boxes.tolist(), strict=True):
        stream, h, w = stream_of(5, 2, view_id, CROP), height[view_id % 2], width[view_id % 2]
        assert (top, left) == tuple(int(uniform(stream, k) * (n + 2 * 3 - 10 + 1)) - 3 for k, n in enumerate((h, w)))
        assert (size, flip) == ([10, 10], uniform(stream_of(5, 2, view_id, FLIP), 0) < 0.3)


def test_a_image_too_small_for_its_padded_crop_is_refused(folder):
    padded = AugmentSection(crop="padded", padding=1)
    with pytest.raises(InputError, match=r"augment.padding 1: .* image of 2\d pixels"):
        TrainLoader(section(folder, image_size=64), padded, TRAIN, place())


@pytest.mark.parametrize("border", [6, 7])
def test_the_padding_that_an_error_names_is_the_least_that_goes(folder, border):
    beton = open_beton(folder / "train.beton")
    side = int(min(beton.height.min(), beton.width.min())) + border
    fits, small = (AugmentSection(crop="padded", padding=-(-border // 2) - less) for less in (0, 1))
    with pytest.raises(InputError, match=f"take a padding of at least {fits.padding}$"):
        TrainLoader(section(folder, image_size=side), small, TRAIN, place())
    TrainLoader(section(folder, image_size=side), fits, TRAIN, place())
    TrainLoader(section(folder, image_size=side), AugmentSection(padding=0), TRAIN, place())  # without such crops


@pytest.mark.parametrize("way", ["height", "width"])
def test_the_smallest_side_of_any_image_decides_on_the_padding(folder, way, monkeypatch):
    beton = open_beton(folder / "train.beton")
    sizes = {"height": np.full(53, 40), "width": np.full(53, 40)}
    sizes[way][7] = 20
    monkeypatch.setattr(images_module, "open_split", lambda *_: replace(beton, **sizes))
    with pytest.raises(InputError, match=r"an image of 20 pixels, .* at least 2$"):
        TrainLoader(section(folder), AugmentSection(crop="padded", padding=1), TRAIN, place())
    TrainLoader(section(folder), AugmentSection(crop="padded", padding=2), TRAIN, place())


def test_centre_boxes_are_the_middle_square():
    boxes = centre_boxes(np.array([0, 1]), np.array([100, 40]), np.array([60, 80]), 0.5)
    assert boxes.tolist() == [[35, 15, 30, 30, 0], [10, 30, 20, 20, 0]]
    assert centre_boxes(np.array([0]), np.array([3]), np.array([4]), 0.3).tolist() == [[1, 1, 1, 1, 0]]
    assert centre_boxes(np.array([0]), np.array([9]), np.array([20]), 0.875).tolist() == [[1, 6, 7, 7, 0]]  # cut off


def test_a_image_that_does_not_decode_is_named(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    beton = open_beton(folder / "train.beton")
    with (broken / "train.beton").open("r+b") as file:
        file.seek(int(beton.offset[30]))
        file.write(bytes(64))
    with pytest.raises(InputError, match=r"sample 30 \(train/class1/007\.jpg\) cannot .*: its bytes differ from"):
        training(broken, world=1)
    with pytest.raises(InputError, match=r"sample 30 \(.*\) cannot be read: Not a JPEG file"):
        training(broken, world=1, checksums=False)


@pytest.fixture
def damaged(folder, tmp_path) -> Path:
    """The same folder; samples 11, 30 and 31 of train and 5 of val are no JPEGs any more."""
    shutil.copytree(folder, tmp_path / "damaged")
    for split, samples in (("train", (11, 30, 31)), ("val", (5,))):
        path = tmp_path / "damaged" / f"{split}.beton"
        beton = open_beton(path)
        with path.open("r+b") as file:
            for sample in samples:
                file.seek(int(beton.offset[sample]))
                file.write(bytes(64))
    return tmp_path / "damaged"


@pytest.mark.parametrize(
    "way", [{"world": 2}, {"world": 4, "workers": 2}, {"grad_accum_steps": 4}, {"first": 1}], ids=str
)
def test_replacements_do_not_depend_on_how_they_are_loaded(damaged, way, capsys):
    expected = digest(training(damaged, on_corrupt="replace"))
    assert digest(training(damaged, on_corrupt="replace", **way)) == expected[way.get("first", 0) :]
    assert "warning: " in capsys.readouterr().err


def test_replacements_are_counted_warned_of_and_change_no_other_image(folder, damaged, capsys):
    seen: dict[int, int] = {}
    for epoch in range(3):
        batches = []
        for data in (folder, damaged):
            loader = TrainLoader(section(data, on_corrupt="replace"), AugmentSection(), TRAIN, place())
            with loader.batches(epoch) as stream:
                batches.append(list(stream))
        for before, after in zip(*batches, strict=True):
            bad = np.isin(before.samples, (11, 30, 31))
            assert after.replaced == bad.sum() == (before.samples != after.samples).sum()
            assert torch.equal(before.inputs[~bad], after.inputs[~bad])
            assert not np.isin(after.samples, (11, 30, 31)).any()
            assert torch.equal(after.targets.argmax(1), torch.from_numpy(loader.source.file.label[after.samples]))
            seen |= zip(before.samples[bad].tolist(), after.samples[bad].tolist(), strict=True)
    warnings = capsys.readouterr().err
    assert set(seen) == {11, 30, 31}
    for sample, other in seen.items():
        assert re.search(rf"sample {sample} \(.*\) cannot be read: its bytes differ from its checksum", warnings)
        assert f"replaced by sample {other}" in warnings


def test_each_view_of_a_damaged_sample_is_that_view_of_the_sample_that_replaces_it(damaged, capsys):
    """With its crop, its flip and its augmentation, and not those of the first view, nor of the damaged one."""
    source = TrainLoader(section(damaged, on_corrupt="replace"), FULL, TRAIN, place()).source
    count = len(source.file)
    views = 11 + count * np.arange(3)
    images, read = source.read(views, views, 0)
    assert (read // count).tolist() == [0, 1, 2]
    assert not np.isin(read % count, (11, 30, 31)).any()
    assert torch.equal(images, source.read(read, read, 0)[0])
    assert capsys.readouterr().err.count("train.beton: sample 11 (train/") == 3


def test_what_replaces_a_sample_follows_from_seed_epoch_and_view(damaged):
    """The first of the stream's samples that can be read."""
    source = TrainLoader(section(damaged, on_corrupt="replace"), AugmentSection(), TRAIN, place()).source
    views = np.array([11, 30, 11 + 53])
    for epoch in range(4):
        expected = []
        for view in views.tolist():
            stream = stream_of(7, epoch, view, 11)
            samples = [int(53 * uniform(stream, attempt)) for attempt in range(10)]
            expected.append(next(sample for sample in samples if sample not in (11, 30, 31)))
        assert (source.read(views, views, epoch)[1] % 53).tolist() == expected


def test_each_attempt_to_replace_a_sample_tries_another_one(damaged, monkeypatch):
    """As many as it says, and the first that can be read is taken."""
    source = TrainLoader(section(damaged, on_corrupt="replace"), AugmentSection(), TRAIN, place()).source
    read, tried, readable = source.decoder.try_read, [], []

    def try_read(samples, *others, **keys):
        if len(samples) > 1:
            return read(samples, *others, **keys)
        tried.append(int(samples[0]))
        return {} if tried[-1] in readable else {0: "no luck"}

    monkeypatch.setattr(source.decoder, "try_read", try_read)
    view_ids = np.array([3, 11])
    with pytest.raises(InputError, match=r"sample 11 .*; 10 other samples that could replace it cannot be read"):
        source.read(view_ids, view_ids, 0)
    assert len(tried) == 10
    assert len(set(tried)) >= 8  # of 53, by chance
    readable.append(tried[4])
    tried.clear()
    assert source.read(view_ids, view_ids, 0)[1].tolist() == [3, readable[0]]
    assert len(tried) == 5


def test_a_damaged_image_is_never_left_out_of_evaluation(damaged):
    with (
        pytest.raises(InputError, match=r"val\.beton: sample 5 \(val/.*\) cannot be read"),
        EvalLoader(section(damaged, on_corrupt="replace"), 4, place()).batches() as batches,
    ):
        list(batches)


@pytest.mark.parametrize("raw", [False, True])
def test_checksums_are_compared_without_compiled_code_too(tmp_path, raw, monkeypatch):
    """Also those of the table of segments, and of pixels that no crop shows."""
    two_classes(tmp_path / "jpegs")
    prepare("image-folder", tmp_path / "jpegs", tmp_path / "data", PrepSettings(raw=raw, splits="val"), processes=1)
    path = tmp_path / "data/val.beton"
    beton = open_beton(path)
    data = np.memmap(path, np.uint8, "r+")
    data[beton.offset[5] + beton.size[5] - 1 if raw else beton.segments[5]] ^= 4
    monkeypatch.setattr(widemix.data.decode, "_compiled_reader", lambda: None)
    loader = EvalLoader(section(tmp_path / "data", crop_pct=0.5), 17, place())
    images, boxes = np.empty((17, 24, 24, 3), np.uint8), loader.source.boxes(np.arange(17), 0)
    found = loader.source.decoder.try_read(np.arange(17), boxes, np.zeros(17), images, 2)
    assert found == {5: "its bytes differ from its checksum"}


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "random"])
def test_evaluation_shows_pillows_centre_crop(folder, interpolation):
    """`random` means bicubic in evaluation."""
    chosen = section(folder, interpolation=interpolation, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    loader = EvalLoader(chosen, 17, place())
    with loader.batches() as batches:
        (batch,) = batches
    beton = loader.source.file
    boxes = centre_boxes(batch.samples, beton.height, beton.width, chosen.crop_pct)
    kernel = Image.Resampling.BILINEAR if interpolation == "bilinear" else Image.Resampling.BICUBIC
    for sample, found, (top, left, height, width, _) in zip(batch.samples, batch.inputs, boxes, strict=True):
        data = beton.bytes[beton.offset[sample] :][: beton.size[sample]]
        crop = Image.open(io.BytesIO(data)).crop((left, top, left + width, top + height))
        expected = torch.from_numpy(np.asarray(crop.resize((24, 24), kernel)).copy()).permute(2, 0, 1)
        assert torch.equal((255 * found).round().to(torch.uint8), expected)


def test_early_exits_leave_no_thread_and_no_memory(folder):
    """Half of them closed, half dropped as they are, most with the queue full and a batch in hand."""
    loader = TrainLoader(section(folder, image_size=64, workers=2), AugmentSection(), TRAIN, place())
    process = psutil.Process()
    for number in range(400):
        if number == 100:  # the decoding threads and their scratch are there to stay
            threads, memory = threading.active_count(), process.memory_info().rss
        batches = loader.batches(number)
        next(batches)
        if number % 2:
            batches.__exit__()
        del batches
    deadline = time.monotonic() + 300
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread of a dropped iterator checks its flag ten times a second
    assert threading.active_count() <= threads
    assert process.memory_info().rss - memory < 10 * 2**20


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.999])
def test_a_cut_file_is_refused_at_open(folder, tmp_path, keep):
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    path = cut / "train.beton"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(int(size * keep))
    with pytest.raises(InputError, match=f"has {int(size * keep)} bytes, the manifest says {size}"):
        training(cut)


def test_wrong_folders_splits_and_classes_are_refused(folder, tmp_path):
    for wrong, words in (
        (section(tmp_path / "nowhere"), "no such folder"),
        (section(tmp_path), "has no manifest.json"),
        (section(folder, train_split="trian"), "no split 'trian'; it has train, val"),
        (section(folder).model_copy(update={"num_classes": 1}), "has 2 classes"),
    ):
        with pytest.raises(InputError, match=words):
            TrainLoader(wrong, FULL, TRAIN, place())
    with pytest.raises(InputError, match="exceeds the 53 samples"):
        TrainLoader(section(folder), FULL, train_section(64, seed=7), place())


@pytest.mark.parametrize("order", ["paged", "auto"])
def test_pages_are_dealt_in_whole_batches_only(folder, order):
    data, plain = section(folder, order=order, memory_gib=1e-6), AugmentSection()
    with pytest.raises(InputError, match=r"drop_last False: data\.order paged deals whole batches only"):
        TrainLoader(data, plain, TRAIN, place(), drop_last=False)
    assert TrainLoader(data, plain, TRAIN, place(), drop_last=False, shuffle=False).steps == 4


def test_rank_0_is_told_of_classes_that_pages_do_not_mix(folder, digits, capsys):
    words = "is stored class by class, which order paged mixes badly; prepare it with --shuffle"
    for data, rank, order, told in (
        (folder, 0, "paged", True),
        (folder, 2, "paged", False),  # the first of its node
        (folder, 0, "random", False),
        (digits, 0, "paged", False),
    ):
        topology = Topology(rank, 4, rank % 2, 2, torch.device("cpu"))
        TrainLoader(section(data, order=order, num_classes=10), AugmentSection(), TRAIN, topology)
        warnings = capsys.readouterr().err
        assert warnings == (f"warning: {data}/train.beton: {words}\n" if told else "")


@pytest.mark.parametrize(
    ("labels", "told"),
    [([0, 0, 1, 1], True), ([0, 1], True), ([0, 1, 0, 1], False), ([1, 1, 1], False), ([1, 0], False), ([3], False)],
)
def test_labels_that_only_rise_are_class_by_class(folder, labels, told, capsys):
    _warn_of_sorted_classes(replace(open_beton(folder / "val.beton"), label=np.array(labels)))
    assert ("class by class" in capsys.readouterr().err) == told


def test_samples_without_a_class_are_refused(folder, tmp_path):
    """As FFCV's files may have some, with the label -1, which manifests do not count."""
    beton, manifest = open_beton(folder / "val.beton"), read_manifest(folder)
    label = beton.label.copy()
    counts = list(manifest.splits["val"].per_class)
    counts[label[4]] -= 1
    label[4] = -1
    splits = manifest.splits | {"val": manifest.splits["val"].model_copy(update={"per_class": tuple(counts)})}
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "manifest.json").write_text(manifest_json(manifest.model_copy(update={"splits": splits})))
    for data, words in (
        (other, "labels reach 1, data.num_classes is 2"),
        (folder, rf"holds \d+ samples of class {beton.label[4]}, the manifest says \d+"),
    ):
        with pytest.raises(InputError, match=rf"val\.beton: {words}"):
            open_split(section(data), "val", lambda path: replace(open_beton(path), label=label))


def test_more_classes_than_the_folder_has_are_no_error(folder):
    assert TrainLoader(section(folder, num_classes=3), FULL, TRAIN, place()).steps == 3


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_changes_between_its_check_and_its_reading_is_refused(folder, tmp_path, change):
    path = Path(shutil.copy(folder / "val.beton", tmp_path))
    beton, descriptors = open_beton(path), len(os.listdir("/proc/self/fd"))
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(InputError, match=r"val\.beton: was changed while it was opened"):
        Decoder(beton)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
