"""Engines: a train step on many ranks, from a network and an optimizer, with DDP, FSDP2 or DeepSpeed."""

import os
import tempfile
import warnings
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from widemix.distributed.topology import Topology
from widemix.engine.batch_norm import sync_batch_norms
from widemix.engine.deepspeed_config import deepspeed_config
from widemix.engine.interface import Engine, StepResult
from widemix.engine.state import State
from widemix.errors import InputError
from widemix.files import check_ours, private_folder
from widemix.models.drop_path import number_drop_paths
from widemix.models.registry import classifier, timm_method
from widemix.native.build import cache_folder
from widemix.optim.section import OptimSection
from widemix.recipe.sections import EngineSection, TrainSection


def build_engine(
    section: EngineSection, module: nn.Module, optim: OptimSection, train: TrainSection, topology: Topology
) -> Engine:
    """The engine of `engine.kind`, with its optimizer.

    Every rank calls it, with the module on its device. Where `broadcasts_rank0_weights`, all ranks but 0 may call it
    with a module on the meta device.
    """
    if section.kind == "deepspeed":
        from widemix.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(module, section, optim, train, topology)
    if section.kind == "fsdp":
        from widemix.engine.fsdp import FSDPEngine

        return FSDPEngine(module, section, optim, train, topology)
    from widemix.engine.torch_engine import DDPEngine

    return DDPEngine(module, section, optim, train, topology)


def broadcasts_rank0_weights(section: EngineSection) -> bool:
    """Whether the engine gives all ranks the first weights of rank 0, so that the others' module needs none.

    DDP and DeepSpeed do too, but need memory for all weights on every rank anyway.
    """
    return section.kind == "fsdp" and not section.cpu_offload


def apply_training_options(module: nn.Module, train: TrainSection, device: torch.device) -> None:
    """Set up determinism in torch; head bias, checkpointing, float8, batch norms and compilation in a new network.

    device: on which the network will train.
    """
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
        # NVSwitches add in any order. torch sets it too, but in process groups that are made later than this.
        os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    set_head_bias(module, train)
    if train.activation_checkpointing:
        timm_method(module, "set_grad_checkpointing", "train.activation_checkpointing")(True)
    number_drop_paths(module)
    if train.fp8:
        from widemix.engine.fp8 import multiply_in_fp8

        multiply_in_fp8(module, device)
    if train.sync_batch_norm:
        sync_batch_norms(module)
    if train.compile:
        # Advice to round fp32's products on a GPU, where train.matmul_precision says that they are not to be.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_inductor_cache()))
        module.compile()


def _inductor_cache() -> Path:
    """A folder for what torch.compile makes, on this machine's disk; torch's own may be another user's, who made it.

    torch runs what it finds in /tmp/torchinductor_USER, whoever has put it there.
    """
    with suppress(OSError, InputError):
        folder = private_folder(Path(tempfile.gettempdir()), code=True) / "widemix-inductor"
        folder.mkdir(0o700, exist_ok=True)
        return check_ours(folder)
    return cache_folder() / "inductor"


def set_head_bias(module: nn.Module, train: TrainSection) -> None:
    """Set the biases of a new network's head to `train.head_bias`."""
    if not train.head_bias:
        return
    parts = classifier(module, "train.head_bias").modules()
    biases = [part.bias for part in parts if isinstance(part, nn.Linear | nn.Conv2d) and part.bias is not None]
    if not biases:
        name = type(module).__name__
        raise InputError(f"train.head_bias {train.head_bias:g}: the head of {name} has no bias; set it to 0")
    for bias in biases:
        nn.init.constant_(bias, train.head_bias)


def check_engine(section: EngineSection, optim: OptimSection, train: TrainSection, topology: Topology) -> None:
    """`InputError` where the engine can't train in this precision on this device, or DeepSpeed's JSON is wrong."""
    if train.fp8:
        from widemix.engine.fp8 import check_fp8

        check_fp8(topology.device)
    if section.kind == "deepspeed":
        if find_spec("deepspeed") is None:
            raise InputError("engine.kind deepspeed: deepspeed is not installed; pip install deepspeed, or take fsdp")
        deepspeed_config(section, optim, train, topology)
    if section.sharding == "hybrid" and topology.world % topology.local_world:
        raise InputError(
            f"engine.sharding hybrid needs as many ranks on every node; this node has {topology.local_world} of "
            f"{topology.world}"
        )
    if section.kind == "deepspeed" and train.precision == "fp16" and topology.device.type == "cpu":
        raise InputError(
            "train.precision fp16: DeepSpeed does not support it on a CPU; take bf16, engine.kind ddp, or a GPU"
        )


__all__ = [
    "Engine",
    "State",
    "StepResult",
    "apply_training_options",
    "broadcasts_rank0_weights",
    "build_engine",
    "check_engine",
    "set_head_bias",
]
