"""Latency and throughput by batch size: of which passes, and by which sums."""

import json
import time

import numpy as np
import pytest
import torch

from tests.conftest import System
from widemix.bench.inference import BATCHES, measure_inference
from widemix.evaluation.networks import load_network

CPU = torch.device("cpu")


class Stub(torch.nn.Module):
    """Calls `passed` with what it is given, in place of a network."""

    def __init__(self, passed):
        super().__init__()
        self.passed = passed

    def forward(self, x):
        assert not torch.is_grad_enabled()
        self.passed(x)
        return x


def stub(passed):
    network = load_network("recipes/digits/mixer.yaml")
    object.__setattr__(network, "module", Stub(passed).eval())
    return network


@pytest.mark.parametrize(
    ("rounds", "precision", "dtype"), [(20, "fp32", None), (5, "fp16", torch.float16), (1, "bf16", torch.bfloat16)]
)
def test_rows_are_of_passes_in_turns_after_two_rounds(rounds, precision, dtype, system: System):
    """By a wall clock and a CPU time that go on by other milliseconds in each pass."""
    rng, wall, cpu, batches = np.random.default_rng(0), [0.0], [0.0], [3, 1]

    def passed(images):
        half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        assert (half, images.shape[1:]) == (dtype, (3, 8, 8))
        assert images.is_contiguous(memory_format=torch.channels_last)
        seen.append(len(images))
        wall.append(rng.uniform(1e-3, 9e-3))
        cpu.append(rng.uniform(1e-3, 9e-3))

    seen: list[int] = []
    system({"time.perf_counter": lambda: sum(wall), "time.process_time": lambda: sum(cpu)})
    rows = measure_inference(stub(passed), batches, rounds, precision, CPU)
    assert seen == batches * (2 + rounds)
    for k, (row, batch) in enumerate(zip(rows, batches, strict=True)):
        own, used = (np.array(times[5 + k :: 2]) for times in (wall, cpu))  # after 0 and the first two rounds
        assert row == {
            "name": f"batch {batch}",
            "batch": batch,
            "latency_ms": round(1e3 * np.median(own), 3),
            "latency_p90_ms": round(1e3 * np.sort(own)[int(0.9 * rounds)], 3),  # which lies above 90 % of them
            "images_per_s": round(batch / np.median(own), 2),
            "images_per_cpu_s": round(batch / np.median(used), 2),
        }


def test_a_real_clock_counts_what_a_pass_waits():
    [row] = measure_inference(stub(lambda images: time.sleep(0.002 * len(images))), [4], 3, "fp32", CPU)
    assert 8 <= row["latency_ms"] <= row["latency_p90_ms"]
    assert row["images_per_cpu_s"] > row["images_per_s"]  # it sleeps
    assert BATCHES == (1, 8, 64, 256)


def test_the_command(tmp_path, widemix):
    words = ("--rounds", 1, "--batches", 2, 1, 2, "--json", tmp_path / "rows.json")
    assert widemix("bench", "inference", "digits/mixer", *words)[0] == 0
    assert [row["batch"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == [2, 1]
