"""The table of losses: what a value of `train.loss` stands for. Torch is imported when a loss is computed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from widemix.arguments import Name, check_arguments
from widemix.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossSpec:
    """A loss to train with. Evaluations report that of `data.targets`, whatever the training's is.

    compute: of outputs [B, N], in the step's precision, and targets float32 [B, N], which are probabilities where
        `data.targets` is class: a scalar in float32, the mean over the batch.
    takes: what else it is given, as keywords, float32 [N]: "counts", the samples of each class in the training split
        (all 1 in estimates and benchmarks); "weights", those of `train.class_weights`, if they are set.
    """

    compute: "Callable[..., Tensor]"
    help: str  # printed by `widemix train --help`
    targets: tuple[str, ...] = ("class",)  # the values of data.targets that it is for
    takes: tuple[Literal["counts", "weights"], ...] = ()

    def build(
        self, counts: "Tensor | None" = None, weights: "Tensor | None" = None
    ) -> "Callable[[Tensor, Tensor], Tensor]":
        """Return the loss of outputs and targets, for these counts and weights."""
        given = {} if weights is None else {"weights": weights}
        if "counts" not in self.takes:
            return partial(self.compute, **given) if given else self.compute
        if counts is None:
            return lambda outputs, targets: self.compute(outputs, targets, counts=targets.new_ones(targets.shape[1]))
        return partial(self.compute, counts=counts, **given)


def softmax_loss(logits: "Tensor", targets: "Tensor", weights: "Tensor | None" = None) -> "Tensor":
    """Mean over the batch of -sum w p log softmax: logits and probabilities [B, classes] to a scalar in float32."""
    targets = targets if weights is None else targets * weights
    return -(targets * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()


def sigmoid_loss(logits: "Tensor", targets: "Tensor", weights: "Tensor | None" = None) -> "Tensor":
    """Mean over the batch of the binary cross-entropies of all classes together (Beyer et al. 2020).

    weights: of the positives of each class, as torch's `pos_weight`.
    """
    from torch.nn.functional import binary_cross_entropy_with_logits

    loss = binary_cross_entropy_with_logits(logits.float(), targets, reduction="none", pos_weight=weights)
    return loss.sum(dim=-1).mean()


def squared_loss(outputs: "Tensor", targets: "Tensor") -> "Tensor":
    """Mean squared error: outputs and targets [B, targets] to a scalar in float32."""
    from torch.nn.functional import mse_loss

    return mse_loss(outputs.float(), targets)


LOSSES = {
    "softmax": LossSpec(softmax_loss, "cross-entropy", takes=("weights",)),
    "sigmoid": LossSpec(
        sigmoid_loss, "binary cross-entropy, summed over classes", ("class", "multilabel"), takes=("weights",)
    ),
    "mse": LossSpec(squared_loss, "squared error, mean over targets", ("regression",)),
}


@check_arguments
def register(name: Name, spec: LossSpec) -> None:
    """Make `train.loss: NAME` mean this loss, in recipes that are loaded from now on; `InputError` if it is taken."""
    if name in LOSSES:
        raise InputError(f"loss {name} is already registered")
    LOSSES[name] = spec
