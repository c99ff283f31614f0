"""Prepared pictures to uint8 batches: which box of each, decoded, resized, flipped, and the policy applied."""

import sys

import numpy as np
import torch

from pipeline.data.augment.batch import augmentation
from pipeline.data.augment.erase import erase
from pipeline.data.decode import Decoder, centre_boxes, cubic, padded_boxes, random_boxes
from pipeline.data.normalise import fresh, normalised
from pipeline.data.random import REPLACE, key, uniform
from pipeline.data.split import open_split
from pipeline.distributed.topology import Topology, share_cpus
from pipeline.errors import InputError
from pipeline.formats.beton import open_beton
from pipeline.recipe.augment import AugmentSection
from pipeline.recipe.data import DataSection

ATTEMPTS = 10  # others looked at in the place of a picture that cannot be read


class Pictures:
    """One split to evaluate on, opened and checked: the centre crop of every picture."""

    def __init__(self, section: DataSection, split: str, topology: Topology):
        self.section, self.device = section, topology.device
        self.threads = section.workers or share_cpus(topology)
        self.file = open_split(section, split, open_beton)
        self.decoder = Decoder(self.file)
        self.mean = 255 * torch.tensor(section.mean, device=topology.device)[:, None, None]
        self.std = 255 * torch.tensor(section.std, device=topology.device)[:, None, None]

    def read(self, draws: np.ndarray, together: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        """Pictures on the host, uint8 [B, side, side, 3], pinned where there is a GPU; and the draws they show."""
        pictures = self._empty(len(draws))
        self.decoder.read(*self._asked(draws, epoch), pictures.numpy(), self.threads)
        return pictures, draws

    def host_bytes(self, count: int) -> int:
        return count * self.section.image_size**2 * 3

    def _empty(self, count: int) -> torch.Tensor:
        shape = count, self.section.image_size, self.section.image_size, 3
        if self.device.type == "cuda":
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        return fresh(shape, np.uint8)

    def _asked(self, draws: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The samples, their boxes, and which of these are resized bicubically."""
        return draws % len(self.file), self.boxes(draws, epoch), self.cubic(draws, epoch)

    def cubic(self, draws: np.ndarray, epoch: int) -> np.ndarray:
        """Which pictures are resized bicubically: bool [B]."""
        return np.full(len(draws), self.section.interpolation != "bilinear")

    def finish(self, pictures: torch.Tensor, draws: np.ndarray, epoch: int) -> torch.Tensor:
        """What `read` gave, normalised: float32 [B, 3, side, side] on the device, channels last."""
        return normalised(pictures, self.mean, self.std)

    def boxes(self, draws: np.ndarray, epoch: int) -> np.ndarray:
        """Which part of each picture is seen: int64 [B, 5], as `decode` takes them."""
        return centre_boxes(draws, self.file.height, self.file.width, self.section.crop_pct)


class AugmentedPictures(Pictures):
    """A split to train on: every picture cropped, flipped, augmented and erased by (seed, epoch, draw) alone."""

    def __init__(self, section: DataSection, augment: AugmentSection, seed: int, topology: Topology):
        super().__init__(section, section.train_split, topology)
        self.augment, self.seed = augment, seed
        self.augmentation = augmentation(augment, section.mean)
        self._check_padding()

    def read(self, draws: np.ndarray, together: np.ndarray, epoch: int) -> tuple[torch.Tensor, np.ndarray]:
        pictures, shown = self._empty(len(draws)), draws.copy()
        asked = self._asked(draws, epoch)
        for place, why in self.decoder.try_read(*asked, pictures.numpy(), self.threads).items():
            damage = self.decoder.damage(int(asked[0][place]), why)
            if self.section.on_corrupt == "error":
                raise InputError(f"{damage}; --data.on_corrupt replace goes on without it")
            shown[place] = self._replace(int(draws[place]), epoch, pictures[place : place + 1].numpy(), damage)
        self.augmentation(pictures.numpy(), shown, self.seed, epoch, self.threads)
        return pictures, shown

    def _replace(self, draw: int, epoch: int, picture: np.ndarray, damage: str) -> int:
        """Show another sample in the place of a damaged one: a function of (seed, epoch, draw), as the order is."""
        count, stream = len(self.file), key(self.seed, epoch, draw, REPLACE)
        for attempt in range(ATTEMPTS):
            sample = int(uniform(stream, attempt) * count)
            other = np.array([draw - draw % count + sample])
            if not self.decoder.try_read(*self._asked(other, epoch), picture, threads=1):
                print(f"warning: {damage}; sample {sample} takes its place", file=sys.stderr)
                return int(other[0])
        raise InputError(f"{damage}; nor can {ATTEMPTS} others that were to take its place")

    def finish(self, pictures: torch.Tensor, draws: np.ndarray, epoch: int) -> torch.Tensor:
        images = super().finish(pictures, draws, epoch)
        augment = self.augment
        if augment.re_prob > 0:
            erase(images, draws, self.seed, epoch, augment.re_prob, augment.re_count, augment.re_mode)
        return images

    def boxes(self, draws: np.ndarray, epoch: int) -> np.ndarray:
        augment = self.augment
        sizes = (draws, self.file.height, self.file.width)
        if augment.crop == "padded":
            side = self.section.image_size
            return padded_boxes(*sizes, side, augment.padding, self.seed, epoch, augment.hflip)
        return random_boxes(*sizes, self.seed, epoch, augment.scale, augment.ratio, augment.hflip)

    def cubic(self, draws: np.ndarray, epoch: int) -> np.ndarray:
        return cubic(draws, self.section.interpolation, self.seed, epoch)

    def _check_padding(self) -> None:
        beton, side, border = self.file, self.section.image_size, 2 * self.augment.padding
        smallest = int(min(beton.height.min(), beton.width.min()))
        if self.augment.crop == "padded" and smallest + border < side:
            raise InputError(
                f"augment.padding {self.augment.padding}: {beton.path} has a picture of {smallest} pixels, too small "
                f"to cut data.image_size {side} out of; {-(-(side - smallest) // 2)} would do"
            )
