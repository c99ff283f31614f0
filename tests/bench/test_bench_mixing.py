"""The benchmark of mixing takes its shares from the times of the same round."""

import argparse

import pytest
import torch

from pipeline.bench import mixing


def test_shares_are_medians_over_the_rounds_that_count(monkeypatch):
    now = 0.0

    def takes(*seconds: float):
        """An action whose call takes so many seconds in each round."""

        def action(number: int) -> None:
            nonlocal now
            calls = 1 if len(seconds) > 1 else mixing.REPEATS
            now += seconds[number // calls % len(seconds)]

        return action

    monkeypatch.setattr(mixing, "compute_clock", lambda device: now)
    monkeypatch.setattr(mixing, "_step", lambda *_: takes(9.0, 1.0, 2.0, 4.0))
    for name in ("_timm", "_mix_groups"):
        monkeypatch.setattr(mixing, name, lambda *_: takes(0.1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    step, *others = mixing.run(argparse.Namespace(rounds=3))
    assert (step["name"], step["percent_of_step"], step["images_per_s"]) == (mixing.STEP, 100, 4)
    assert len(others) == 1 + len(mixing.SETTINGS)
    for row in others:  # 0.1 of 1, 2 and 4 seconds; the first round is not counted
        assert row["percent_of_step"] == pytest.approx(5)
        assert row["ratio"] == pytest.approx(20)
        assert row["images_per_s"] == pytest.approx(80)
