"""Engines: a module and an optimiser to a step on many ranks."""

from torch import nn

from pipeline.engine.contract import Engine, State, StepResult
from pipeline.errors import InputError
from pipeline.optim import build_optimizer
from pipeline.recipe.schema import EngineSection, OptimSection, TrainSection
from pipeline.topology import Topology


def build_engine(
    section: EngineSection, module: nn.Module, optim: OptimSection, train: TrainSection, topology: Topology
) -> Engine:
    """The engine that `engine.kind` names, with its optimiser, around a module that lies on this rank's device."""
    if section.kind == "deepspeed":
        from pipeline.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(module, build_optimizer(optim, module), section, optim, train, topology)
    if section.kind == "fsdp":
        from pipeline.engine.fsdp import FSDPEngine

        return FSDPEngine(module, optim, train, topology)
    from pipeline.engine.ddp import DDPEngine

    return DDPEngine(module, build_optimizer(optim, module), optim, train, topology)


def check_device(section: EngineSection, train: TrainSection, topology: Topology) -> None:
    """`InputError` where an engine cannot train in this precision on this device."""
    if section.kind == "deepspeed" and train.precision == "fp16" and topology.device.type == "cpu":
        raise InputError("train.precision fp16: DeepSpeed has none on a CPU; take bf16, engine.kind ddp, or a GPU")


__all__ = ["Engine", "State", "StepResult", "build_engine", "check_device"]
