"""The optimiser and its learning rate."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.section import Decay, Decays, Section, key


class OptimSection(Section):
    """The optimiser. Biases and norms are never decayed."""

    name: Literal["adamw", "sgd", "lamb", "muon", "schedule_free", "beta_lasso"] = key(
        "adamw",
        "adamw; sgd with Nesterov momentum; lamb (timm's); muon for matrices inside the network, adamw for the rest; "
        "schedule_free adamw (Defazio 2024); beta_lasso (Neyshabur 2020)",
    )
    lr: Annotated[float, Field(gt=0)] = key(..., "peak learning rate, for the global batch as it stands")
    weight_decay: Annotated[float, Field(ge=0)] = key(0.05, "decay of weights; decoupled but in sgd")
    decay_embeddings: bool = key(True, "decay the weights of embeddings too; biases and norms never are")
    layer_decay: Annotated[float, Field(gt=0, le=1)] = key(1.0, "factor of the learning rate per layer from the head")
    betas: Decays = key((0.9, 0.999), "adamw and its kin: decay of the two moments")
    eps: Annotated[float, Field(gt=0)] = key(1e-8, "adamw and its kin: added to the root of the second moment")
    momentum: Decay = key(0.9, "sgd, muon: Nesterov momentum (muon's is usually 0.95); beta_lasso: heavy-ball")
    l1: Annotated[float, Field(ge=0)] = key(0.0, "beta_lasso: lambda, weight of the l1 penalty")
    lasso_beta: Annotated[float, Field(ge=0)] = key(50.0, "beta_lasso: weights under beta * lambda become zero")
    clip_grad: Annotated[float, Field(gt=0)] | None = key(None, "greatest global gradient norm, or null")

    @model_validator(mode="after")
    def lasso_has_its_own_penalty(self):
        if self.name == "beta_lasso" and (self.weight_decay > 0 or self.l1 == 0):
            raise ValueError("beta_lasso takes l1 in place of weight_decay: set weight_decay 0 and l1 above 0")
        if self.name != "beta_lasso" and self.l1 > 0:
            raise ValueError(f"l1 is beta_lasso's, {self.name} would ignore it")
        return self


class ScheduleSection(Section):
    """Learning rate by step: linear warm-up, then one of four ways down."""

    name: Literal["cosine", "linear", "step", "constant"] = key(
        "cosine",
        "cosine or linear down to min_lr; step: by decay_rate every decay_epochs; constant, then a cool-down",
    )
    warmup_epochs: Annotated[float, Field(ge=0)] = key(0.0, "length of the warm-up, epochs")
    warmup_lr: Annotated[float, Field(ge=0)] = key(1e-6, "learning rate at the first step of the warm-up")
    min_lr: Annotated[float, Field(ge=0)] = key(0.0, "learning rate at the last step (cosine, linear, cool-down)")
    decay_epochs: Annotated[float, Field(gt=0)] = key(30.0, "step: epochs between decays, warm-up included")
    decay_rate: Annotated[float, Field(gt=0, le=1)] = key(0.1, "step: factor of each decay")
    cooldown_epochs: Annotated[float, Field(ge=0)] = key(0.0, "constant: epochs of the linear cool-down at the end")
