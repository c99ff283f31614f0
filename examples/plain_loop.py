"""torchvision's ResNet-18 in a plain loop that continues where it stopped: [torchrun] plain_loop.py FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torchvision.models import resnet18

import widemix


def train(folder: Path, state: Path, epochs=90, save_every=1000, batch_size=128, image_size=224) -> float:
    """Train, continuing from `state`; returns top-1 in percent. `batch_size` is of all ranks, however many."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    keys = {"batch_size": batch_size // world, "image_size": image_size}
    loader = widemix.Loader(folder, "train", auto_augment="rand-m9-inc1", re_prob=0.25, **keys)
    model = resnet18(num_classes=len(loader.manifest.classes)).to(loader.topology.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)
    parts, steps = {"model": model, "optimizer": optimizer, "loader": loader}, 0
    for name, saved in torch.load(state, "cpu").items() if state.exists() else ():
        parts[name].load_state_dict(saved)
    network = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    for _ in range(loader.state_dict()["epoch"], epochs):  # each iteration is the next epoch, or the rest of one
        for images, labels in loader:
            torch.nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (steps := steps + 1) % save_every == 0 and rank == 0:
                torch.save({name: part.state_dict() for name, part in parts.items()}, state)
    held_out = widemix.Loader(folder, list(loader.manifest.splits)[-1], is_training=False, **keys)
    with torch.no_grad():
        right = sum((model.eval()(x).argmax(1) == y).sum() for x, y in held_out)
    dist.all_reduce(right) if world > 1 else None
    return 100 * int(right) / held_out.samples


if __name__ == "__main__":
    dist.init_process_group() if dist.is_torchelastic_launched() else None
    print(f"top-1 {train(Path(sys.argv[1]), Path('state.pt')):.2f} %")
