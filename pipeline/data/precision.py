"""The torch dtype of each `train.precision`, and what bf16 costs on a CPU."""

import time

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SLOW = 4.0  # from here on it is worth a word: with AVX-512 or AMX the figure is about 1


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
