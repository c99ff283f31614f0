"""Memory of weights, gradients and optimizer state on each rank."""

from dataclasses import dataclass
from typing import Literal

from widemix.optim.section import OPTIMIZERS


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank, in the steady state of training."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    parameters: int,
    *,
    trained: int | None = None,
    optimizer: str = "adamw",
    engine: Literal["ddp", "fsdp", "deepspeed"] = "ddp",
    zero_stage: int = 0,
    world: int = 1,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    reduce_dtype: Literal["fp32", "bf16"] = "fp32",
    ema: bool = False,
    offload: bool = False,
) -> StateBytes:
    """Memory of `parameters` weights under `optim.name: OPTIMIZER` (Rajbhandari et al. 2020, section 3 and figure 1).

    trained: how many of them are not frozen; by default all. world: ranks that share the shards. ema: with an average
    (DeepSpeed's is of the trained weights alone), sharded as the optimizer's states are. offload: these and the
    optimizer's states, of FSDP everything, are in host memory.

    DDP keeps weights and gradients in fp32 in any precision, and so does FSDP, sharded. DeepSpeed keeps them in half
    precision in bf16 and fp16, with an fp32 copy of the weights next to the optimizer's states, and adds gradients up
    in `reduce_dtype`; ZeRO 1 shards the optimizer, 2 the gradients too, 3 the weights too. Not counted: communication
    buckets, activations, fragmentation.
    """
    half = engine == "deepspeed" and precision != "fp32"
    stage = {"ddp": 0, "fsdp": 3, "deepspeed": zero_stage}[engine]
    trained = parameters if trained is None else trained
    averaged = trained if engine == "deepspeed" else parameters
    states = OPTIMIZERS[optimizer].states + half
    offload &= stage > 0
    if offload and engine == "fsdp":
        return StateBytes(0, 0, 0)

    def shards(from_stage: int) -> int:
        return world if stage >= from_stage else 1

    number = 2 if half else 4
    wide = half and reduce_dtype == "fp32"  # below stage 2 these sums are next to the gradients in half precision
    return StateBytes(
        weights=number * parameters / shards(3),
        gradients=(4 * wide + number * (not wide or stage < 2)) * trained / shards(2),
        optimizer=0 if offload else 4 * (states * trained + ema * averaged) / shards(1),
    )
