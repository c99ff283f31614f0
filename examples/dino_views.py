"""DINO's ten crops of an image (Caron et al. 2021), decoded once: dino_views.py FOLDER."""

import sys
from pathlib import Path

import torch

from widemix import Loader, View

LOCAL_CROPS = 8


def open_loader(folder: Path, batch_size: int = 64, image_size: int = 224, local_size: int = 96) -> Loader:
    """Batches of ([large crops [B, 2, 3, H, W], small crops [B, 8, 3, h, w]], labels)."""
    first = View(scale=(0.4, 1), gaussian_blur_prob=1.0)
    second = View(scale=(0.4, 1), gaussian_blur_prob=0.1, solarize_prob=0.2)
    local = View(image_size=local_size, scale=(0.05, 0.4), gaussian_blur_prob=0.5)
    jitter = {"color_jitter": (0.4, 0.4, 0.2, 0.1), "color_jitter_prob": 0.8, "grayscale_prob": 0.2}
    views = [first, second, *[local] * LOCAL_CROPS]
    return Loader(folder, "train", batch_size, image_size, interpolation="bicubic", views=views, **jitter)


def features(network: torch.nn.Module, by_size: list[torch.Tensor]) -> list[torch.Tensor]:
    """The network's output for each size: [B, n, features], one forward pass each."""
    return [network(crops.flatten(0, 1)).unflatten(0, crops.shape[:2]) for crops in by_size]


if __name__ == "__main__":
    for crops, _ in open_loader(Path(sys.argv[1])):
        print([tuple(each.shape) for each in crops])
