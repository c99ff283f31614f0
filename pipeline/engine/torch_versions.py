"""What newer versions of torch call otherwise than the oldest that we run on: see `widemix.torch_support`."""

import inspect
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def set_timeout(seconds: int, group: dist.ProcessGroup) -> None:
    """Set how long operations of a process group may take; `torch.distributed.set_timeout` of newer ones."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timedelta(seconds=seconds), group)
    else:
        from torch.distributed.distributed_c10d import _set_pg_timeout

        _set_pg_timeout(timedelta(seconds=seconds), group)


def without_buffer_sync() -> dict[str, Any]:
    """The argument of DDP by which buffers are not broadcast before each forward pass."""
    named = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in named else "broadcast_buffers": False}
