"""An optimizer that this package does not have, trained on every engine in one process."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engine.plain import plain_loop
from tests.engine.ranks import ENGINES, STEPS, Setting, overrides_for
from widemix.optim.section import OptimizerSpec, register


def build(groups: list[dict[str, Any]], section: Any) -> torch.optim.Optimizer:
    """The builder that is registered."""
    return torch.optim.RMSprop(groups, lr=section.lr, eps=section.eps, momentum=section.momentum)


RMSPROP = OptimizerSpec(build, "RMSprop of a plug-in", states=2)


def train(data: Path, folder: Path) -> None:
    """Write the losses of a plain loop and of each engine, resumed midway, and DDP's bytes to FOLDER/results.pt."""
    warnings.simplefilter("ignore")  # DeepSpeed's own
    torch.set_num_threads(1)
    register("rmsprop", RMSPROP)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results: dict[str, Any] = {}
    for name in ENGINES:
        setting = Setting("mixer", data, ("optim.name", "rmsprop"), *overrides_for(name))
        engine, other = setting.engine(), setting.engine()
        losses = setting.run(engine, range(4))
        other.load(engine.state())
        results[name] = losses + setting.run(engine, range(4, STEPS)), losses + setting.run(other, range(4, STEPS))
        if name == "ddp":
            states = [value for state in engine.optimizer.state.values() for slot, value in state.items()]
            parameters = sum(p.numel() for p in engine.module.parameters())
            results["bytes"] = parameters, sum(value.nbytes for value in states if value.ndim)
    setting = Setting("mixer", data, ("optim.name", "rmsprop"))
    batches = [(batch.inputs, batch.targets) for (batch,) in setting.steps]
    results["plain"] = plain_loop(setting.model(), batches, setting.rates, optim=setting.recipe.optim)
    torch.save(results, folder / "results.pt")
    dist.destroy_process_group()
