"""Contestants that take turns on the same pictures, so that a busy machine disturbs all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Contestant = Callable[[int], int]  # a round's number to the pictures made in it


def race(contestants: Mapping[str, Contestant], rounds: int, peer: str) -> list[dict[str, Any]]:
    """A row for each: `images_per_cpu_s`, and `ratio` to the peer's, both medians over rounds of CPU time.

    CPU time is that of the whole process, all its threads together. The first round compiles and is not counted.
    """
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, contestant in contestants.items():
            started = time.process_time()
            made = contestant(turn)
            if turn:
                rates[name].append(made / (time.process_time() - started))
    return [
        {
            "name": name,
            "images_per_cpu_s": round(statistics.median(found), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(found, rates[peer], strict=True)), 3),
        }
        for name, found in rates.items()
    ]
