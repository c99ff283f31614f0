"""Batches: the same pictures for every world, thread count and restart, and the pixels FFCV itself would give."""

import hashlib
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional

from data_prep.beton import RAW, open_beton
from data_prep.picture import Encoded
from data_prep.prepare import prepare
from data_prep.settings import PrepSettings
from data_prep.write import BetonWriter
from pipeline.data.decode import centre_boxes, decode, padded_boxes, random_boxes
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.data.order import RandomOrder
from pipeline.data.paged import PagedOrder
from pipeline.errors import InputError
from pipeline.recipe.augment import AugmentSection
from pipeline.recipe.data import DataSection
from pipeline.topology import Topology

BATCH = 16
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
    numbers = np.random.RandomState(0)
    for i in range(70):
        path = source / ("train" if i < 53 else "val") / f"class{i % 2}" / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = numbers.randint(20, 90, 2)
        small = numbers.randint(0, 256, (5, 5, 3)).astype(np.uint8)
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(path, quality=95)
    prepare("image-folder", source, target, PrepSettings())
    return target


def section(folder: Path, **changes) -> DataSection:
    return DataSection(path=str(folder), num_classes=2, **{"image_size": 24, "workers": 1, **changes})


def place(rank=0, world=1) -> Topology:
    return Topology(rank, world, rank, world, torch.device("cpu"))


