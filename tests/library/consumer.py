"""What somebody types who uses the package: `test_reference.py` has mypy check it strictly."""

from pathlib import Path

import torch

import widemix
from widemix import InputError, Loader, Recipe, View


def loaders(folder: Path) -> tuple[Loader, Loader]:
    crops = [View(scale=(0.4, 1)), View(image_size=96, auto_augment="rand-m9-inc1")]
    train = Loader(folder, "train", 32, 224, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25, mixup=0.2, seed=1)
    return train, widemix.Loader(str(folder), "train", 32, views=crops)


def epoch(loader: Loader, network: torch.nn.Module, number: int) -> float:
    total = 0.0
    loader.set_epoch(number)
    for images, labels in loader:
        loss: torch.Tensor = torch.nn.functional.cross_entropy(network(images), labels)
        total += loss.item()
    loader.load_state_dict(loader.state_dict())
    return total / len(loader)


def run(folder: Path) -> dict[str, float]:
    try:
        manifest = widemix.prepare("digits", folder, max_size=0)
    except InputError:
        raise
    recipe: Recipe = widemix.load_recipe("digits/mixer", [("train.epochs", str(len(manifest.classes)))])
    network = widemix.build_model(recipe)
    epoch(loaders(folder)[0], network, 0)
    metrics = widemix.train(recipe, folder / "run", resume="auto")
    print(widemix.__version__, metrics, recipe.train.epochs + 1)
    return widemix.evaluate(folder / "run", ema=True)
