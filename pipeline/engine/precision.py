"""The context in which a step computes in the dtype of `train.precision`."""

import torch


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """A context that computes in `dtype`; in float32 it changes nothing."""
    return torch.autocast(device.type, dtype, enabled=dtype is not torch.float32)
