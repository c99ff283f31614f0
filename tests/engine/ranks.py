"""What several ranks compute for these tests: `python -m tests.engine.ranks DATA RESULTS [JOB...]`, once a rank."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline import topology
from pipeline.data.loader import Batch, TrainLoader
from pipeline.engine import build_engine, prepare
from pipeline.models.registry import build_model
from pipeline.recipe import load_recipe
from pipeline.schedule import build_schedule
from tests.conftest import ROOT

ENGINES = ["ddp", "fsdp", "deepspeed 0", "deepspeed 1", "deepspeed 2"]
GOLDEN = [
    (recipe, engine, precision)
    for recipe, precision in (("mixer", "fp32"), ("mixer", "bf16"), ("rp_s_mixer", "fp32"))
    for engine in ENGINES
    if (engine, precision) != ("deepspeed 0", "bf16")  # refused
]
STEPS = 12


def overrides_for(engine: str) -> list[tuple[str, str]]:
    kind, _, stage = engine.partition(" ")
    return [("engine.kind", kind)] + ([("engine.zero_stage", stage)] if stage else [])


class Setting:
    """A digits recipe with this rank's part of its first batches, and the network as first drawn."""

    def __init__(self, recipe: str, data: Path, *overrides: tuple[str, str]):
        self.here = topology.read_topology()
        fixed = [("data.path", str(data)), ("data.workers", "1")]
        self.recipe = load_recipe(ROOT / f"recipes/digits/{recipe}.yaml", [*fixed, *overrides])
        self.data, train = self.recipe.data, self.recipe.train
        loader = TrainLoader(
            *(self.data, self.recipe.augment, train.global_batch, train.accumulation, train.seed, self.here)
        )
        with loader.batches(0) as batches:
            everything = list(batches)
        parts = train.accumulation
        self.steps: list[list[Batch]] = [everything[i * parts : (i + 1) * parts] for i in range(STEPS)]
        schedule = build_schedule(self.recipe.schedule, self.recipe.optim.lr, loader.steps, train.epochs)
        self.rates = [schedule(20 + step) for step in range(STEPS)]  # within the warm-up, but well above zero

    def model(self) -> torch.nn.Module:
        torch.manual_seed(self.recipe.train.seed)
        return build_model(self.recipe.model, self.data.image_size, self.data.num_classes)

    def engine(self) -> Any:
        module = self.model()
        prepare(module, self.recipe.train)
        return build_engine(self.recipe.engine, module, self.recipe.optim, self.recipe.train, self.here)

    def run(self, engine: Any, steps: range = range(STEPS)) -> list[float]:
        """The loss of each step, over all ranks."""
        losses = [engine.step(self.steps[step], self.rates[step]).loss for step in steps]
        return topology.mean_over_ranks(torch.stack(losses).double()).tolist()


def golden(data: Path) -> dict[tuple[str, str, str], list[float]]:
    """The curve of every engine on two digits recipes, one of them in both precisions."""
    curves = {}
    for recipe, engine, precision in GOLDEN:
        setting = Setting(recipe, data, *overrides_for(engine), ("train.precision", precision))
        curves[recipe, engine, precision] = setting.run(setting.engine())
    return curves


JOBS: dict[str, Callable[[Path], Any]] = {"golden": golden}


def main() -> None:
    data, results, *jobs = sys.argv[1:]
    warnings.simplefilter("ignore")  # DeepSpeed's own
    torch.set_num_threads(1)
    here = topology.read_topology()
    topology.start(here, timeout=120)
    found = {job: JOBS[job](Path(data)) for job in jobs or JOBS}
    if here.is_main:
        torch.save(found, results)
    topology.stop()


if __name__ == "__main__":
    main()
