"""Training on classes of unequal size: the weights that a run's loss has, and what is suggested."""

from pathlib import Path

import numpy as np
import torch

from widemix.data.loader import TrainLoader
from widemix.engine import Engine
from widemix.formats.manifest import read_manifest
from widemix.formats.tables import pieces
from widemix.recipe import Recipe
from widemix.recipe.class_balance import SUGGESTED, class_weights, describe_counts, imbalance
from widemix.recipe.losses import LOSSES


def balance_loss(engine: Engine, recipe: Recipe, loader: TrainLoader) -> None:
    """Give the engine's loss the counts and weights of classes that the recipe and the loss ask for."""
    spec, rule = LOSSES[recipe.train.loss], recipe.train.class_weights
    if not rule and "counts" not in spec.takes:
        return
    counts = class_counts(loader)
    weights = None
    if rule:
        names = read_manifest(Path(recipe.data.path)).classes
        weights = torch.tensor(class_weights("train.class_weights", rule, counts, names), dtype=torch.float32)
        weights = weights.to(engine.device)
    engine.loss = spec.build(torch.tensor(counts, dtype=torch.float32).to(engine.device), weights)


def class_counts(loader: TrainLoader) -> list[int]:
    """Return the training split's samples of each class, by the manifest; or those that have each target."""
    data, source = loader.data, loader.source
    if data.targets == "class":
        return list(read_manifest(Path(data.path)).splits[data.train_split].per_class)
    if data.targets == "regression":
        return [len(loader)] * data.num_classes
    sums = [source.labels(np.arange(len(loader))[piece]).sum(0, dtype=torch.float64) for piece in pieces(len(loader))]
    return torch.stack(sums).sum(0).long().tolist()


def suggest_balance(recipe: Recipe) -> str | None:
    """Return which keys may help where classes are more unequal than 1 : 10, and none of them is set."""
    data, train = recipe.data, recipe.train
    if data.targets != "class" or data.sampling or train.class_weights:
        return None
    manifest = read_manifest(Path(data.path))
    counts = manifest.splits[data.train_split].per_class
    if imbalance(counts) <= SUGGESTED:
        return None
    return (
        f"{data.path}: its classes are unequal, {describe_counts(counts, manifest.classes)}; --data.sampling "
        "balanced (or sqrt) samples small ones more often, --train.class_weights inverse weights them in the loss"
    )
