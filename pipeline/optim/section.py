"""The recipe's section `optim`."""

from typing import Annotated

from pydantic import Field, model_validator

from widemix.optim.registry import OPTIMIZERS, OptimizerSpec
from widemix.section import Amount, Decay, Decays, Epsilon, OneOf, PositiveAmount, Section, key


class OptimSection(Section):
    """The optimizer. As in timm, vectors, biases and what a network exempts by name are never decayed."""

    name: Annotated[str, OneOf("optimizer", OPTIMIZERS)] = key(
        "adamw", "the optimizer; timm:NAME is timm's, such as timm:lion"
    )
    lr: Annotated[float, Field(gt=0, le=1000)] = key(..., "peak learning rate, for the global batch of this recipe")
    weight_decay: Amount = key(0.05, "decay of weights; decoupled except in sgd")
    decay_embeddings: bool = key(
        True, "decay the weights of embeddings too, as timm does; vectors and biases never are"
    )
    layer_decay: Annotated[float, Field(gt=0, le=1)] = key(1.0, "factor of the learning rate per layer from the head")
    betas: Decays = key((0.9, 0.999), "AdamW variants: decay of the two moments")
    eps: Epsilon = key(1e-8, "AdamW variants: added to the root of the second moment")
    momentum: Decay = key(0.9, "sgd, muon: Nesterov momentum (muon's is usually 0.95); beta_lasso: heavy-ball")
    l1: Amount = key(0.0, "beta_lasso: lambda, weight of the l1 penalty")
    lasso_beta: Amount = key(50.0, "beta_lasso: weights under beta * lambda become zero")
    clip_grad: PositiveAmount | None = key(None, "greatest global gradient norm, or null")

    @property
    def spec(self) -> OptimizerSpec:
        """The entry of the table that `name` stands for."""
        return OPTIMIZERS[self.name]

    @model_validator(mode="after")
    def penalty_is_the_optimizers(self):
        """The penalty that the optimizer applies is the one that is set; for l1 there is no default."""
        if self.spec.penalty == "l1" and (self.weight_decay > 0 or self.l1 == 0):
            raise ValueError(f"{self.name} takes l1 in place of weight_decay: set weight_decay 0 and l1 above 0")
        if self.spec.penalty != "l1" and self.l1 > 0:
            takers = " or ".join(name for name, spec in OPTIMIZERS.items() if spec.penalty == "l1")
            raise ValueError(f"l1 is for {takers}, {self.name} would ignore it")
        return self

    @model_validator(mode="after")
    def optimizer_takes_the_values(self):
        """What the optimizer itself checks."""
        if self.spec.check is not None:
            self.spec.check(self)
        return self
