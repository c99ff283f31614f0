"""Latency and throughput by batch size: of which passes, and by which sums."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from widemix.bench import inference
from widemix.bench.inference import measure_inference
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.evaluation.networks import load_network

CPU = torch.device("cpu")


class Slow(torch.nn.Module):
    """Takes 2 ms an image, and 10 ms the first time; keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def forward(self, x):
        assert not torch.is_grad_enabled()
        time.sleep(0.01 * (not self.given) + 0.002 * len(x))
        self.given.append((tuple(x.shape), torch.is_autocast_enabled("cpu")))
        return x


def test_a_row_for_each_batch_size_without_the_first_passes():
    network = load_network("recipes/digits/mixer.yaml")
    slow = Slow().eval()
    object.__setattr__(network, "module", slow)
    rows = measure_inference(network, [1, 4], 3, "bf16", CPU)
    assert [shape for shape, _ in slow.given] == [(1, 3, 8, 8), (4, 3, 8, 8)] * 5
    assert all(half for _, half in slow.given)
    for row, batch in zip(rows, (1, 4), strict=True):
        assert row["batch"] == batch
        assert 2 * batch <= row["latency_ms"] <= row["latency_p90_ms"]
        assert row["images_per_s"] == pytest.approx(1e3 * batch / row["latency_ms"], rel=1e-2)
        assert row["images_per_cpu_s"] > row["images_per_s"]  # it sleeps


def test_the_command(tmp_path, capsys):
    words = ["bench", "inference", "recipes/digits/mixer.yaml", "--rounds", "1", "--batches", "2", "1", "2"]
    assert run_command(make_parser(), argv=[*words, "--json", str(tmp_path / "rows.json")]) == 0
    assert [row["batch"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == [2, 1]
    capsys.readouterr()
    assert run_command(make_parser(), argv=[*words[:-1], "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err
    assert run_command(make_parser(), argv=["bench", "inference", "recipes/mnli/mixer.yaml"]) == 2
    assert "reads text" in capsys.readouterr().err


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", None), ("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_passes_are_timed_in_turns_in_the_precision(precision, dtype, monkeypatch):
    """Wall clock and CPU time go on by 3 s and 2 s an image."""
    wall, cpu, seen = [0.0], [0.0], []

    class Network(torch.nn.Module):
        def forward(self, x):
            seen.append((len(x), torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None))
            wall[0] += 3 * len(x)
            cpu[0] += 2 * len(x)

    monkeypatch.setattr(inference, "wall_clock", lambda device: wall[0])
    monkeypatch.setattr(inference, "time", SimpleNamespace(process_time=lambda: cpu[0]))
    parts = {batch: torch.zeros(batch, 3, 2, 2) for batch in (4, 1)}
    found = inference.time_passes(Network(), parts, 2, precision, CPU)
    assert found == {4: [(12, 8)] * 2, 1: [(3, 2)] * 2}
    assert seen == [(4, dtype), (1, dtype)] * 2


def test_a_row_has_the_median_and_the_ninetieth_percentile():
    """Of twenty passes of 1 to 20 ms, two milliseconds of CPU time for each; and of one pass."""
    passes = [(number / 1e3, number / 500) for number in (*range(20, 10, -1), *range(1, 11))]
    row = {"name": "batch 6", "batch": 6, "latency_ms": 10.5, "latency_p90_ms": 19, "images_per_s": 571.43}
    assert inference._row(6, passes, torch.device("cuda")) == row
    assert inference._row(6, passes, CPU) == row | {"images_per_cpu_s": 285.71}
    assert inference._row(6, [(number / 1e3, 1.0) for number in range(1, 6)], CPU)["latency_p90_ms"] == 5
    row = inference._row(2, [(0.2501234, 0.5)], CPU)
    assert (row["latency_ms"], row["latency_p90_ms"], row["images_per_cpu_s"]) == (250.123, 250.123, 4)


def test_networks_get_images_in_the_layout_that_they_compute_in(monkeypatch):
    network, given = load_network("recipes/digits/mixer.yaml"), []

    def passes(module, parts, rounds, precision, device):
        given.append((module, rounds, precision, device))
        for batch, images in parts.items():
            assert images.shape == (batch, 3, 8, 8)
            assert images.is_contiguous(memory_format=torch.channels_last)
        return {batch: [(9.0, 9.0), (9.0, 9.0), (2.0, 1.0)] for batch in parts}

    monkeypatch.setattr(inference, "time_passes", passes)
    rows = measure_inference(network, [3, 5], 4, "fp16", CPU)
    assert given == [(network.module, 6, "fp16", CPU)]
    assert [(row["batch"], row["latency_ms"]) for row in rows] == [(3, 2000), (5, 2000)]  # without the first two
    assert inference.BATCHES == (1, 8, 64, 256)
