"""What the loader yields, bit for bit: held against timm and Pillow image by image, and then against hashes."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as F

from tests.data.loading import place, read, section, train_loader
from tests.data.plain_batches import COLOR_JITTER, plain_batch, resized_box, stream_of, uniform
from tests.sections import train_section
from widemix.data.batches import Batch
from widemix.data.loader import EvalLoader
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.formats.beton import open_beton
from widemix.recipe.augment import AugmentSection

BATCH, SEEDS, EPOCHS, STEPS = 16, (7, 8), (0, 3), 2
STRONG = AugmentSection(
    auto_augment="rand-m9-mstd0.5-inc1",
    color_jitter=(0.4, 0.4, 0.4, 0.1),
    color_jitter_prob=0.5,
    grayscale_prob=0.2,
    re_prob=0.5,
    re_count=2,
    mixup=0.8,
    cutmix=1.0,
    mix_group=4,
    smoothing=0.1,
)
RECIPES = {
    "strong": ({"interpolation": "random"}, STRONG, {"precision": "bf16"}),
    "repeats": ({}, STRONG.model_copy(update={"aug_repeats": 2, "mix_mode": "elem"}), {}),
    "padded": ({}, AugmentSection(crop="padded", padding=3, re_prob=0.5, re_mode="rand", smoothing=0.2), {}),
    "plain": ({"interpolation": "bicubic"}, AugmentSection(hflip=0.2, scale=(0.3, 0.9)), {"precision": "fp16"}),
    # Means fill what moves in, and are taken from each channel; four classes of which the folder has three.
    "moved": (
        {"mean": (0.1, 0.5, 0.8), "std": (0.2, 0.3, 0.4), "interpolation": "bicubic", "num_classes": 4},
        AugmentSection(auto_augment="rand-m9-n4-p0.9", smoothing=0.2, mixup=0.5, mix_mode="pair", mix_group=8),
        {},
    ),
}
# A changed hash changes every run of every user: it needs a reason and a new major version.
GOLDEN = {  # recipe and seed: of each epoch and step
    "strong 7": "a7e8e1bb60b55767 94d71c2d6b6cc596 4c1ea61e10146376 798bd4a1a65dbae5",
    "strong 8": "bc62a8a15654b7ce bdf31b3ab0ca3ff4 93ee081f2a5a87ba e792ce4c05238e73",
    "repeats 7": "59ede25533c23906 f1282efac856c3d5 6bd5684cfa9ec732 00a0e8f63e186d7c",
    "repeats 8": "df3cc866b6bd5cf4 4f2b3fefcc921ff5 eb9abf8740b92025 35c4c2aeabc50d87",
    "padded 7": "53196217afaa615f 92ac0dd9c107afec 0bccab3417f9b6ab b6601ce965770841",
    "padded 8": "5fd426a7f5ad811b 4e32f743e8d55b5c 3e673d56f4a6453d 21ccecddf85fff98",
    "plain 7": "1546f409bd7e6b2d 5f4c62ce51bc4e3d 6f7a1ff9870da09e 12ec513599c32be2",
    "plain 8": "429c3508a69df4c8 eb3eca19edaa9345 d3cfda2db19c059f b9e66ae81d982f82",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Forty images of many sizes in three classes, stored raw, so that no JPEG encoder has a say in the hashes."""
    source, target = tmp_path_factory.mktemp("png"), tmp_path_factory.mktemp("prepared")
    numbers = np.random.RandomState(0)
    for i in range(40):
        path = source / "train" / f"class{i % 3}" / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = numbers.randint(24, 60, 2)
        small = numbers.randint(0, 256, (5, 5, 3)).astype(np.uint8)
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(path)
    prepare("image-folder", source, target, PrepSettings(raw=True))
    return target


