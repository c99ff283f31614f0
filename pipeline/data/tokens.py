"""Prepared sentence pairs to token batches, padded to the longest pair of a step.

The width of a batch depends on all pairs of its step, on all ranks. If each rank padded to its own longest pair, sums
in the models, although padding is masked in them, would be rounded differently for each world size.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from widemix.data.batches import HostBatch, StepPart
from widemix.data.split import open_descriptor, open_split, split_checksums
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.files import parse_json, read_regular
from widemix.formats.checksums import MISMATCH, text_checksums
from widemix.formats.sources import CUT_SHORT, damaged_sample
from widemix.formats.text import TOKEN, TOKENIZER, open_text
from widemix.models.section import ModelSection
from widemix.recipe.data import TextDataSection

_MULTIPLE = 8  # few different shapes, and ones that suit tensor cores


class Tokens:
    """One split of sentence pairs: token ids int64 [B, T], filled up with PAD."""

    threads = 1

    def __init__(self, section: TextDataSection, split: str, topology: Topology):
        self._opened_by = section, split, topology
        self.device = topology.device
        self.file = open_split(section, split, open_text)
        self._checksums = split_checksums(section, self.file)
        self.descriptor = open_descriptor(self.file, self)
        self.vocabulary = vocabulary_size(Path(section.path) / TOKENIZER)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle opens the split again."""
        return Tokens, self._opened_by

    def check(self, model: ModelSection) -> None:
        """`InputError` unless the model's tokens and vocabulary cover what the file holds."""
        model.check_text(self.file.path, self.file.tokens, self.vocabulary)

    def read(self, part: StepPart) -> HostBatch:
        """As `Source.read`; T is the width of the whole step, see `width`."""
        width, samples = self.width(part.step_view_ids), part.view_ids % len(self.file)
        shape, pinned = (len(samples), width), self.device.type == "cuda"
        ids = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=pinned)
        ids.numpy()[:] = self._pairs(samples)[:, :width]
        if len(samples) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary:
            bad = samples[int(((ids < 0) | (ids >= self.vocabulary)).any(1).nonzero()[0])]
            raise InputError(f"{self.file.path}: sample {bad} holds tokens that {TOKENIZER} has no words for")
        return HostBatch(ids, self.labels(samples), part.view_ids, part.epoch)

    def labels(self, view_ids: np.ndarray) -> torch.Tensor:
        """The classes of pairs: int64 [B]."""
        return torch.from_numpy(self.file.label[view_ids % len(self.file)])

    def _pairs(self, samples: np.ndarray) -> np.ndarray:
        """The tokens of pairs with their padding, int32 [B, tokens]."""
        pairs = np.empty((len(samples), self.file.tokens), TOKEN)
        for pair, sample, offset in zip(pairs, samples, self.file.offset[samples].tolist(), strict=True):
            if os.preadv(self.descriptor, [pair.data], offset) < pair.nbytes:
                raise InputError(damaged_sample(self.file.path, int(sample), CUT_SHORT))
        if self._checksums:
            wrong = text_checksums(self.file, samples, pairs) != self._checksums.samples[samples]
            if wrong.any():
                raise InputError(damaged_sample(self.file.path, int(samples[wrong.argmax()]), MISMATCH))
        return pairs

    def to_device(self, host: HostBatch) -> torch.Tensor:
        """As `Source.to_device`."""
        return host.inputs.to(self.device, non_blocking=True)

    def host_bytes(self, count: int) -> int:
        """Host memory of `count` pairs at most."""
        return count * self.file.tokens * 8

    def width(self, step_view_ids: np.ndarray) -> int:
        """T of all batches of a step with these view ids: its longest pair, rounded up to a multiple of 8."""
        longest = int(self.file.length[step_view_ids % len(self.file)].max(initial=1))
        return min(-(-longest // _MULTIPLE) * _MULTIPLE, self.file.tokens)


def vocabulary_size(path: Path) -> int:
    """Return the number of token ids of the tokenizer next to the data. Raises `InputError` if it is none."""
    try:
        return 1 + max(parse_json(read_regular(path))["model"]["vocab"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: cannot be read as the folder's tokenizer ({error}); prepare it again") from None
