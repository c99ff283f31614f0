"""What a dry run says of this machine: its arithmetic, with a pass whose time is known."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from widemix.data.loader import TrainLoader
from widemix.distributed.topology import Topology
from widemix.estimate import this_machine
from widemix.models.cost import model_cost
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
def test_durations_read_well(seconds, said):
    assert this_machine._duration(seconds) == said


@pytest.mark.parametrize(("device", "where"), [(CPU, "CPU, 6 cores"), (GPU, "NVIDIA H200")])
def test_the_times_are_a_sentence(monkeypatch, device, where):
    monkeypatch.setattr(this_machine, "usable_cpus", lambda: 6)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    recipe = load_recipe("digits/mixer", [("train.global_batch", "6400")])
    timing = this_machine.Timing(samples=8, step=3.2, loading=1.0, run=7200)
    assert this_machine.describe_timing(recipe, timing, device) == (
        f"on this machine ({where}): about 2.0 h for all steps, 2,000 samples/s, a step 3.2 s (from a pass of 8 "
        "samples and one batch)"
    )


@pytest.mark.parametrize(
    ("ranks", "device", "passes", "step"),
    [(1, CPU, 2.0, 2.0 * 64 + 3), (2, CPU, 2.0, 2.0 * 64 + 6), (2, GPU, 2.0, 64), (2, GPU, 0.01, 3)],
)
def test_a_step_on_a_cpu_takes_loading_and_computing_and_on_gpus_the_longer(monkeypatch, ranks, device, passes, step):
    """A batch of a rank is loaded in 3 s; `passes` are the seconds of a sample's pass."""
    clock, timed = [0.0], []

    class Batches:
        def __next__(self):
            clock[0] += 3

    def measured_pass(recipe, samples, *given):
        timed.append((recipe.train.compile, samples, *given))
        return passes * samples, None

    monkeypatch.setattr(this_machine, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(this_machine, "measured_pass", measured_pass)
    recipe = load_recipe("digits/mixer", [("train.epochs", "3"), ("train.compile", "true")])
    loader = SimpleNamespace(batches=lambda epoch: nullcontext(Batches()), steps=22)
    timing = this_machine.time_run(recipe, loader, Topology(0, ranks, 0, ranks, device))
    most = 2e10 // model_cost(recipe.model, 8, 10).training_flops
    assert timed == [(False, min(most, 64 // ranks), device, recipe.engine)]
    assert timing == (timed[0][1], pytest.approx(step), 3 * ranks, pytest.approx(66 * step))


@pytest.mark.parametrize(("of_a_sample", "samples"), [(0.1, 1), (1.5, 1), (10.5, 10), (1000, 64)])
def test_a_pass_of_about_so_many_flops_is_timed(digits, monkeypatch, of_a_sample, samples):
    """At least one sample, at most the step's."""
    recipe = load_recipe("digits/mixer", [("data.path", str(digits)), ("data.workers", "1")])
    monkeypatch.setattr(this_machine, "_FLOPS", of_a_sample * model_cost(recipe.model, 8, 10).training_flops)
    monkeypatch.setattr(this_machine, "measured_pass", lambda recipe, samples, *_: (2.0 * samples, None))
    topology = Topology(0, 1, 0, 1, CPU)
    loader = TrainLoader(recipe.data, recipe.augment, recipe.train, topology)
    assert this_machine.time_run(recipe, loader, topology).samples == samples
