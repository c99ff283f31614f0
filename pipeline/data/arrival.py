"""How batches come to the device: beside the step's work, and there before the step asks for them.

Decoded pictures go over as they are, uint8 [B, H, W, 3] from pinned memory. Normalised on the host they would be four
times the bytes (588 KiB a picture of 224 pixels; in bf16 two), and each 41 us of a CPU, of about 1.2 ms for decoding.
Erasing and mixing work on normalised numbers, and so on the device too, in float32. On the CPU all is the same, but
that there is nothing to bring over.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

Host = TypeVar("Host")
Arrived = TypeVar("Arrived")


def finished(hosts: Iterable[Host], finish: Callable[[Host], Arrived], device: torch.device) -> Iterator[Arrived]:
    """`finish` of each, on a stream of its own. To be iterated by one thread, which waits for the device.

    So what this has yielded has arrived: who waits for an item waits for all of its way.
    """
    with _beside(device):
        for host in hosts:
            arrived = finish(host)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            yield arrived


def record_stream(device: torch.device, *tensors: torch.Tensor) -> None:
    """Let the calling thread's stream use tensors that `finished` made: their memory is not used again before it."""
    if device.type == "cuda":
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(device))


def _beside(device: torch.device) -> AbstractContextManager:
    """A stream that the step's kernels give way to: there is little to do on it, and a thread that waits for it."""
    return torch.cuda.stream(torch.cuda.Stream(device, priority=-1)) if device.type == "cuda" else nullcontext()
