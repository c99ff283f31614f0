"""Prepared pictures to batches on the device: exact order, exact resumption, nothing that hangs.

FFCV gives the file format and the compiled decoder. Order, randomness and threads are ours: FFCV's own loader
depends on the world size in its order and on threads in its randomness, reuses buffers under its reader's feet,
does not check its indices, and waits for ever when its thread raises.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data_prep.beton import Beton, open_beton
from data_prep.manifest import check_counts, read_manifest, split_path
from pipeline.data.augment.batch import augmentation
from pipeline.data.augment.erase import erase
from pipeline.data.decode import centre_boxes, decode, padded_boxes, random_boxes
from pipeline.data.mixing import mix_groups, soft_labels
from pipeline.data.normalise import normalised
from pipeline.data.order import evaluation_samples, steps_per_epoch, training_samples
from pipeline.data.prefetch import Prefetch
from pipeline.data.random import ERASE, key
from pipeline.errors import InputError
from pipeline.recipe.augment import AugmentSection
from pipeline.recipe.data import DataSection
from pipeline.topology import Topology, share_cpus


@dataclass(frozen=True)
class Batch:
    """Normalised pictures float32 [B, 3, H, W] (channels last in memory) and what they should be called.

    `targets` are probabilities [B, classes] in training, labels int64 [B] in evaluation.
    """

    images: torch.Tensor
    targets: torch.Tensor
    samples: np.ndarray  # int64 [B]: which samples of the split these are

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class _HostBatch:
    """What the decoding thread hands over: pinned uint8 [B, H, W, 3] and labels."""

    pictures: torch.Tensor
    labels: torch.Tensor
    samples: np.ndarray
    step: int
    part: int  # which micro-batch of the step


class _Pictures:
    """One split, opened and checked, and the way of its pictures from the file to the device."""

    def __init__(self, section: DataSection, split: str, topology: Topology):
        self.section = section
        self.topology = topology
        self.threads = section.workers or share_cpus(topology)
        self.beton = open_split(section, split)
        self.mean = 255 * torch.tensor(section.mean, device=topology.device)[:, None, None]
        self.std = 255 * torch.tensor(section.std, device=topology.device)[:, None, None]

    def read(self, samples: np.ndarray, boxes: np.ndarray, step: int = 0, part: int = 0) -> _HostBatch:
        side, pin = self.section.image_size, self.topology.device.type == "cuda"
        pictures = torch.empty((len(samples), side, side, 3), dtype=torch.uint8, pin_memory=pin)
        decode(self.beton, samples, boxes, pictures.numpy(), self.threads)
        return _HostBatch(pictures, torch.from_numpy(self.beton.label[samples]), samples, step, part)

    def normalised(self, pictures: torch.Tensor) -> torch.Tensor:
        """uint8 [B, H, W, 3] on the host to float32 [B, 3, H, W] on the device, channels last."""
        return normalised(pictures, self.mean, self.std)

    def prefetch(self, batches: Iterator[_HostBatch]) -> Prefetch[_HostBatch]:
        return Prefetch(batches, self.section.batches_ahead)


class TrainLoader:
    """Training batches of one rank. What they hold depends on (seed, epoch, step) alone, never on the world size."""

    def __init__(
        self,
        section: DataSection,
        augment: AugmentSection,
        global_batch: int,
        accumulation: int,
        seed: int,
        topology: Topology,
    ):
        self.pictures = _Pictures(section, section.train_split, topology)
        self.section, self.augment, self.seed, self.topology = section, augment, seed, topology
        self.global_batch, self.accumulation = global_batch, accumulation
        self.share = global_batch // topology.world // accumulation  # pictures in a micro-batch
        self.steps = steps_per_epoch(len(self.pictures.beton), global_batch)
        self.augmentation = augmentation(augment, section.mean)
        self._check_padding()
        if self.steps == 0:
            raise InputError(
                f"train.global_batch {global_batch} exceeds the {len(self.pictures.beton)} samples of split "
                f"{section.train_split!r} in {section.path}"
            )

    def batches(self, epoch: int, first_step: int = 0) -> "_Stream":
        """`accumulation` micro-batches a step, from `first_step` of the epoch on. Use it in a `with` block."""
        return _Stream(self.pictures.prefetch(self._read(epoch, first_step)), lambda host: self._finish(host, epoch))

    def _read(self, epoch: int, first_step: int) -> Iterator[_HostBatch]:
        """In the decoding thread: crop, flip and policy, on uint8 pictures."""
        beton = self.pictures.beton
        order = training_samples(
            len(beton), self.seed, epoch, self.global_batch, self.topology.rank, self.topology.world, first_step
        )
        for step, row in enumerate(order, first_step):
            for part, samples in enumerate(row.reshape(self.accumulation, self.share)):
                host = self.pictures.read(samples, self._boxes(samples, epoch), epoch * self.steps + step, part)
                self.augmentation(host.pictures.numpy(), samples, self.seed, epoch, self.pictures.threads)
                yield host

    def _boxes(self, samples: np.ndarray, epoch: int) -> np.ndarray:
        beton, augment = self.pictures.beton, self.augment
        sizes = (samples, beton.height, beton.width)
        if augment.crop == "padded":
            side = self.section.image_size
            return padded_boxes(*sizes, side, augment.padding, self.seed, epoch, augment.hflip)
        return random_boxes(*sizes, self.seed, epoch, augment.scale, augment.ratio, augment.hflip)

    def _check_padding(self) -> None:
        beton, side, border = self.pictures.beton, self.section.image_size, 2 * self.augment.padding
        smallest = int(min(beton.height.min(), beton.width.min()))
        if self.augment.crop == "padded" and smallest + border < side:
            raise InputError(
                f"augment.padding {self.augment.padding}: {beton.path} has a picture of {smallest} pixels, too small "
                f"to cut data.image_size {side} out of; {-(-(side - smallest) // 2)} would do"
            )

    def _finish(self, host: _HostBatch, epoch: int) -> Batch:
        """On the device: normalise, erase, mix."""
        augment, device = self.augment, self.topology.device
        images = self.pictures.normalised(host.pictures)
        if augment.re_prob > 0:
            streams = [key(self.seed, epoch, sample, ERASE) for sample in host.samples]
            erase(images, streams, augment.re_prob, augment.re_count, augment.re_mode)
        labels = host.labels.to(device, non_blocking=True)
        targets = soft_labels(labels, self.section.num_classes, augment.smoothing)
        if augment.mixing:
            first = (self.topology.rank * self.accumulation + host.part) * self.share // augment.mix_group
            targets = mix_groups(images, targets, augment, self.seed, host.step, first)
        return Batch(images, targets, host.samples)


class EvalLoader:
    """Every sample of the evaluation split on exactly one rank: nothing padded, nothing dropped, nothing twice.

    Each rank has the same number of batches, the last of which may be empty: sharded engines meet at every forward.
    """

    def __init__(self, section: DataSection, batch: int, topology: Topology):
        self.pictures = _Pictures(section, section.eval_split, topology)
        self.section, self.batch, self.topology = section, batch, topology

    def __len__(self) -> int:
        return len(self.pictures.beton)

    def batches(self) -> "_Stream":
        return _Stream(self.pictures.prefetch(self._read()), self._finish)

    def _read(self) -> Iterator[_HostBatch]:
        beton = self.pictures.beton
        samples = evaluation_samples(len(beton), self.topology.rank, self.topology.world)
        most = -(-len(beton) // self.topology.world)  # on rank 0
        for start in range(0, most, self.batch):
            chosen = samples[start : start + self.batch]
            yield self.pictures.read(chosen, centre_boxes(chosen, beton.height, beton.width, self.section.crop_pct))

    def _finish(self, host: _HostBatch) -> Batch:
        labels = host.labels.to(self.topology.device, non_blocking=True)
        return Batch(self.pictures.normalised(host.pictures), labels, host.samples)


class _Stream:
    """Host batches from the thread, finished one by one on the device as they are asked for."""

    def __init__(self, hosts: Prefetch[_HostBatch], finish: Callable[[_HostBatch], Batch]):
        self._hosts, self._finish = hosts, finish

    def __iter__(self) -> "_Stream":
        return self

    def __next__(self) -> Batch:
        return self._finish(next(self._hosts))

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_) -> None:
        self._hosts.close()

    @property
    def waited(self) -> float:
        """Seconds so far in which the step had no decoded batch."""
        return self._hosts.waited


def open_split(section: DataSection, split: str) -> Beton:
    """A split's file, refused unless it is what the manifest and the recipe say."""
    folder = Path(section.path)
    manifest = read_manifest(folder)
    beton = open_beton(split_path(folder, split, manifest))
    check_counts(beton.path, beton.label, manifest.splits[split])
    if len(manifest.classes) > section.num_classes:
        raise InputError(
            f"data.num_classes {section.num_classes}: {folder} has {len(manifest.classes)} classes, of which "
            f"labels go up to {len(manifest.classes) - 1}"
        )
    if not (beton.label.min() >= 0 and beton.label.max() < section.num_classes):
        raise InputError(f"{beton.path}: labels reach {beton.label.max()}, data.num_classes is {section.num_classes}")
    return beton
