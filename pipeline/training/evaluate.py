"""Exact evaluation: every sample once, on any number of ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from pipeline.data.batches import Batch
from pipeline.data.loader import EvalLoader
from pipeline.engine import Engine


def evaluate_engine(
    engine: Engine, loader: EvalLoader, classes: int, beat: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return the figures of `evaluate` for each set of weights of the engine: "top1", and "ema_top1" with an EMA.

    Every rank calls it; `beat` is called after each batch.
    """
    result: dict[str, float] = {}
    for prefix, weights in engine.weights().items():
        with weights:
            figures = evaluate(engine.module, engine.evaluate_mode(), loader, classes, beat)
        result |= {f"{prefix}{name}": value for name, value in figures.items()}
    return result


@torch.no_grad()  # not inference_mode: training uses the tensors that ZeRO 3 gathers here
def evaluate(
    module: nn.Module,
    precision: AbstractContextManager,
    loader: EvalLoader,
    classes: int,
    beat: Callable[[], None] = lambda: None,
    observe: Callable[[torch.Tensor, Batch], None] = lambda logits, batch: None,
) -> dict[str, float]:
    """Return loss (mean cross-entropy), top1 and top5 (percent) over the whole split, the same on every rank.

    Every rank calls it. `precision` is the autocast context of the forward pass; `beat` is called after each batch,
    and `observe` with its logits, float32 [B, classes], and the batch. With fewer than five classes top5 counts all
    of them. One sample whose loss is not finite makes the mean so too.
    """
    device = loader.topology.device
    loss = MeanMetric(nan_strategy="disable").to(device)  # the default leaves NaN out; this ignores weights
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
            loss.update(cross_entropy(logits, batch.targets, reduction="none"))
            for metric in accuracy.values():
                metric.update(logits, batch.targets)
            observe(logits, batch)
    module.train(was_training)
    result = {"loss": loss.compute().item()}
    return result | {name: 100 * metric.compute().item() for name, metric in accuracy.items()}