def training(
    folder, world=1, accumulation=1, first=0, epoch=1, augment=FULL, **changes
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every step of an epoch from `first` on, all ranks put together."""
    parts = []
    for rank in range(world):
        loader = TrainLoader(section(folder, **changes), augment, BATCH, accumulation, 7, place(rank, world))
        with loader.batches(epoch, first) as batches:
            parts.append([(batch.inputs, batch.targets) for batch in batches])
    steps = []
    for step in range(len(parts[0]) // accumulation):
        mine = [part for rank in parts for part in rank[step * accumulation : (step + 1) * accumulation]]
        steps.append(tuple(torch.cat(tensors) for tensors in zip(*mine, strict=True)))
    return steps


def digest(steps) -> list[str]:
    return [hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest() for x, y in steps]


@pytest.mark.parametrize(
    "way",
    [
        {"world": 2},
        {"world": 4},
        {"accumulation": 2},
        {"world": 2, "accumulation": 2},
        {"workers": 2},
        {"workers": 3},
        {"batches_ahead": 1},
        {"first": 1},
        {"world": 2, "workers": 2, "first": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "setting",
    [{}, {"order": "paged", "window": 1}, {"augment": FULL.model_copy(update={"aug_repeats": 3})}],
    ids=["random", "paged", "repeats"],
)
def test_the_pictures_do_not_depend_on_how_they_are_loaded(folder, setting, way):
    """Nor on where an epoch is taken up again."""
    expected = digest(training(folder, **setting))
    assert len(set(expected)) == 3
    assert digest(training(folder, **setting, **way)) == expected[way.get("first", 0) :]


def test_views_of_a_sample_differ_and_the_first_is_the_one_that_it_always_is(folder):
    """The same epoch's crop, flip and policy without repeats, for the samples of its first views."""
    plain, repeated = (AugmentSection(auto_augment="3a", aug_repeats=repeats) for repeats in (0, 3))
    found = {}
    for name, augment in (("plain", plain), ("repeated", repeated)):
        with TrainLoader(section(folder), augment, BATCH, 1, 7, place()).batches(1) as batches:
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
    assert all(once[sample] in seen for sample, seen in views.items() if sample in once)


def test_auto_takes_pages_where_the_file_is_larger_than_the_stated_memory(folder):
    size = (folder / "train.beton").stat().st_size / 2**30
    for memory, kind in ((size * 1.01, RandomOrder), (size * 0.99, PagedOrder)):
        loader = TrainLoader(section(folder, order="auto", memory=memory), FULL, BATCH, 1, 7, place())
        assert isinstance(loader.order, kind)


def test_epochs_differ(folder):
    assert digest(training(folder, epoch=0)) != digest(training(folder, epoch=1))


@pytest.mark.parametrize("world", [1, 2, 3, 20])
def test_evaluation_sees_every_sample_once(folder, world):
    seen = []
    for rank in range(world):
        with EvalLoader(section(folder), 4, place(rank, world)).batches() as batches:
            seen += [sample for batch in batches for sample in batch.samples]
    assert sorted(seen) == list(range(17))


@pytest.mark.filterwarnings("ignore")  # FFCV's import
@pytest.mark.parametrize("kind", ["jpeg", "raw"])
def test_crops_and_resizes_are_ffcvs_own(folder, tmp_path, kind):
    """Against FFCV's Python functions, with numpy for the flip; on raw pictures against cv2 as well."""
    from ffcv.libffcv import imdecode, resize_crop

    beton = open_beton(folder / "train.beton")
    samples = np.arange(len(beton))
    boxes = random_boxes(samples, beton.height, beton.width, 7, 3, (0.08, 1.0), (3 / 4, 4 / 3), 0.5)
    wholes = [np.empty((h, w, 3), np.uint8) for h, w in zip(beton.height, beton.width, strict=True)]
    for whole, at, size in zip(wholes, beton.offset, beton.size, strict=True):
        h, w, _ = whole.shape
        assert imdecode(np.array(beton.bytes[at:][:size]), whole, h, w, h, w) == 0
    if kind == "raw":
        with BetonWriter(tmp_path / "raw.beton", tmp_path / "journal", len(wholes)) as writer:
            for whole in wholes:
                writer.add(Encoded("", 0, RAW, whole.shape[1], whole.shape[0], whole.tobytes(), ""))
            writer.finish()
        beton = open_beton(tmp_path / "raw.beton")
    pictures = np.empty((len(samples), 24, 24, 3), np.uint8)
    decode(beton, samples, boxes, pictures, threads=1)
    for whole, picture, (top, left, height, width, flip) in zip(wholes, pictures, boxes, strict=True):
        expected = np.empty((24, 24, 3), np.uint8)
        resize_crop(whole, top, top + height, left, left + width, expected)
        assert np.array_equal(picture, expected[:, ::-1] if flip else expected)
        crop = np.ascontiguousarray(whole[top : top + height, left : left + width])
        theirs = cv2.resize(crop, (24, 24), interpolation=cv2.INTER_AREA)
        assert np.abs(theirs.astype(int) - expected).max() <= 1  # another OpenCV
    assert 10 < boxes[:, 4].sum() < 43


def test_random_boxes_follow_torchvisions_law(folder):
    """Inside the picture; area and aspect of accepted crops uniform and log-uniform over their ranges."""
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


def test_a_picture_too_wide_for_the_ratio_gives_its_centre():
    boxes = random_boxes(np.array([0]), np.array([10]), np.array([1000]), 0, 0, (1.0, 1.0), (3 / 4, 4 / 3), 0.0)
    assert boxes.tolist() == [[0, (1000 - 13) // 2, 10, 13, 0]]


@pytest.mark.parametrize("padding", [2, 4, 8])
def test_padded_crops_are_torchvisions(folder, padding):
    """The whole picture with a black border, cut at the box: Pillow's own."""
    beton = open_beton(folder / "train.beton")
    samples = np.arange(len(beton))
    boxes = padded_boxes(samples, beton.height, beton.width, 20, padding, 7, 3, 0.5)
    pictures, outside = np.empty((len(samples), 20, 20, 3), np.uint8), 0
    decode(beton, samples, boxes, pictures, threads=1)
    for sample, picture, (top, left, height, width, flip) in zip(samples, pictures, boxes, strict=True):
        h, w = int(beton.height[sample]), int(beton.width[sample])
        whole = np.empty((1, max(h, w), max(h, w), 3), np.uint8)
        decode(beton, np.array([sample]), np.array([[0, 0, max(h, w), max(h, w), 0]]), whole, threads=1)
        padded = functional.pad(Image.fromarray(whole[0, :h, :w]), padding)
        expected = np.asarray(functional.crop(padded, top + padding, left + padding, height, width))
        assert np.array_equal(picture, expected[:, ::-1] if flip else expected)
        outside += top < 0 or left < 0 or top + 20 > h or left + 20 > w
    assert outside > 5


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


def test_a_picture_too_small_for_its_padded_crop_is_refused(folder):
    padded = AugmentSection(crop="padded", padding=1)
    with pytest.raises(InputError, match=r"augment.padding 1: .* picture of 2\d pixels"):
        TrainLoader(section(folder, image_size=64), padded, BATCH, 1, 7, place())


def test_centre_boxes_are_the_middle_square():
    boxes = centre_boxes(np.array([0, 1]), np.array([100, 40]), np.array([60, 80]), 0.5)
    assert boxes.tolist() == [[35, 15, 30, 30, 0], [10, 30, 20, 20, 0]]


def test_indices_are_checked(folder):
    beton = open_beton(folder / "train.beton")
    for wrong in (len(beton), -1, 10**8):
        samples = np.array([0, wrong])
        with pytest.raises(InputError, match="asked for samples"):
            decode(beton, samples, np.zeros((2, 5), np.int64), np.empty((2, 8, 8, 3), np.uint8), 1)


def test_a_picture_that_does_not_decode_is_named(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    beton = open_beton(folder / "train.beton")
    with (broken / "train.beton").open("r+b") as file:
        file.seek(int(beton.offset[30]))
        file.write(bytes(64))
    with pytest.raises(InputError, match="sample 30 is not a whole JPEG"):
        training(broken, world=1)


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
            TrainLoader(wrong, FULL, BATCH, 1, 7, place())
    with pytest.raises(InputError, match="exceeds the 53 samples"):
        TrainLoader(section(folder), FULL, 64, 1, 7, place())
