"""Predictions of any network for pictures in memory: the transforms, and so the logits, of its evaluation."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from pipeline.data.decode import centre_boxes
from pipeline.data.normalise import normalise, per_channel
from pipeline.data.pixel_order import permute_pixels, pixel_permutation
from pipeline.data.precision import DTYPES
from pipeline.data.with_pillow import resized_box
from pipeline.distributed.topology import read_topology, set_matmul_precision
from pipeline.engine.precision import autocast
from pipeline.errors import InputError
from pipeline.recipe.data import DataSection
from pipeline.training.networks import Network


class Predictor:
    """Gives the logits and probabilities of a network for pictures of any size; on the GPU if there is one.

    `InputError` for a network that reads text.
    """

    def __init__(self, network: Network):
        if not isinstance(network.data, DataSection):
            raise InputError(f"{network.name}: reads {network.data.kind}; predictions are for pictures")
        self.network, self.section, self.device = network, network.data, read_topology().device
        train = network.recipe.train if network.recipe else None
        if train:
            set_matmul_precision(train.matmul_precision)
        self.dtype = DTYPES[train.precision if train else "fp32"]
        self.sigmoid = train is not None and "sigmoid" in (train.loss, self.section.targets)
        self.module = network.module.eval().to(self.device)
        self._mean, self._std = (
            per_channel(values).to(self.device) for values in (self.section.mean, self.section.std)
        )
        self._pixels = pixel_permutation(self.section, self.device)

    def inputs(self, pictures: Sequence[np.ndarray]) -> torch.Tensor:
        """Return what the network gets for RGB pictures, uint8 [height, width, 3] each: [B, 3, side, side]."""
        side, cubic = self.section.image_size, self.section.interpolation != "bilinear"
        height, width = (np.array([picture.shape[axis] for picture in pictures], np.int64) for axis in (0, 1))
        boxes = centre_boxes(np.arange(len(pictures)), height, width, self.section.crop_pct)
        cropped = np.empty((len(pictures), side, side, 3), np.uint8)
        for place, picture, box in zip(cropped, pictures, boxes, strict=True):
            place[:] = resized_box(Image.fromarray(picture), box, cubic, side)
        images = normalise(torch.from_numpy(cropped), self._mean, self._std).to(self.dtype)
        return permute_pixels(images, self._pixels)

    @torch.inference_mode()
    def logits(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Return the logits for RGB pictures, uint8 [height, width, 3] each: float32 [B, classes]."""
        with autocast(self.device, self.dtype):
            return self.module(self.inputs(pictures)).float().cpu().numpy()

    def probabilities(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Return the probabilities, float32 [B, classes]: softmax, or sigmoid where `train.loss` is that.

        With `data.targets` regression the numbers themselves, float32 [B, targets].
        """
        logits = torch.from_numpy(self.logits(pictures))
        if self.section.targets == "regression":
            return logits.numpy()
        return (logits.sigmoid() if self.sigmoid else logits.softmax(1)).numpy()

    def class_name(self, label: int) -> str:
        """Return the name of a class, or its number where the network's classes have no names."""
        return self.network.classes[label] if label < len(self.network.classes) else str(label)
