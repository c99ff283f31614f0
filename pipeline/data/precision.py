"""Each `train.precision`: its torch dtype, computing in it, and what bf16 costs where the hardware has none."""

import time

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BF16_CAPABILITY = 8, 0  # of the first GPUs with bf16, Ampere
SLOW = 4.0  # from here on it is worth a word: with AVX-512 or AMX the ratio is about 1


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """A context that computes in `dtype`; in float32 it changes nothing."""
    return torch.autocast(device.type, dtype, enabled=dtype is not torch.float32)


def bf16_slowdown(size: int = 256, rounds: int = 5) -> float:
    """Return how many times as long as in fp32 a linear layer in bf16 takes on a core of this CPU, measured in 0.1 s.

    Without instructions for bf16, as on CPUs that have AVX2 alone, torch converts each number by itself.
    """
    threads, seconds = torch.get_num_threads(), {}
    torch.set_num_threads(1)  # on a busy machine several wait for each other
    for dtype in (torch.float32, torch.bfloat16):
        matrix, times = torch.ones(size, size, dtype=dtype, device="cpu"), []
        for _ in range(rounds):
            start = time.perf_counter()
            torch.nn.functional.linear(matrix, matrix)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    torch.set_num_threads(threads)
    return seconds[torch.bfloat16] / seconds[torch.float32]


def bf16_warning(device: torch.device) -> str | None:
    """Return what to do instead where this device computes in bf16 without instructions for it; else None."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= BF16_CAPABILITY:
            return None
        return (
            f"{torch.cuda.get_device_name(device)} has no bf16 (compute capability {capability[0]}.{capability[1]}, "
            "it needs 8.0) and computes it in fp32; set train.precision fp16"
        )
    slowdown = bf16_slowdown()
    if slowdown <= SLOW:
        return None
    return f"bf16 is {slowdown:.0f} times as slow as fp32 on this CPU; set train.precision fp32"
