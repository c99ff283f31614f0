"""What the arguments of functions say: sections of a recipe, and this process's rank."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import ValidationError

from pipeline.distributed.topology import Topology, read_topology
from pipeline.errors import InputError
from pipeline.section import Section

AnySection = TypeVar("AnySection", bound=Section)
# Keys of sections that have another name here: timm's.
_NAMES = {"aug_repeats": "num_aug_repeats", "workers": "num_workers", "mix_mode": "mixup_mode"}


def numbers(value: Any) -> Any:
    """Several numbers, as of an array, as a tuple; what is wrong as it is, which the section then names."""
    return tuple(value) if isinstance(value, Iterable) else value


def check_whole(name: str, number: Any, least: int = 0) -> int:
    """The number, if it is whole, of any integer type, and at least `least`; else an `InputError`."""
    if not isinstance(number, Integral) or number < least:
        raise InputError(f"{name} {number!r}: must be a whole number, at least {least}")
    return int(number)


def jitter_strengths(color_jitter: float | Sequence[float] | None) -> tuple[float, ...]:
    """Brightness, contrast, saturation and hue; one number is the first three, None is none, as in timm."""
    if not isinstance(color_jitter, Iterable):
        return (color_jitter or 0.0,) * 3 + (0.0,)
    return (*color_jitter, *(0.0,) * (4 - len(color_jitter)))


def build_section(kind: type[AnySection], /, where: str = "", **values: Any) -> AnySection:
    """A recipe's section; what is wrong becomes an `InputError` with the argument's name."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        given = f"{_NAMES.get(key, key)} {first['input']!r}: " if key else ""
        raise InputError(where + given + first["msg"].removeprefix("Value error, ")) from None


def process_topology(rank: int | None, world: int | None, device: str | torch.device | None) -> Topology:
    """Rank and device of this process, from the arguments, torch.distributed, or the launcher's variables."""
    if (rank is None) != (world is None):
        raise InputError(f"rank {rank}, world {world}: give both, or neither")
    found = read_topology()
    if rank is None and dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    if rank is not None and world is not None:
        rank, world = check_whole("rank", rank), check_whole("world", world, least=1)
        if rank >= world:
            raise InputError(f"rank {rank}, world {world}: ranks are numbered from 0 to world - 1")
        found = replace(found, rank=rank, world=world)
    return found if device is None else replace(found, device=_usable(device))


def _usable(device: str | torch.device) -> torch.device:
    """The device; `InputError` where there is none of this name."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        raise InputError(f"device {str(device)!r}: {str(error).splitlines()[0]}") from None
