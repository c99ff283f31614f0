"""Engines: a module and an optimiser to a step on many ranks."""

import torch
from torch import nn

from pipeline.engine.contract import Engine, State, StepResult
from pipeline.recipe.schema import EngineSection, OptimSection, TrainSection
from pipeline.topology import Topology


def build_engine(
    section: EngineSection,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    optim: OptimSection,
    train: TrainSection,
    topology: Topology,
) -> Engine:
    """The engine that `engine.kind` names, around a module that lies on this rank's device."""
    if section.kind == "ddp":
        from pipeline.engine.ddp import DDPEngine

        return DDPEngine(module, optimizer, optim, train, topology)
    from pipeline.engine.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(module, optimizer, section, optim, train, topology)


__all__ = ["Engine", "State", "StepResult", "build_engine"]
