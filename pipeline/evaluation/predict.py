"""Predictions of any network for images in memory: the transforms, and so the logits, of its evaluation."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from widemix.data.decode import centre_boxes, resized_box
from widemix.data.normalise_and_mix import normalise, per_channel, permute_pixels, pixel_permutation
from widemix.data.precision import DTYPES, autocast
from widemix.distributed.topology import read_topology, set_matmul_precision
from widemix.errors import InputError
from widemix.evaluation.networks import Network
from widemix.recipe.data import DataSection


class Predictor:
    """Gives the logits and probabilities of a network for images of any size; on the GPU if there is one.

    `InputError` for a network that reads text.
    """

    def __init__(self, network: Network):
        if not isinstance(network.data, DataSection):
            raise InputError(f"{network.name}: reads {network.data.kind}; predictions are for images")
        self.network, self.section, self.device = network, network.data, read_topology().device
        train = network.recipe.train if network.recipe else None
        if train:
            set_matmul_precision(train.matmul_precision)
        self.dtype = DTYPES[train.precision if train else "fp32"]
        self.sigmoid = network.loss == "sigmoid" or self.section.targets == "multilabel"
        self.module = network.module.eval().to(self.device)
        self._mean, self._std = (
            per_channel(values).to(self.device) for values in (self.section.mean, self.section.std)
        )
        self._pixels = pixel_permutation(self.section, self.device)

    def inputs(self, images: Sequence[np.ndarray]) -> torch.Tensor:
        """Return what the network gets for RGB images, uint8 [height, width, 3] each: [B, 3, side, side]."""
        side, cubic = self.section.image_size, self.section.interpolation != "bilinear"
        height, width = (np.array([image.shape[axis] for image in images], np.int64) for axis in (0, 1))
        boxes = centre_boxes(np.arange(len(images)), height, width, self.section.crop_pct)
        cropped = np.empty((len(images), side, side, 3), np.uint8)
        for place, image, box in zip(cropped, images, boxes, strict=True):
            place[:] = resized_box(Image.fromarray(image), box, cubic, side)
        normalised = normalise(torch.from_numpy(cropped), self._mean, self._std).to(self.dtype)
        return permute_pixels(normalised, self._pixels)

    @torch.inference_mode()
    def logits(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Return the logits for RGB images, uint8 [height, width, 3] each: float32 [B, classes]."""
        with autocast(self.device, self.dtype):
            return self.module(self.inputs(images)).float().cpu().numpy()

    def probabilities(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Return the probabilities, float32 [B, classes]: softmax, or sigmoid where `train.loss` is that.

        With `data.targets` regression the numbers themselves, float32 [B, targets].
        """
        logits = torch.from_numpy(self.logits(images))
        if self.section.targets == "regression":
            return logits.numpy()
        return (logits.sigmoid() if self.sigmoid else logits.softmax(1)).numpy()

    def class_name(self, label: int) -> str:
        """Return the name of a class, or its number where the network's classes have no names."""
        return self.network.classes[label] if label < len(self.network.classes) else str(label)
