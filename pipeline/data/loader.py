"""Prepared samples to batches on the device: exact order, exact resumption, nothing that hangs.

One thread reads and decodes some batches ahead, another brings the next one to the device while the step computes.

The file format is FFCV's. The rest is ours: FFCV's own loader depends on the world size in its order and on threads
in its randomness, reuses buffers under its reader's feet, does not check its indices, decodes what no crop shows, and
waits for ever when its thread raises.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pipeline.data.arrival import finished, record_stream
from pipeline.data.mixing import mix_groups, soft_labels
from pipeline.data.order import Order, RandomOrder, evaluation_samples, steps_per_epoch
from pipeline.data.paged import PagedOrder
from pipeline.data.pictures import AugmentedPictures, Pictures
from pipeline.data.prefetch import Prefetch
from pipeline.data.readahead import Readahead
from pipeline.data.split import PreparedFile
from pipeline.data.tokens import Tokens
from pipeline.distributed.topology import Topology
from pipeline.errors import InputError
from pipeline.recipe.augment import AugmentSection
from pipeline.recipe.data import AnyDataSection, TextDataSection
from pipeline.recipe.family import Family
from pipeline.recipe.text import TextSection


@dataclass(frozen=True)
class Batch:
    """What the model sees, and what it should call it.

    `inputs` are normalised pictures [B, 3, H, W] (channels last in memory) or token ids int64 [B, T];
    `targets` are probabilities [B, classes] in training, labels int64 [B] in evaluation.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    samples: np.ndarray  # int64 [B]: which samples of the split these are
    replaced: int = 0  # of these, how many stand in for one that cannot be read

    def __len__(self) -> int:
        return len(self.samples)


