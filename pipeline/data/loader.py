"""Loads prepared samples and yields batches on the device, in an exact order that can be resumed at any step.

The file format is FFCV's; the loader is not. FFCV's own loader depends on the world size in its order and on threads
in its randomness, overwrites buffers that are still in use, does not check its indices, decodes pixels outside of the
crop, and blocks for ever when its thread raises.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from widemix.data.batches import Batch, Batches, HostBatch, Source, StepPart, prefetch
from widemix.data.compiled import jit
from widemix.data.images import AugmentedImages, Images, View, Views
from widemix.data.mixup import sample_mixture, soft_labels
from widemix.data.normalise_and_mix import permute_pixels, pixel_permutation
from widemix.data.order import (
    FileOrder,
    Order,
    RandomOrder,
    SampledOrder,
    Weighted,
    evaluation_samples,
    rank_slices,
    steps_per_epoch,
)
from widemix.data.paged import PAGE_BYTES, PagedOrder, request_ranges
from widemix.data.precision import DTYPES
from widemix.data.random import NETWORK, key
from widemix.data.split import PreparedFile
from widemix.data.tokens import Tokens
from widemix.distributed.topology import Topology
from widemix.errors import InputError
from widemix.formats.manifest import read_manifest
from widemix.models.section import ModelSection
from widemix.recipe.augment import AugmentSection
from widemix.recipe.class_balance import UNEQUAL, class_weights, imbalance
from widemix.recipe.data import AnyDataSection, TextDataSection
from widemix.recipe.recipe import check_batch
from widemix.recipe.sections import TrainSection
from widemix.terminal import print


class TrainLoader:
    """Training batches of one rank: micro-batch k of a step, over all ranks, is the same for every world size.

    Images are normalised, erased and mixed in float32, and rounded to the dtype of `train.precision` at the end.
    Without `shuffle` epochs are in the order of the file. Without `drop_last` the last step of an epoch has what is
    left, divided among the ranks as equally as possible. With `views` a batch's inputs are those of `Views`, and
    `augment` says what else is done with a batch.
    """

    def __init__(
        self,
        data: AnyDataSection,
        augment: AugmentSection,
        train: TrainSection,
        topology: Topology,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
        views: Sequence[View] = (),
    ):
        if isinstance(data, TextDataSection):
            self.source: Source = Tokens(data, data.train_split, topology)
        elif views:
            self.source = Views(views, train.seed, topology)
        else:
            self.source = AugmentedImages(data, augment, train.seed, topology)
            augment.check_image_size(data.image_size)
        self.data, self.augment, self.train, self.topology = data, augment, train, topology
        self._pixels = pixel_permutation(data, topology.device)
        self.micro_batch_size = train.micro_batch_size(topology.world)
        self.steps = steps_per_epoch(len(self), train.global_batch, drop_last)
        if self.steps == 0:
            check_batch(train.global_batch, len(self), data.train_split, data.path)
        kind = _order_kind(data, self.source.file) if shuffle else "file"
        if not drop_last and (kind == "paged" or augment.mixes_images):
            part = "data.order paged deals" if kind == "paged" else "mixup and CutMix take"
            raise InputError(f"drop_last False: {part} whole batches only; set drop_last to True")
        if views and (
            augment.mixes_images or augment.aug_repeats > 1 or getattr(data, "on_corrupt", "error") != "error"
        ):
            raise InputError("views: mixup, CutMix, repeated augmentation or on_corrupt replace do not go with them")
        self.order = _build_order(kind, data, self.source.file, train, max(1, augment.aug_repeats), self.steps)
        if isinstance(self.order, PagedOrder) and topology.rank == 0 and stored_by_class(self.source.file.label):
            print(
                f"warning: {self.source.file.path}: is stored class by class, which order paged mixes badly; "
                "prepare it with --shuffle",
                file=sys.stderr,
            )

    def __len__(self) -> int:
        return len(self.source.file)

    def batches(self, epoch: int, first_step: int = 0) -> Batches:
        """`grad_accum_steps` micro-batches a step, from `first_step` of the epoch on. Use it in a `with` block."""
        hosts = prefetch(self._reads(epoch, first_step), self.data, self.source, self.micro_batch_size)
        return Batches(hosts, self._to_device, self.topology.device)

    def _reads(self, epoch: int, first_step: int) -> Iterator[Callable[[], HostBatch]]:
        """Calls that read the batches."""
        rank_and_parts = self.topology.rank, self.topology.world, self.train.grad_accum_steps
        for step in range(first_step, self.steps):
            view_ids = self.order.step(epoch, step)
            parts = rank_slices(len(view_ids), *rank_and_parts)
            ranges = self.order.prefetch_ranges(epoch, step, step == first_step, parts)
            request_ranges(self.source.descriptor, ranges)
            for part in parts:
                yield partial(self._read, StepPart(view_ids, epoch, part), epoch * self.steps + step)

    def _read(self, part: StepPart, step: int) -> HostBatch:
        augment, host, mixture = self.augment, self.source.read(part), None
        if augment.mixes_images:
            side, first_group = host.inputs.shape[1], part.part.start // augment.mix_group
            mixture = sample_mixture(len(host.labels), side, augment, self.train.seed, step, first_group)
        return replace(host, mixture=mixture, dtype=DTYPES[self.train.precision])

    def _to_device(self, host: HostBatch) -> Batch:
        """Images mixed and rounded, with their pixels in the order of `data.pixel_order`; targets mixed alike."""
        targets = host.labels.to(self.topology.device, non_blocking=True)
        if self.data.targets == "class":
            targets = soft_labels(targets, self.data.num_classes, self.augment.smoothing)
        if host.mixture is not None:
            targets = host.mixture.mix_targets(targets)
        inputs = permute_pixels(self.source.to_device(host), self._pixels)
        keys = torch.from_numpy(sample_keys(host.view_ids, self.train.seed, host.epoch))
        keys = keys.to(targets.device, non_blocking=True)
        return Batch(inputs, targets, host.view_ids % len(self), host.replaced, keys)


class EvalLoader:
    """Every sample of the evaluation split, or of `samples`, on exactly one rank: no padding, drops, or duplicates.

    Each rank has the same number of batches, the last of which may be empty: sharded engines synchronise at every
    forward pass.
    """

    def __init__(
        self,
        data: AnyDataSection,
        batch: int,
        topology: Topology,
        dtype: torch.dtype = torch.float32,
        samples: np.ndarray | None = None,
    ):
        if isinstance(data, TextDataSection):
            self.source: Source = Tokens(data, data.eval_split, topology)
        else:
            self.source = Images(data, data.eval_split, topology)
        self.data, self.batch, self.topology, self.dtype = data, batch, topology, dtype
        self._pixels = pixel_permutation(data, topology.device)
        self.samples = np.arange(len(self.source.file)) if samples is None else samples

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def is_unequal(self) -> bool:
        """Whether a class has more than `UNEQUAL` times the samples of another."""
        return imbalance(np.bincount(self.source.file.label[self.samples]).tolist()) > UNEQUAL

    @property
    def _most(self) -> int:
        """Samples of rank 0, which has the most."""
        return -(-len(self) // self.topology.world)

    def batches(self, first_step: int = 0) -> Batches:
        """All batches of this rank from `first_step` on, in the order of the file or of `samples`.

        Use it in a `with` block."""
        hosts = prefetch(self._reads(first_step), self.data, self.source, self.batch)
        return Batches(hosts, self._to_device, self.topology.device)

    def _reads(self, first_step: int) -> Iterator[Callable[[], HostBatch]]:
        samples = self.samples[evaluation_samples(len(self), self.topology.rank, self.topology.world)]
        for start in range(first_step * self.batch, self._most, self.batch):
            yield partial(self._read, StepPart(samples[start : start + self.batch]))

    def _read(self, part: StepPart) -> HostBatch:
        return replace(self.source.read(part), dtype=self.dtype)

    def _to_device(self, host: HostBatch) -> Batch:
        labels = host.labels.to(self.topology.device, non_blocking=True)
        return Batch(permute_pixels(self.source.to_device(host), self._pixels), labels, host.view_ids)


@jit
def sample_keys(view_ids, seed, epoch):
    """A random word of each view in an epoch, for what the network samples: int64 [B]."""
    words = np.empty(len(view_ids), np.uint64)
    for b in range(len(view_ids)):
        words[b] = key(seed, epoch, view_ids[b], NETWORK)
    return words.view(np.int64)


def _order_kind(data: AnyDataSection, file: PreparedFile) -> str:
    """random or paged, as `data.order` says; auto depends on the recipe and the file alone."""
    larger = len(file.bytes) > data.memory_gib * 2**30
    return ("paged" if larger else "random") if data.order == "auto" else data.order


def _build_order(
    kind: str, data: AnyDataSection, file: PreparedFile, train: TrainSection, repeats: int, steps: int
) -> Order:
    weighted = None
    if data.sampling:
        manifest = read_manifest(Path(data.path))
        counts = manifest.splits[data.train_split].per_class
        weights = class_weights("data.sampling", data.sampling, counts, manifest.classes)
        weighted = Weighted(file.label, np.array(weights))
    if kind == "paged":
        window_bytes = data.shuffle_window_mib << 20
        shuffle = train.global_batch, train.seed, window_bytes, repeats, PAGE_BYTES
        return PagedOrder(file.offset, file.size, *shuffle, weighted)
    if weighted:
        length = min(len(file), steps * train.global_batch)
        return SampledOrder(weighted, train.global_batch, train.seed, repeats, length)
    return {"random": RandomOrder, "file": FileOrder}[kind](len(file), train.global_batch, train.seed, repeats)


def stored_by_class(label: np.ndarray) -> bool:
    """Return whether labels int [n] only rise: a window of such pages has few classes, and batches vary more."""
    return len(label) > 1 and bool(label[0] < label[-1] and (label[1:] >= label[:-1]).all())


def check_model(model: ModelSection, *loaders: TrainLoader | EvalLoader) -> None:
    """`InputError` where a text model is too small for the prepared pairs; the recipe has checked image models."""
    for loader in loaders:
        if isinstance(loader.source, Tokens):
            loader.source.check(model)
