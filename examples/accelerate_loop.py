"""Hugging Face's Accelerate: `accelerate launch accelerate_loop.py FOLDER`. Its state holds the loader's position."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torchvision.models import resnet18

import widemix


def train(folder: Path, to: Path, epochs: int = 90, batch_size: int = 128, image_size: int = 224) -> list[float]:
    """Train, save the state in `to` every 1000 steps and at the end; returns the losses. Continues from `to`."""
    accelerator, losses = Accelerator(), []
    loader = widemix.Loader(folder, "train", batch_size, image_size, device=accelerator.device)
    model = resnet18(num_classes=len(loader.manifest.classes))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    accelerator.register_for_checkpointing(loader)  # each rank reads its own part: the loader is not to be prepared
    if to.exists():
        accelerator.load_state(str(to))
    for epoch in range(loader.state_dict()["epoch"], epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) % 1000 == 0:
                accelerator.save_state(str(to))
    accelerator.save_state(str(to))
    return losses


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path("runs/accelerate"))
