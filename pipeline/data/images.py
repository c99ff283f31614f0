"""Prepared images to batches: decoded and augmented on the CPU, finished on the device."""

import copy
import sys

import numpy as np
import torch
from typing_extensions import override

from widemix.data.augment.batch import build_augmentation
from widemix.data.augment.erase import sample_erasing
from widemix.data.decode import Decoder, centre_boxes, cubic, padded_boxes, random_boxes
from widemix.data.finish import Finish
from widemix.data.mixup import Mixture
from widemix.data.normalise import empty_host
from widemix.data.random import REPLACE, key, uniform
from widemix.data.split import open_split, split_checksums
from widemix.distributed.topology import Topology, share_cpus
from widemix.errors import InputError
from widemix.formats.beton import open_beton
from widemix.formats.sources import describe_sample
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
        self._finish = Finish(section, topology.device)

    @property
    def descriptor(self) -> int:
        """The decoder's."""
        return self.decoder.descriptor

    def read(self, view_ids: np.ndarray, step_view_ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        """Images on the host, uint8 [B, side, side, 3], pinned where there is a GPU; and their view ids."""
        images = self._empty(len(view_ids))
        self.decoder.read(*self._request(view_ids, epoch), images.numpy(), self.threads)
        return images, view_ids

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

    def finish(
        self,
        images: torch.Tensor,
        view_ids: np.ndarray,
        epoch: int,
        dtype: torch.dtype = torch.float32,
        mixture: Mixture | None = None,
        to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The images that `read` returned, finished: [B, 3, side, side] on the device, channels last in memory.

        They are written to `to` if it is given, float32 [B, side, side, 3].
        """
        return self._finish(images, dtype, None, mixture, to)

    def host_bytes(self, count: int) -> int:
        """Host memory of `count` decoded images."""
        return count * self.section.image_size**2 * 3

    def boxes(self, view_ids: np.ndarray, epoch: int) -> np.ndarray:
        """The crop of each image and whether it is flipped: int64 [B, 5], as in `decode.random_boxes`."""
        return centre_boxes(view_ids, self.file.height, self.file.width, self.section.crop_pct)

    def cubic(self, view_ids: np.ndarray, epoch: int) -> np.ndarray:
        """Which images are resized bicubically: bool [B]."""
        return np.full(len(view_ids), self.section.interpolation != "bilinear")

    def empty(self, *shape: int) -> torch.Tensor:
        """Host memory, uint8, pinned where there is a GPU."""
        if self.device.type == "cuda":
            return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        return empty_host(shape, np.uint8)

    def _empty(self, count: int) -> torch.Tensor:
        return self.empty(count, self.section.image_size, self.section.image_size, 3)

    def _request(self, view_ids: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the decoder is asked for: samples, their boxes, and which are resized bicubically."""
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
    def read(self, view_ids: np.ndarray, step_view_ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        images, decoded_ids = self._empty(len(view_ids)), view_ids.copy()
        request = self._request(view_ids, epoch)
        for b, reason in self.decoder.try_read(*request, images.numpy(), self.threads).items():
            message = self.decoder.describe_damage(int(request[0][b]), reason)
            if self.section.on_corrupt == "error":
                raise InputError(f"{message}; --data.on_corrupt replace uses another in its place")
            decoded_ids[b] = self._replace(int(view_ids[b]), epoch, images[b : b + 1].numpy(), message)
        self.augmentation(images.numpy(), decoded_ids, self.seed, epoch, self.threads)
        return images, decoded_ids

    @override
    def finish(
        self,
        images: torch.Tensor,
        view_ids: np.ndarray,
        epoch: int,
        dtype: torch.dtype = torch.float32,
        mixture: Mixture | None = None,
        to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        erasing = None
        if self.augment.re_prob > 0:
            erasing = sample_erasing(view_ids, self.section.image_size, self.augment, self.seed, epoch)
        return self._finish(images, dtype, erasing, mixture, to)

    @override
    def boxes(self, view_ids: np.ndarray, epoch: int) -> np.ndarray:
        augment = self.augment
        sizes = (view_ids, self.file.height, self.file.width)
        if augment.crop == "padded":
            side = self.section.image_size
            return padded_boxes(*sizes, side, augment.padding, self.seed, epoch, augment.hflip)
        return random_boxes(*sizes, self.seed, epoch, augment.scale, augment.ratio, augment.hflip)

    @override
    def cubic(self, view_ids: np.ndarray, epoch: int) -> np.ndarray:
        return cubic(view_ids, self.section.interpolation, self.seed, epoch)

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
