"""What the arguments of functions say: strengths of colour jitter, and this process's rank and device."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from widemix.arguments import Rank, numbers
from widemix.distributed.topology import Topology, read_topology
from widemix.errors import InputError

Device = str | Rank | torch.device  # an int is the number of a GPU


def jitter_strengths(color_jitter: float | Sequence[float] | None) -> tuple[float, ...]:
    """Brightness, contrast, saturation and hue; one number is the first three, None is none, as in timm."""
    strengths = numbers(color_jitter)
    if not isinstance(strengths, tuple):
        return (0.0 if strengths is None else strengths,) * 3 + (0.0,)
    return (*strengths, *(0.0,) * (4 - len(strengths)))


def process_topology(rank: int | None, world: int | None, device: Device | None) -> Topology:
    """Rank and device of this process, from the arguments, torch.distributed, or the launcher's variables."""
    if (rank is None) != (world is None):
        raise InputError(f"rank {rank}, world {world}: give both, or neither")
    found = read_topology()
    if rank is None and dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    if rank is not None and world is not None:
        if rank >= world:
            raise InputError(f"rank {rank}, world {world}: ranks are numbered from 0 to world - 1")
        found = replace(found, rank=rank, world=world)
    return found if device is None else replace(found, device=_usable(device))


def _usable(device: Device) -> torch.device:
    """The device; `InputError` where there is none of this name."""
    try:
        return torch.empty(0, device=device).device
    except (
        RuntimeError,
        AssertionError,
        ValueError,
        OverflowError,
    ) as error:  # AssertionError: torch was built without CUDA
        raise InputError(f"device {str(device)!r}: {str(error).splitlines()[0]}") from None
