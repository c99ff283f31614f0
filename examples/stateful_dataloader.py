"""torchdata's StatefulDataLoader: the loader is an `IterableDataset` with `state_dict` and `load_state_dict`."""

import sys
from pathlib import Path

from torchdata.stateful_dataloader import StatefulDataLoader

import widemix


def open_loader(folder: Path, batch_size: int = 128, image_size: int = 224, **keys) -> StatefulDataLoader:
    """Batches of (images, labels). `batch_size=None`: they are batches already, decoded on the loader's threads."""
    return StatefulDataLoader(widemix.Loader(folder, "train", batch_size, image_size, **keys), batch_size=None)


if __name__ == "__main__":
    loader = open_loader(Path(sys.argv[1]))
    for number, (images, _) in enumerate(loader):
        print(number, tuple(images.shape))
        state = loader.state_dict()  # to be saved; load_state_dict continues with batch `number + 1`
