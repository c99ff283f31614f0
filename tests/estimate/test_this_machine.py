"""What a dry run says of this machine: its arithmetic, with times that are known."""

from contextlib import nullcontext

import pytest
import torch

from tests.conftest import System
from widemix.cgroups import usable_cpus
from widemix.distributed.topology import Topology
from widemix.estimate import measure as this_machine
from widemix.models.cost import model_cost
from widemix.recipe import load_recipe

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Loader:
    """Each of its 22 batches takes 3 s, by a clock of its own."""

    steps = 22

    def __init__(self, system: System):
        self.now = 0.0
        system({"time.perf_counter": lambda: self.now})

    def batches(self, epoch):
        return nullcontext(self)

    def __next__(self):
        self.now += 3


@pytest.mark.parametrize(
    ("ranks", "device", "passes", "step"),
    [(1, CPU, 2.0, 2.0 * 64 + 3), (2, CPU, 2.0, 2.0 * 64 + 6), (2, GPU, 2.0, 64), (2, GPU, 0.01, 3)],
)
@pytest.mark.parametrize(("key", "steps"), [("train.epochs=3", 66), ("train.max_steps=5", 5)])
def test_a_step_loads_and_computes_or_takes_the_longer(
    monkeypatch, system: System, ranks, device, passes, step, key, steps
):
    """`passes` are the seconds of a sample's pass, which is not compiled."""
    timed = []

    def measured_pass(recipe, samples, *given):
        timed.append((recipe.train.compile, samples, *given))
        return passes * samples, None

    monkeypatch.setattr(this_machine, "measured_pass", measured_pass)
    recipe = load_recipe("digits/mixer", [tuple(key.split("=")), ("train.compile", "true")])
    timing = this_machine.time_run(recipe, Loader(system), Topology(0, ranks, 0, ranks, device))
    most = 2e10 // model_cost(recipe.model, 8, 10).training_flops
    assert timed == [(False, min(most, 64 // ranks), device, recipe.engine)]
    assert timing == (timed[0][1], pytest.approx(step), 3 * ranks, pytest.approx(steps * step))


@pytest.mark.parametrize(("channels", "samples"), [(64, 64), (512, None), (8192, 1)])
def test_a_pass_of_about_so_many_flops_is_timed(monkeypatch, system: System, channels, samples):
    """At least one sample, at most the step's."""
    recipe = load_recipe("digits/mixer", [("model.channels", str(channels))])
    monkeypatch.setattr(this_machine, "measured_pass", lambda recipe, samples, *_: (2.0 * samples, None))
    timing = this_machine.time_run(recipe, Loader(system), Topology(0, 1, 0, 1, CPU))
    assert timing.samples == samples or int(2e10 / model_cost(recipe.model, 8, 10).training_flops)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0314, "31 ms"),
        (0.999, "999 ms"),
        (1.0, "1.0 s"),
        (1.26, "1.3 s"),
        (119, "119.0 s"),
        (120, "2.0 min"),
        (150, "2.5 min"),
        (7100, "118.3 min"),
        (7500, "2.1 h"),
        (172_800, "2.0 days"),
        (400_000, "4.6 days"),
    ],
)
@pytest.mark.parametrize(("device", "where"), [(CPU, f"CPU, {usable_cpus()} cores"), (GPU, "NVIDIA H200")])
def test_the_times_are_a_sentence(system: System, seconds, said, device, where):
    system({"torch.cuda.get_device_name": lambda device: "NVIDIA H200"})
    recipe = load_recipe("digits/mixer", [("train.global_batch", "6400")])
    timing = this_machine.Timing(samples=8, step=3.2, loading=1.0, run=seconds)
    assert this_machine.describe_timing(recipe, timing, device) == (
        f"on this machine ({where}): about {said} for all steps, 2,000 samples/s, a step 3.2 s (from a pass of 8 "
        "samples and one batch)"
    )
