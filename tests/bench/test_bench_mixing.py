"""The bench of mixing takes its shares from the times of the same round."""

import argparse

import pytest
import torch

from pipeline.bench import mixing


def test_shares_are_medians_over_the_rounds_that_count(monkeypatch):
    times = {mixing.STEP: [9.0, 1.0, 2.0, 4.0], "other": [9.0, 0.1, 0.1, 0.1]}
    works = iter(range(100))

    def seconds(work, turn, repeats, device):
        step = next(works) % (2 + len(mixing.SETTINGS)) == 0
        return times[mixing.STEP if step else "other"][turn]

    monkeypatch.setattr(mixing, "_seconds", seconds)
    monkeypatch.setattr(mixing, "_step", lambda images, labels: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    step, *others = mixing.run(argparse.Namespace(rounds=3))
    assert (step["name"], step["percent_of_step"], step["images_per_s"]) == (mixing.STEP, 100, 4)
    assert len(others) == 1 + len(mixing.SETTINGS)
    for row in others:  # 0.1 of 1, 2 and 4 seconds; the round before is not counted
        assert row["percent_of_step"] == pytest.approx(5)
        assert row["ratio"] == pytest.approx(20)
        assert row["images_per_s"] == pytest.approx(80)
