"""Small networks of a family of our own, each with something that engines or checkpoints may not expect."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from timm.layers import EvoNorm2dB0
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from widemix.models.families import KINDS, register
from widemix.models.section import ModelSection
from widemix.section import key

PARTS = ("batch_norm", "tied", "tied_to_head", "scalar", "unused", "channels_last", "strided", "tables")
Part = Literal["batch_norm", "tied", "tied_to_head", "scalar", "unused", "channels_last", "strided", "tables"]
WIDTH = 12


class Block(nn.Module):
    """An MLP with a residual sum: [B, 12] -> [B, 12]."""

    def __init__(self, parts: tuple[str, ...]):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if "batch_norm" in parts else nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5)) if "scalar" in parts else None
        self.forgotten = nn.Linear(WIDTH, 3) if "unused" in parts else None
        self.positions = nn.Linear(3, WIDTH) if "tables" in parts else None
        if "tables" in parts:
            self.register_buffer("table", torch.linspace(0, 1, 3), persistent=False)

    def forward(self, x):
        if self.positions is not None:
            x = x * self.positions(self.table)  # as Swin V2's relative positions
        y = self.fc2(self.fc1(self.norm(x)).relu())
        if self.scale is not None:
            assert self.scale.ndim == 0
            y = y * self.scale
        return x + y


class Toy(nn.Module):
    """A convolution, three blocks and a head: [B, 3, 8, 8] -> [B, classes]."""

    def __init__(self, parts: tuple[str, ...], num_classes: int):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, stride=2)
        self.stem_norm = nn.BatchNorm2d(WIDTH) if "batch_norm" in parts else nn.Identity()
        self.blocks = nn.ModuleList(Block(parts) for _ in range(3))
        self.head = nn.Linear(WIDTH, num_classes)
        self.checkpointed = False
        if "tied" in parts:
            self.blocks[2].fc1 = self.blocks[0].fc1
            self.blocks[1].fc2.weight = self.blocks[0].fc2.weight
        if "tied_to_head" in parts:
            self.near = nn.Linear(WIDTH, num_classes)
            self.near.weight = self.head.weight
            self.blocks[1].norm.bias = self.blocks[0].norm.bias
            self.head_of_first = nn.Linear(WIDTH, WIDTH)
            self.head_of_first.bias = self.blocks[0].fc2.bias
        if "scalar" in parts:
            self.temperature = nn.Parameter(torch.tensor(1.5))
        if "tables" in parts:
            self.register_buffer("waves", torch.linspace(0, 3, WIDTH).cos())
            self.early_norm = nn.LayerNorm(WIDTH)
        if "unused" in parts:
            self.token = nn.Parameter(torch.ones(1, WIDTH))
        if "strided" in parts:
            self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous().t())
        if "channels_last" in parts:
            self.to(memory_format=torch.channels_last)

    def get_classifier(self):
        return self.head

    def set_grad_checkpointing(self, enable=True):
        self.checkpointed = enable

    def forward(self, x):
        x = self.stem_norm(self.stem(x)).mean((2, 3))
        if hasattr(self, "waves"):
            x = self.early_norm(x + self.waves)  # float32, whatever x is in
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if number == 0 and hasattr(self, "head_of_first"):
                x = self.head_of_first(x)
        logits = self.head(x)
        if hasattr(self, "near"):
            logits = logits + self.near(x.relu())
        return logits * self.temperature if hasattr(self, "temperature") else logits


class RunningMean(nn.Module):
    """Puts a new tensor in its buffer's place: [B, C, H, W] -> the same shape."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
        return x


class Counts(nn.Module):
    """Counts in integers, one of each channel or in all: [B, C, H, W] -> the same shape."""

    def __init__(self, numbers):
        super().__init__()
        self.register_buffer("uses", torch.zeros(numbers, dtype=torch.int64))

    def forward(self, x):
        self.uses += (x.detach() > 0).sum((0, 2, 3)) if self.uses.numel() > 1 else (x.detach() > 0).sum()
        return x


class Stateful(nn.Module):
    """A layer whose forward pass changes a buffer, in a small network: [B, 3, H, W] -> [B, 10]."""

    LAYERS: ClassVar = {
        "instance norm": lambda: nn.InstanceNorm2d(WIDTH, track_running_stats=True),
        "evo norm": lambda: EvoNorm2dB0(WIDTH),
        "another tensor": lambda: RunningMean(WIDTH),
        "spectral norm": lambda: spectral_norm(nn.Conv2d(WIDTH, WIDTH, 1)),
        "batch norm": lambda: nn.BatchNorm2d(WIDTH),
        "table": lambda: Counts(WIDTH),
        "count": lambda: Counts(()),
    }

    def __init__(self, layer, recomputed=False):
        super().__init__()
        self.stem, self.layer, self.head = nn.Conv2d(3, WIDTH, 3), self.LAYERS[layer](), nn.Linear(WIDTH, 10)
        self.recomputed = recomputed

    def forward(self, x):
        x = self.stem(x)
        x = checkpoint(self.layer, x, use_reentrant=False) if self.recomputed else self.layer(x)
        return self.head(x.relu().mean((2, 3)))


class ToySection(ModelSection):
    """Keys of a toy."""

    kind: Literal["toy"] = key(..., "toy: a small network for tests")
    parts: Annotated[tuple[Part, ...], Field(strict=False)] = key((), "what is odd about it")

    def build(self, image_size, num_classes):
        return Toy(self.parts, num_classes)


@contextmanager
def known() -> Iterator[None]:
    """Recipes may name toys within the block, and no other test sees them."""
    register(ToySection)
    try:
        yield
    finally:
        del KINDS["toy"]
