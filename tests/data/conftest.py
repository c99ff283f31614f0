"""Prepared folders, damaged ones too, that the tests of batches share."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.loading import DAMAGED, damage
from tests.layouts import two_classes
from tests.library.conftest import images  # noqa: F401 - a fixture
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.formats.beton import COEFFICIENTS, open_beton


def with_damage(folder: Path, parent: Path) -> Path:
    """A copy of a folder in which `DAMAGED` of train and 5 of val are no images any more."""
    copied = Path(shutil.copytree(folder, parent / folder.name))
    damage(copied, *DAMAGED)
    damage(copied, 5, split="val")
    return copied


@pytest.fixture(scope="session")
def damaged(images, tmp_path_factory) -> Path:  # noqa: F811
    return with_damage(images, tmp_path_factory.mktemp("damaged"))


@pytest.fixture(scope="session")
def coefficients(tmp_path_factory) -> Path:
    """The same images, stored as coefficients."""
    source, target = tmp_path_factory.mktemp("jpegs"), tmp_path_factory.mktemp("coefficients")
    two_classes(source)
    prepare("image-folder", source, target, PrepSettings(encoding="coefficients"), processes=1)
    assert (open_beton(target / "train.beton").mode == COEFFICIENTS).all()
    return target


@pytest.fixture(scope="session")
def damaged_coefficients(coefficients, tmp_path_factory) -> Path:
    return with_damage(coefficients, tmp_path_factory.mktemp("damaged"))


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Path:
    """Seventy pairs of 1 to 25 words a sentence: 53 to train on, 17 to evaluate on."""
    source, target = tmp_path_factory.mktemp("pairs"), tmp_path_factory.mktemp("prepared")
    numbers = np.random.RandomState(0)
    words = [f"w{chr(97 + i)}" for i in range(20)]
    for split, count in (("train", 53), ("dev_matched", 17)):
        rows = ["gold_label\tsentence1\tsentence2"]
        for i in range(count):
            first, second = (" ".join(numbers.choice(words, numbers.randint(1, 26))) for _ in range(2))
            rows.append(f"{('entailment', 'neutral', 'contradiction')[i % 3]}\t{first}\t{second}")
        (source / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    (source / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]) + "\n")
    prepare("mnli", source, target, PrepSettings(length=48))
    return target
