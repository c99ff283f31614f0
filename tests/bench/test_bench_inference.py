"""Latency and throughput by batch size: of which passes, and by which sums."""

import json
import time

import pytest
import torch

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