class Source(Protocol):
    """One split: read by the thread that works ahead, finished on the device.

    Samples are told by their draws, as `pipeline.data.order` has them: a draw modulo `len(file)` is a sample.
    """

    @property
    def file(self) -> PreparedFile: ...

    def read(self, draws: np.ndarray, together: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        """One batch on the host; `together` are the draws of the whole step, on all ranks.

        And the draws that it shows: others than were asked for, where one cannot be read and may be replaced.
        """

    def finish(self, host: torch.Tensor, draws: np.ndarray, epoch: int) -> torch.Tensor:
        """What `read` gave as the model's inputs, on the device."""

    def host_bytes(self, count: int) -> int:
        """What a batch of so many samples takes at most between the two."""


@dataclass(frozen=True)
class _HostBatch:
    """What the reading thread hands over."""

    inputs: torch.Tensor
    labels: torch.Tensor
    draws: np.ndarray
    step: int
    part: int  # which micro-batch of the step
    replaced: int = 0


class TrainLoader:
    """Training batches of one rank. What they hold depends on (seed, epoch, step) alone, never on the world size.

    Pictures are normalised, erased and mixed in float32, and rounded to `dtype` at the end.
    """

    def __init__(
        self,
        section: AnyDataSection,
        augment: AugmentSection,
        global_batch: int,
        grad_accum_steps: int,
        seed: int,
        topology: Topology,
        dtype: torch.dtype = torch.float32,
    ):
        if isinstance(section, TextDataSection):
            self.source: Source = Tokens(section, section.train_split, topology)
        else:
            self.source = AugmentedPictures(section, augment, seed, topology)
        self.section, self.augment, self.seed, self.topology, self.dtype = section, augment, seed, topology, dtype
        self.global_batch, self.grad_accum_steps = global_batch, grad_accum_steps
        self.share = global_batch // topology.world // grad_accum_steps  # samples in a micro-batch
        self.steps = steps_per_epoch(len(self), global_batch)
        if self.steps == 0:
            raise InputError(
                f"train.global_batch {global_batch} exceeds the {len(self)} samples of split "
                f"{section.train_split!r} in {section.path}"
            )
        self.order = _order(section, self.source.file, global_batch, seed, max(1, augment.aug_repeats))

    def __len__(self) -> int:
        return len(self.source.file)

    def batches(self, epoch: int, first_step: int = 0) -> "Batches":
        """`grad_accum_steps` micro-batches a step, from `first_step` of the epoch on. Use it in a `with` block."""
        hosts = Prefetch(self._read(epoch, first_step), prefetch_count(self.section, self.source, self.share))
        return Batches(hosts, lambda host: self._finish(host, epoch), self.topology.device)

    def _read(self, epoch: int, first_step: int) -> Iterator[_HostBatch]:
        """In the reading thread."""
        rank, world = self.topology.rank, self.topology.world
        disk = Readahead(self.source.file.path)
        for step in range(first_step, self.steps):
            disk.ask(self.order.coming(epoch, step, step == first_step, rank, world))
            together = self.order.step(epoch, step)
            mine = together.reshape(world, self.grad_accum_steps, self.share)[rank]
            for part, draws in enumerate(mine):
                inputs, shown = self.source.read(draws, together, epoch)
                labels = torch.from_numpy(self.source.file.label[shown % len(self)])
                replaced = int((shown != draws).sum())
                yield _HostBatch(inputs, labels, shown, epoch * self.steps + step, part, replaced)

    def _finish(self, host: _HostBatch, epoch: int) -> Batch:
        """On the device: normalise, erase, mix, round."""
        augment = self.augment
        inputs = self.source.finish(host.inputs, host.draws, epoch)
        labels = host.labels.to(self.topology.device, non_blocking=True)
        targets = soft_labels(labels, self.section.num_classes, augment.smoothing)
        if augment.mixing:
            first = (self.topology.rank * self.grad_accum_steps + host.part) * self.share // augment.mix_group
            targets = mix_groups(inputs, targets, augment, self.seed, host.step, first)
        return Batch(rounded(inputs, self.dtype), targets, host.draws % len(self), host.replaced)


class EvalLoader:
    """Every sample of the evaluation split on exactly one rank: nothing padded, nothing dropped, nothing twice.

    Each rank has the same number of batches, the last of which may be empty: sharded engines meet at every forward.
    """

    def __init__(self, section: AnyDataSection, batch: int, topology: Topology, dtype: torch.dtype = torch.float32):
        if isinstance(section, TextDataSection):
            self.source: Source = Tokens(section, section.eval_split, topology)
        else:
            self.source = Pictures(section, section.eval_split, topology)
        self.section, self.batch, self.topology, self.dtype = section, batch, topology, dtype

    def __len__(self) -> int:
        return len(self.source.file)

    def batches(self) -> "Batches":
        hosts = Prefetch(self._read(), prefetch_count(self.section, self.source, self.batch))
        return Batches(hosts, self._finish, self.topology.device)

    def _read(self) -> Iterator[_HostBatch]:
        samples = evaluation_samples(len(self), self.topology.rank, self.topology.world)
        most = -(-len(self) // self.topology.world)  # on rank 0
        for start in range(0, most, self.batch):
            chosen = samples[start : start + self.batch]
            inputs, shown = self.source.read(chosen, chosen, 0)
            yield _HostBatch(inputs, torch.from_numpy(self.source.file.label[shown]), shown, 0, 0)

    def _finish(self, host: _HostBatch) -> Batch:
        labels = host.labels.to(self.topology.device, non_blocking=True)
        return Batch(rounded(self.source.finish(host.inputs, host.draws, 0), self.dtype), labels, host.draws)


def prefetch_count(section: AnyDataSection, source: Source, count: int) -> int:
    """How many batches of `count` samples are read ahead: bounded in number and in memory."""
    return max(1, min(section.prefetch_batches, (section.prefetch_mib << 20) // source.host_bytes(count)))


def _order(section: AnyDataSection, file: PreparedFile, global_batch: int, seed: int, repeats: int) -> Order:
    """The order that `data.order` names; auto looks at nothing but the recipe and the file."""
    larger = len(file.bytes) > section.memory_gib * 2**30
    if section.order == "paged" or (section.order == "auto" and larger):
        return PagedOrder(file.offset, file.size, global_batch, seed, section.shuffle_window_mib << 20, repeats)
    return RandomOrder(len(file), global_batch, seed, repeats)


def check_model(model: Family, *loaders: TrainLoader | EvalLoader) -> None:
    """`InputError` where a text model is too small for the pairs that were prepared. Others fit by their recipe."""
    for loader in loaders:
        if isinstance(loader.source, Tokens) and isinstance(model, TextSection):
            loader.source.check(model)


def rounded(inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pictures in the numbers that a model's first product would round them to; token ids as they are."""
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


class Batches:
    """Host batches from the thread that reads, on the device one ahead of the step."""

    def __init__(self, hosts: Prefetch[_HostBatch], finish: Callable[[_HostBatch], Batch], device: torch.device):
        self._hosts, self._device = hosts, device
        self._ready: Prefetch[Batch] = Prefetch(finished(hosts, finish, device), ahead=1)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        self._hosts.check()
        batch = next(self._ready)
        record_stream(self._device, batch.inputs, batch.targets)
        return batch

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_) -> None:
        self._hosts.close()
        self._ready.close()

    @property
    def waited(self) -> float:
        """Seconds so far in which the step had no batch on the device."""
        return self._ready.waited
