"""The table of losses: what a value of `train.loss` stands for. Torch is imported when a loss is computed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from widemix.arguments import Name, check_arguments
from widemix.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossSpec:
    """A loss to train with. Evaluations report that of `data.targets`, whatever the training's is.

    compute: of outputs [B, N], in the step's precision, and targets float32 [B, N], which are probabilities where
        `data.targets` is class: a scalar in float32, the mean over the batch.
    """

    compute: "Callable[[Tensor, Tensor], Tensor]"
    help: str  # printed by `widemix train --help`
    targets: tuple[str, ...] = ("class",)  # the values of data.targets that it is for


def softmax_loss(logits: "Tensor", targets: "Tensor") -> "Tensor":
    """Mean over the batch of -sum p log softmax: logits and probabilities [B, classes] to a scalar in float32."""
    return -(targets * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()


def sigmoid_loss(logits: "Tensor", targets: "Tensor") -> "Tensor":
    """Mean over the batch of the binary cross-entropies of all classes together (Beyer et al. 2020)."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    loss = binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")
    return loss.sum(dim=-1).mean()


def squared_loss(outputs: "Tensor", targets: "Tensor") -> "Tensor":
    """Mean squared error: outputs and targets [B, targets] to a scalar in float32."""
    from torch.nn.functional import mse_loss

    return mse_loss(outputs.float(), targets)


LOSSES = {
    "softmax": LossSpec(softmax_loss, "cross-entropy"),
    "sigmoid": LossSpec(sigmoid_loss, "binary cross-entropy, summed over classes", ("class", "multilabel")),
    "mse": LossSpec(squared_loss, "squared error, mean over targets", ("regression",)),
}


@check_arguments
def register(name: Name, spec: LossSpec) -> None:
    """Make `train.loss: NAME` mean this loss, in recipes that are loaded from now on; `InputError` if it is taken."""
    if name in LOSSES:
        raise InputError(f"loss {name} is already registered")
    LOSSES[name] = spec
