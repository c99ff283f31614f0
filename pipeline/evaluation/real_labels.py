"""ReaL labels of ImageNet's validation images (Beyer et al. 2020): every class that is in the image."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from widemix.errors import InputError
from widemix.files import parse_json, read_regular
from widemix.formats.sources import read_sources

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")


def read_real_labels(path: Path, beton: Path, classes: int) -> list[list[int]]:
    """Return the labels of each sample of a split, from the file `real.json`.

    Its i-th entry are the labels of ILSVRC2012_val_<i + 1>; samples are found by their source's name. `InputError`
    for a file in another form, and for a split of other images.
    """
    try:
        entries = parse_json(read_regular(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except InputError:
        raise
    except ValueError:
        raise InputError(f"{path}: is not JSON; take real.json of google-research/reassessed-imagenet") from None
    if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
        raise InputError(f"{path}: must be a list with a list of labels for each validation image")
    highest = max((max(entry) for entry in entries if entry), default=0)
    if highest >= classes:
        raise InputError(f"{path}: has label {highest}; the data has {classes} classes")
    names = read_sources(beton)
    labels: list[list[int]] = [[] for _ in names]
    for name, (sample, _) in names.items():
        found = _NUMBER.search(name)
        if not found or not 1 <= int(found[1]) <= len(entries):
            last = f"ILSVRC2012_val_{len(entries):08d}"
            raise InputError(f"{beton}: {name} is none of {path}'s images, ILSVRC2012_val_00000001 to {last}")
        labels[sample] = entries[int(found[1]) - 1]
    if not any(labels):
        raise InputError(f"{path}: has no label for any sample of {beton}, so there is no ReaL accuracy")
    return labels


def _is_entry(entry: object) -> bool:
    return isinstance(entry, list) and all(type(label) is int and label >= 0 for label in entry)


class RealAccuracy(Metric):
    """The fraction of samples whose likeliest class is one of their labels, of those with any; over all ranks."""

    def __init__(self, labels: Sequence[Sequence[int]]):
        super().__init__()
        self.labels = labels
        self.correct: Tensor
        self.counted: Tensor
        for name in ("correct", "counted"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, samples: np.ndarray) -> None:
        """Add a batch: logits [B, classes], samples int64 [B]."""
        for guess, sample in zip(logits.argmax(1).tolist(), samples.tolist(), strict=True):
            if self.labels[sample]:
                self.counted += 1
                self.correct += int(guess in self.labels[sample])

    def compute(self) -> Tensor:
        """Return the number of correct and of counted samples, int64 [2]."""
        return torch.stack([self.correct, self.counted])
