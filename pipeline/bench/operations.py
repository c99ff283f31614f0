"""What a step's time and memory go into: the time of each operation, and the peak of memory."""

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import nn

from widemix.estimate.fake import MemoryTracker
from widemix.training.profile import torch_profiler

_LISTED = 12  # operations; the others are added up


def time_by_operation(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return the milliseconds of each operation in one call of `step`, the longest first and the shortest as "other".

    On a GPU these are its kernels; on a CPU PyTorch's operators, without what they call.
    """
    gpu = device.type == "cuda"
    with torch_profiler() as profiler:
        step()
        if gpu:
            torch.cuda.synchronize(device)
    times: Counter[str] = Counter()
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if gpu else event.self_cpu_time_total
        if microseconds and (event.device_type == torch.autograd.DeviceType.CUDA) == gpu:
            times[event.key] += microseconds / 1e3
    listed = times.most_common(_LISTED)
    rest = times.total() - sum(time for _, time in listed)
    return {name: round(time, 3) for name, time in [*listed, *([("other", rest)] if len(times) > _LISTED else [])]}


def peak_memory(
    step: Callable[[], object], network: nn.Module, others: Iterable[torch.Tensor], device: torch.device
) -> float | None:
    """Return the most GiB of tensors that are alive at once in a call of `step`.

    None on a CPU for a compiled network, whose buffers are unknown. others: tensors that are alive before it, beside
    those of the network.
    """
    own = [*network.parameters(), *network.buffers(), *others]
    if device.type == "cuda":  # where other networks may lie too
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        added = torch.cuda.max_memory_allocated(device) - before
        return round((added + sum(each.nbytes for each in own if each.is_cuda)) / 2**30, 3)
    if isinstance(network, torch._dynamo.eval_frame.OptimizedModule):
        return None
    with MemoryTracker() as tracker:
        tracker.watch(*own)
        step()
    return round(tracker.peak / 2**30, 3)
