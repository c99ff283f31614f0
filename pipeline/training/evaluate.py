"""Exact evaluation: every sample once, whatever the number of ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from pipeline.data.loader import EvalLoader
from pipeline.engine import Engine


def evaluate_engine(
    engine: Engine, loader: EvalLoader, classes: int, beat: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """`evaluate` for each of the engine's weights: "ema_top1" beside "top1" where it keeps an average."""
    result: dict[str, float] = {}
    for prefix, weights in engine.weights().items():
        with weights:
            found = evaluate(engine.module, engine.evaluate_mode(), loader, classes, beat)
        result |= {f"{prefix}{name}": value for name, value in found.items()}
    return result


@torch.no_grad()  # and not inference_mode: what ZeRO 3 gathers here, training uses
def evaluate(
    module: nn.Module,
    precision: AbstractContextManager,
    loader: EvalLoader,
    classes: int,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Mean cross-entropy and top-1/top-5 accuracy in percent over the whole split, the same on every rank.

    With fewer than five classes top-5 counts all of them. `beat` is called after each batch.
    """
    device = loader.topology.device
    loss = MeanMetric().to(device)
    accuracy = {
        f"top{k}": MulticlassAccuracy(classes, top_k=min(k, classes), average="micro").to(device) for k in (1, 5)
    }
    was_training = module.training
    module.eval()
    with loader.batches() as batches, precision:
        for batch in batches:
            logits = module(batch.inputs).float()
            beat()
            if not len(batch):
                continue
            loss.update(cross_entropy(logits, batch.targets), len(batch))
            for metric in accuracy.values():
                metric.update(logits, batch.targets)
    module.train(was_training)
    result = {"loss": loss.compute().item()}
    return result | {name: 100 * metric.compute().item() for name, metric in accuracy.items()}
