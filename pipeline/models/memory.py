"""What weights, gradients and the optimiser take on each rank."""

from dataclasses import dataclass
from typing import Literal

# fp32 numbers a weight: two moments, or momentum. Muon has two where it leaves a weight to AdamW: few of them.
STATES = {"adamw": 2, "lamb": 2, "sgd": 1, "muon": 1, "schedule_free": 2, "beta_lasso": 1}


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank, in the steady state of training."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    parameters: int,
    *,
    optimizer: Literal["adamw", "sgd", "lamb", "muon", "schedule_free", "beta_lasso"] = "adamw",
    engine: Literal["ddp", "fsdp", "deepspeed"] = "ddp",
    zero_stage: int = 0,
    world: int = 1,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
) -> StateBytes:
    """Memory of `parameters` weights (Rajbhandari et al. 2020, section 3 and figure 1).

    DDP keeps weights and gradients in fp32 whatever the arithmetic, and so does FSDP, shared out. DeepSpeed keeps
    them in half precision in bf16 and fp16, with a master copy beside the optimiser's states; ZeRO 1 shares out the
    optimiser, 2 the gradients too, 3 the weights too. Left out: communication buckets, activations, fragmentation.
    """
    half = engine == "deepspeed" and precision != "fp32"
    stage = {"ddp": 0, "fsdp": 3, "deepspeed": zero_stage}[engine]

    def share(from_stage: int) -> int:
        return world if stage >= from_stage else 1

    number = 2 if half else 4
    return StateBytes(
        weights=number * parameters / share(3),
        gradients=number * parameters / share(2),
        optimizer=4 * (STATES[optimizer] + half) * parameters / share(1),
    )
