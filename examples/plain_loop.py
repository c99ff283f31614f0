"""torchvision's ResNet-18 in a plain PyTorch loop that continues where it stopped: plain_loop.py FOLDER."""

import sys
from pathlib import Path

import torch
from torch import nn
from torchvision.models import resnet18

import widemix


def train(folder: Path, state: Path, epochs=90, stop_after=0, batch_size=128, image_size=224) -> float:
    """Train, save every 1000 steps, continue from `state`; returns top-1 in percent."""
    loader = widemix.Loader(folder, "train", batch_size, image_size, auto_augment="rand-m9-inc1", re_prob=0.25)
    model = resnet18(num_classes=len(loader.manifest.classes)).to(loader.topology.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if state.exists():
        for name, saved in torch.load(state).items():
            parts[name].load_state_dict(saved)
    steps = 0
    for epoch in range(loader.state_dict()["epoch"], epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (steps := steps + 1) % 1000 == 0 or steps == stop_after:
                torch.save({name: part.state_dict() for name, part in parts.items()}, state)
            if steps == stop_after:
                return float("nan")
    held_out = list(loader.manifest.splits)[-1]
    val, model = widemix.Loader(folder, held_out, batch_size, image_size, is_training=False), model.eval()
    with torch.no_grad():
        return 100 * sum(int((model(x).argmax(1) == y).sum()) for x, y in val) / val.samples


if __name__ == "__main__":
    print(f"top-1 {train(Path(sys.argv[1]), Path('state.pt')):.2f} %")