@pytest.fixture(scope="module")
def stored(folder) -> list[tuple[Image.Image, int]]:
    """Every training image with its label, in the order of the file."""
    beton = open_beton(folder / "train.beton")
    places = zip(beton.offset, beton.size, beton.width, beton.height, beton.label, strict=True)
    return [
        (Image.frombytes("RGB", (w, h), bytes(beton.bytes[at : at + size])), label)
        for at, size, w, h, label in places
    ]


def recipe_of(name: str, folder: Path, seed: int) -> SimpleNamespace:
    data, augment, train = RECIPES[name]
    train = train_section(BATCH, seed=seed, **train)
    return SimpleNamespace(data=section(folder, **{"num_classes": 3, **data}), augment=augment, train=train)


def loaded(recipe: SimpleNamespace, epoch: int) -> list[Batch]:
    return read(train_loader(recipe.data, recipe.augment, train=recipe.train), epoch)


def assert_is(batch: Batch, plain: tuple) -> None:
    inputs, targets, samples, keys = plain
    assert batch.samples.tolist() == samples
    assert batch.keys.tolist() == keys.tolist()
    assert batch.inputs.dtype == inputs.dtype
    assert torch.equal(batch.inputs, inputs)
    assert torch.equal(batch.targets, targets)


def hash_of(batch: Batch) -> str:
    inputs = batch.inputs.contiguous().view(torch.uint8)
    parts = (inputs.numpy(), batch.targets.numpy(), batch.samples, batch.keys.numpy())
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RECIPES)
def test_batches_are_timms_and_have_always_been(name, seed, folder, stored):
    recipe, hashes = recipe_of(name, folder, seed), []
    for epoch in EPOCHS:
        batches = loaded(recipe, epoch)
        assert len(batches) == STEPS
        for step, batch in enumerate(batches):
            assert_is(batch, plain_batch(stored, recipe, epoch, step))
            hashes.append(hash_of(batch))
    if name != "moved":
        assert hashes == GOLDEN[f"{name} {seed}"].split()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "random"])
def test_evaluation_batches_are_pillows_centre_crops(folder, stored, interpolation):
    """`random` means bicubic there."""
    data = section(folder, num_classes=3, eval_split="train", interpolation=interpolation)
    [batch] = read(EvalLoader(data, len(stored), place(), torch.bfloat16))
    mean, std = (255 * torch.tensor(of)[:, None, None] for of in (data.mean, data.std))
    expected = []
    for image, _ in stored:
        square = int(data.crop_pct * min(image.size))
        left, top = ((length - square) // 2 for length in image.size)
        crop = resized_box(image, np.array([top, left, square, square, 0]), interpolation != "bilinear", 24)
        expected.append((torch.from_numpy(crop.copy()).permute(2, 0, 1).float() - mean) / std)
    assert batch.inputs.dtype == torch.bfloat16
    assert torch.equal(batch.inputs, torch.stack(expected).bfloat16())
    assert batch.targets.tolist() == [label for _, label in stored]


def test_the_images_that_their_streams_choose_are_blurred(folder):
    """As by torchvision but for rounding, see test_color_jitter."""
    recipe, changed = recipe_of("repeats", folder, seed=7), 0
    mean, std = (255 * torch.tensor(of)[:, None, None] for of in (recipe.data.mean, recipe.data.std))
    loaders = [train_loader(recipe.data, AugmentSection(**keys)) for keys in ({}, {"gaussian_blur_prob": 0.5})]
    for before, after in zip(*(read(loader, 1) for loader in loaders), strict=True):
        for sample, one, other in zip(before.samples, before.inputs, after.inputs, strict=True):
            expected, found = ((image * std + mean).round().to(torch.uint8) for image in (one, other))
            stream = stream_of(7, 1, int(sample), COLOR_JITTER)
            if uniform(stream, 2) < 0.5:
                sigma = 0.1 + 1.9 * uniform(stream, 3)
                expected = F.gaussian_blur(expected, [23, 23], [sigma, sigma])
                changed += not torch.equal(one, other)
            assert (found.int() - expected.int()).abs().max() <= 1
    assert changed > 8
