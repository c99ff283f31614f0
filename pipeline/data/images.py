"""Prepared images to batches: decoded and augmented on the CPU, normalised and mixed on the device."""

import copy
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from widemix.data.augment.batch import build_augmentation
from widemix.data.augment.erase import Erasing, sample_erasing
from widemix.data.batches import HostBatch, StepPart
from widemix.data.decode import Decoder, centre_boxes, cubic, padded_boxes, random_boxes
from widemix.data.normalise_and_mix import NormaliseAndMix, empty_host
from widemix.data.random import REPLACE, key, uniform
from widemix.data.split import open_split, split_checksums
from widemix.distributed.topology import Topology, share_cpus
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.formats.sources import damaged_sample, describe_sample
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection
from widemix.terminal import print

ATTEMPTS = 10  # samples tried as the replacement of one that cannot be read


class Images:
    """One split to evaluate on, opened and checked: the centre crop of every image."""

    def __init__(self, section: DataSection, split: str, topology: Topology):
        self.section, self.device = section, topology.device
        self.threads = section.workers or share_cpus(topology)
        self.file = open_split(section, split, open_beton)
        self.decoder = Decoder(self.file, split_checksums(section, self.file))
        self._normalise_and_mix = NormaliseAndMix(section, topology.device, threads=self.threads)

    @property
    def descriptor(self) -> int:
        """The decoder's."""
        return self.decoder.descriptor

    def read(self, part: StepPart) -> HostBatch:
        """As `Source.read`; `InputError` names a damaged image."""
        view_ids, images = part.view_ids, self._empty(len(part.view_ids))
        self.decoder.read(*self._request(view_ids, part.epoch), images.numpy(), self.threads)
        return HostBatch(images, self.labels(view_ids), view_ids, part.epoch)

    def labels(self, view_ids: np.ndarray) -> torch.Tensor:
        """Labels int64 [B], or targets float32 [B, targets]. `InputError` for labels other than 0 and 1."""
        samples = view_ids % len(self.file)
        if self.section.targets == "class":
            return torch.from_numpy(self.file.label[samples].astype(np.int64))
        targets = self.decoder.targets(samples)
        if self.section.targets == "multilabel" and not np.isin(targets, (0, 1)).all():
            b, number = np.argwhere(~np.isin(targets, (0, 1)))[0]
            which = f"{self.file.path}: {describe_sample(self.file.path, int(samples[b]))}"
            raise InputError(
                f"{which} has {targets[b, number]:g} as target {number}; data.targets multilabel takes 0 and 1"
            )
        return torch.from_numpy(targets)

    def to_device(self, host: HostBatch) -> torch.Tensor:
        """As `Source.to_device`: [B, 3, side, side], channels last in memory."""
        erasing = self.erasing(host.view_ids, host.epoch)
        return self._normalise_and_mix(host.inputs, host.dtype, erasing, host.mixture, host.to)

    def host_bytes(self, count: int) -> int:
        """Host memory of `count` decoded images."""
        return count * self.section.image_size**2 * 3

    def boxes(self, view_ids: np.ndarray, epoch: int) -> np.ndarray:
        """The crop of each image and whether it is flipped: int64 [B, 5], as in `decode.random_boxes`."""
        return centre_boxes(view_ids, self.file.height, self.file.width, self.section.crop_pct)

    def cubic(self, view_ids: np.ndarray, epoch: int) -> np.ndarray:
        """Which images are resized bicubically: bool [B]."""
        return np.full(len(view_ids), self.section.interpolation != "bilinear")

    def erasing(self, view_ids: np.ndarray, epoch: int) -> Erasing | None:
        """Return the boxes of the images to erase."""
        return None

    def empty(self, *shape: int) -> torch.Tensor:
        """Host memory, uint8, pinned where there is a GPU."""
        if self.device.type == "cuda":
            return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        return empty_host(shape, np.uint8)

    def _empty(self, count: int) -> torch.Tensor:
        return self.empty(count, self.section.image_size, self.section.image_size, 3)

    def _request(self, view_ids: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the decoder's arguments: samples, their boxes, and which are resized bicubically."""
        return view_ids % len(self.file), self.boxes(view_ids, epoch), self.cubic(view_ids, epoch)


class AugmentedImages(Images):
    """A split to train on: random crop, flip, augmentation and erasing, keyed by (seed, epoch, view id)."""

    def __init__(self, section: DataSection, augment: AugmentSection, seed: int, topology: Topology):
        super().__init__(section, section.train_split, topology)
        self.seed = seed
        self._augment_by(section, augment)

    def of_same_file(self, section: DataSection, augment: AugmentSection) -> "AugmentedImages":
        """The same open split in another size, and augmented in another way."""
        other = copy.copy(self)
        other._augment_by(section, augment)
        return other

    @override
    def read(self, part: StepPart) -> HostBatch:
        """As `Source.read`; a damaged image is named, or replaced by another one, as `on_corrupt` says."""
        view_ids, epoch = part.view_ids.copy(), part.epoch
        images, request = self._empty(len(view_ids)), self._request(view_ids, epoch)
        damaged = self.decoder.try_read(*request, images.numpy(), self.threads)
        for b, reason in damaged.items():
            message = damaged_sample(self.file.path, int(request[0][b]), reason)
            if self.section.on_corrupt == "error":
                raise InputError(f"{message}; --data.on_corrupt replace uses another in its place")
            view_ids[b] = self._replace(int(view_ids[b]), epoch, images[b : b + 1].numpy(), message)
        self.augmentation(images.numpy(), view_ids, self.seed, epoch, self.threads)
        return HostBatch(images, self.labels(view_ids), view_ids, epoch, replaced=len(damaged))

    @override
    def boxes(self, view_ids: np.ndarray, epoch: int) -> np.ndarray:
        """Random crops of the epoch, and whether they are flipped: int64 [B, 5], as in `decode.random_boxes`."""
        augment = self.augment
        sizes = (view_ids, self.file.height, self.file.width)
        if augment.crop == "padded":
            side = self.section.image_size
            return padded_boxes(*sizes, side, augment.padding, self.seed, epoch, augment.hflip)
        return random_boxes(*sizes, self.seed, epoch, augment.scale, augment.ratio, augment.hflip)

    @override
    def cubic(self, view_ids: np.ndarray, epoch: int) -> np.ndarray:
        """Which images are resized bicubically: bool [B]; with `random` about half of them, others in each epoch."""
        return cubic(view_ids, self.section.interpolation, self.seed, epoch)

    @override
    def erasing(self, view_ids: np.ndarray, epoch: int) -> Erasing | None:
        """Return the boxes to erase in this epoch, and what fills them; None without random erasing."""
        if self.augment.re_prob == 0:
            return None
        return sample_erasing(view_ids, self.section.image_size, self.augment, self.seed, epoch)

    def _augment_by(self, section: DataSection, augment: AugmentSection) -> None:
        self.section, self.augment = section, augment
        self.augmentation = build_augmentation(augment, section.mean, section.interpolation)
        self._check_padding()

    def _replace(self, view_id: int, epoch: int, image: np.ndarray, message: str) -> int:
        """Decode another sample in place of a damaged one, chosen by (seed, epoch, view id); its view id."""
        count, stream = len(self.file), key(self.seed, epoch, view_id, REPLACE)
        for attempt in range(ATTEMPTS):
            sample = int(uniform(stream, attempt) * count)
            other = np.array([view_id - view_id % count + sample])
            if not self.decoder.try_read(*self._request(other, epoch), image, threads=1):
                print(f"warning: {message}; replaced by sample {sample}", file=sys.stderr)
                return int(other[0])
        raise InputError(f"{message}; {ATTEMPTS} other samples that could replace it cannot be read either")

    def _check_padding(self) -> None:
        beton, side, border = self.file, self.section.image_size, 2 * self.augment.padding
        smallest = int(min(beton.height.min(), beton.width.min()))
        if self.augment.crop == "padded" and smallest + border < side:
            raise InputError(
                f"augment.padding {self.augment.padding}: {beton.path} has an image of {smallest} pixels, too small "
                f"for a crop of data.image_size {side}; take a padding of at least {-(-(side - smallest) // 2)}"
            )


View = tuple[DataSection, AugmentSection]


class Views:
    """A split to train on, V views of each sample. View k of a sample has the view id sample + count x k.

    Each has its own size, crop and augmentation, from one decoding, as DINO's global and local crops (Caron et al.
    2021) and MoCo's pairs (He et al. 2020).

    It is the image of that view id that `AugmentedImages` gives with the view's sections. A batch is one flat
    tensor, which `unpack` divides.
    """

    def __init__(self, views: Sequence[View], seed: int, topology: Topology):
        first = AugmentedImages(*views[0], seed, topology)
        same = [views.index(view) for view in views]  # policies are compiled once for equal views
        opened = {k: first if k == 0 else first.of_same_file(*views[k]) for k in set(same)}
        self.views = [opened[k] for k in same]
        self.file = first.file
        self.sides = [data.image_size for data, _ in views]

    @property
    def descriptor(self) -> int:
        """The one of all views."""
        return self.views[0].descriptor

    @property
    def threads(self) -> int:
        """Those of each view."""
        return self.views[0].threads

    def read(self, part: StepPart) -> HostBatch:
        """As `Source.read`; inputs are all views, uint8 [B x V x H x W x 3], with an H for each view."""
        first, view_ids, epoch = self.views[0], part.view_ids, part.epoch
        flat = first.empty(self.host_bytes(len(view_ids)))
        images = [pixels.numpy() for pixels in self._divide(flat, len(view_ids))]
        ids = self._ids(view_ids)
        boxes = np.stack([view.boxes(each, epoch) for view, each in zip(self.views, ids, strict=True)], axis=1)
        cubic = np.stack([view.cubic(each, epoch) for view, each in zip(self.views, ids, strict=True)], axis=1)
        damaged = first.decoder.try_read_views(view_ids, boxes, cubic, images, first.threads)
        for b, reason in damaged.items():
            raise InputError(damaged_sample(self.file.path, int(view_ids[b]), reason))
        for view, each, pixels in zip(self.views, ids, images, strict=True):
            view.augmentation(pixels, each, view.seed, epoch, view.threads)
        return HostBatch(flat, self.labels(view_ids), view_ids, epoch)

    def labels(self, view_ids: np.ndarray) -> torch.Tensor:
        """As `Images.labels`: the views of a sample have its label."""
        return self.views[0].labels(view_ids)

    def to_device(self, host: HostBatch) -> torch.Tensor:
        """As `Source.to_device`, flat like the inputs; views are not mixed."""
        flat = torch.empty(host.inputs.shape, dtype=torch.float32, device=self.views[0].device)
        parts = (self._divide(tensor, len(host.view_ids)) for tensor in (host.inputs, flat))
        for view, ids, pixels, images in zip(self.views, self._ids(host.view_ids), *parts, strict=True):
            view.to_device(HostBatch(pixels, host.labels, ids, host.epoch, to=images))
        return flat.to(host.dtype)

    def unpack(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The views of a flat batch, by size, in the order of the first view of each: [B, n, 3, H, W] each.

        A batch of one view, `[:, k]`, is channels last in memory.
        """
        groups = self._by_size(flat, len(flat) // self.host_bytes(1))
        return [group.permute(1, 0, 4, 2, 3) for group in groups.values()]

    def host_bytes(self, count: int) -> int:
        """Host memory of the decoded views of `count` samples, which is also how many values they have."""
        return count * sum(3 * side**2 for side in self.sides)

    def _ids(self, view_ids: np.ndarray) -> list[np.ndarray]:
        return [view_ids + len(self.file) * k for k in range(len(self.views))]

    def _by_size(self, flat: torch.Tensor, count: int) -> dict[int, torch.Tensor]:
        """A flat batch of `count` samples as one [n, B, H, H, 3] for each H."""
        sizes = Counter(self.sides)
        parts = flat.split([3 * n * count * side**2 for side, n in sizes.items()])
        pairs = zip(sizes.items(), parts, strict=True)
        return {side: part.view(n, count, side, side, 3) for (side, n), part in pairs}

    def _divide(self, flat: torch.Tensor, count: int) -> list[torch.Tensor]:
        """A flat batch as one [B, H, H, 3] for each view."""
        groups = {side: iter(group) for side, group in self._by_size(flat, count).items()}
        return [next(groups[side]) for side in self.sides]
