"""What a dry run says of this machine: its arithmetic, with a pass whose time is known."""

import pytest
import torch

from widemix.data.loader import TrainLoader
from widemix.distributed.topology import Topology
from widemix.estimate import this_machine
from widemix.recipe import load_recipe

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("ranks", "device"), [(1, CPU), (2, CPU), (2, GPU)], ids=["CPU", "two ranks", "two GPUs"])
def test_a_run_takes_its_steps(digits, monkeypatch, ranks, device):
    """A sample's pass takes 2 s here: a step of 64 takes 128 s, of which two GPUs take half each."""
    monkeypatch.setattr(this_machine, "measured_pass", lambda recipe, samples, *_: (2.0 * samples, None))
    recipe = load_recipe("digits/mixer", [("data.path", str(digits)), ("data.workers", "1"), ("train.epochs", "3")])
    loader = TrainLoader(recipe.data, recipe.augment, recipe.train, Topology(0, ranks, 0, ranks, CPU))
    timing = this_machine.time_run(recipe, loader, Topology(0, ranks, 0, ranks, device))
    computing = 128.0 / (ranks if device is GPU else 1)
    assert timing.step == pytest.approx(computing + (0 if device is GPU else timing.loading))
    assert timing.run == pytest.approx(3 * 22 * timing.step)
    short = recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_steps": 5})})
    assert this_machine.time_run(short, loader, Topology(0, ranks, 0, ranks, device)).run < 6 * timing.step


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0314, "31 ms"), (1.26, "1.3 s"), (150, "2.5 min"), (7500, "2.1 h"), (400_000, "4.6 days")],
)
def test_durations_read_well(seconds, said):
    assert this_machine._duration(seconds) == said
