"""DTensors, as FSDP2 makes of parameters, told from other tensors without an import of torch.distributed.tensor.

That import takes longer than timm's, in each process, and only FSDP needs it.
"""

import sys
from typing import TYPE_CHECKING, cast

import torch
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> "TypeIs[DTensor]":
    """Whether it is a DTensor; none is before torch.distributed.tensor is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: all, but of a DTensor its shard."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; of a DTensor it is gathered from all ranks, which must all call this."""
    return cast(torch.Tensor, tensor.full_tensor()) if is_dtensor(tensor) else tensor
