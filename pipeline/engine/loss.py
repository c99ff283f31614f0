"""The dtypes of `train.precision`, and the losses of `train.loss`."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """A context that computes in `dtype`; in float32 it changes nothing."""
    return torch.autocast(device.type, dtype, enabled=dtype is not torch.float32)


def softmax_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the batch of -sum p log softmax: logits and probabilities [B, classes] to a scalar in float32."""
    return -(targets * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()


def sigmoid_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the batch of the binary cross-entropies of all classes together (Beyer et al. 2020)."""
    loss = binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")
    return loss.sum(dim=-1).mean()


def squared_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean squared error: outputs and targets [B, targets] to a scalar in float32."""
    return mse_loss(outputs.float(), targets)


LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss, "mse": squared_loss}
