"""Prepared sentence pairs to token batches, padded no further than the longest pair of a step.

The width of a batch follows from all pairs of its step, whichever ranks hold them. Were each rank to pad to its own
longest pair, the models' sums, though padding is masked in them, would round differently on every world size.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch

from pipeline.data.split import descriptor, open_split
from pipeline.distributed.topology import Topology
from pipeline.errors import InputError
from pipeline.formats.text import TOKEN, TOKENIZER, open_text
from pipeline.recipe.data import TextDataSection
from pipeline.recipe.text import TextSection

_MULTIPLE = 8  # few different shapes, and those that tensor cores like


class Tokens:
    """One split of sentence pairs: token ids int64 [B, T], PAD after the end of a pair."""

    def __init__(self, section: TextDataSection, split: str, topology: Topology):
        self.device = topology.device
        self.file = open_split(section, split, open_text)
        self._descriptor = descriptor(self.file, self)
        self.vocabulary = _words(Path(section.path) / TOKENIZER)

    def check(self, model: TextSection) -> None:
        """`InputError` unless the model's tokens and vocabulary cover what the file holds."""
        path = self.file.path
        if model.tokens < self.file.tokens:
            raise InputError(
                f"model.tokens {model.tokens}: pairs in {path} have up to {self.file.tokens} tokens; take that many, "
                f"or prepare with --length {model.tokens}"
            )
        if model.vocabulary < self.vocabulary:
            raise InputError(
                f"model.vocabulary {model.vocabulary}: {TOKENIZER} beside {path} has {self.vocabulary} words"
            )

    def read(self, draws: np.ndarray, together: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        """Ids on the host, int64 [B, T], pinned where there is a GPU; T holds the longest pair of `together`.

        And the draws that these are of.
        """
        width, samples = self.width(together), draws % len(self.file)
        ids = torch.empty((len(samples), width), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        for row, sample in zip(ids.numpy(), samples, strict=True):
            row[:] = self._pair(sample)[:width]
        if len(samples) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary:
            bad = samples[int(((ids < 0) | (ids >= self.vocabulary)).any(1).nonzero()[0])]
            raise InputError(f"{self.file.path}: sample {bad} holds tokens that {TOKENIZER} has no words for")
        return ids, draws

    def _pair(self, sample: int) -> np.ndarray:
        """The tokens of a pair, int32 [tokens], padding included."""
        size = int(self.file.size[sample])
        data = os.pread(self._descriptor, size, int(self.file.offset[sample]))
        if len(data) < size:
            raise InputError(f"{self.file.path}: sample {sample}: the file ends before it; it was cut short")
        return np.frombuffer(data, TOKEN)

    def finish(self, ids: torch.Tensor, draws: np.ndarray, epoch: int) -> torch.Tensor:
        """What `read` gave, on the device."""
        return ids.to(self.device, non_blocking=True)

    def host_bytes(self, count: int) -> int:
        return count * self.file.tokens * 8

    def width(self, together: np.ndarray) -> int:
        """T of all batches of a step with these samples: no more than their longest pair needs."""
        longest = int(self.file.length[together % len(self.file)].max(initial=1))
        return min(-(-longest // _MULTIPLE) * _MULTIPLE, self.file.tokens)


def _words(path: Path) -> int:
    """How many token ids the tokenizer beside the data gives out."""
    try:
        return 1 + max(json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: cannot be read as the folder's tokenizer ({error}); prepare it again") from None
