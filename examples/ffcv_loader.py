"""FFCV's own Loader and beton, with widemix's pixels, RandAugment, erasing and order: ffcv_loader.py FILE."""

import sys
from pathlib import Path

import torch
from ffcv.fields.decoders import IntDecoder
from ffcv.loader import Loader
from ffcv.transforms import Squeeze, ToDevice, ToTensor

from widemix.ffcv import Normalize, Order, RandAugment, RandomErasing, RandomResizedCrop, resume


def open_loader(beton: Path, batch_size: int = 128, image_size: int = 224, workers: int = 8, device="cpu") -> Loader:
    """Batches of (images float32 [B, 3, H, W], labels int64 [B])."""
    device = torch.device(device)
    image = [
        RandomResizedCrop(image_size, scale=(0.08, 1)),
        RandAugment("rand-m9-mstd0.5-inc1"),
        Normalize(device=device),
        RandomErasing(0.25),
    ]
    label = [IntDecoder(), ToTensor(), Squeeze((1,)), ToDevice(device)]
    pipelines = {"image": image, "label": label, "segments": None}  # of files of `widemix prep`, not read by FFCV
    return Loader(str(beton), batch_size, num_workers=workers, order=Order(seed=0), pipelines=pipelines)


if __name__ == "__main__":
    loader = open_loader(Path(sys.argv[1]))
    resume(loader, epoch=3, step=10)  # where training goes on
    for images, labels in loader:
        print(tuple(images.shape), labels[:5].tolist())
