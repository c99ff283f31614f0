"""The recipe's section `optim`, and the table of optimizers: everything that a value of `optim.name` stands for.

Recipes read this table, so nothing here imports torch or an optimizer's code before a builder is called.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from widemix.arguments import Name, check_arguments
from widemix.errors import InputError
from widemix.optim.spec import Groups, OptimizerSpec
from widemix.section import Amount, Decay, Decays, Epsilon, OneOf, PositiveAmount, Section, key

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

TIMM = "timm:"


def adam_options(section: "OptimSection") -> dict[str, Any]:
    """The keyword arguments that all AdamW variants share."""
    return {"lr": section.lr, "betas": section.betas, "eps": section.eps}


def _adamw(groups: Groups, section: "OptimSection") -> "Optimizer":
    from torch.optim import AdamW

    return AdamW(groups, **adam_options(section), fused=True)  # on CPUs too, where it is several times as fast


def _sgd(groups: Groups, section: "OptimSection") -> "Optimizer":
    from widemix.optim.optimizers import FusedSgd

    return FusedSgd(groups, lr=section.lr, momentum=section.momentum, nesterov=section.momentum > 0, fused=True)


def _lamb(groups: Groups, section: "OptimSection") -> "Optimizer":
    from timm.optim import Lamb

    return Lamb(groups, **adam_options(section), max_grad_norm=None)


def _muon(groups: Groups, section: "OptimSection") -> "Optimizer":
    from widemix.optim.optimizers import MuonAndAdamW

    return MuonAndAdamW(groups, adam_options(section) | {"fused": True}, section.momentum)


def _schedule_free(groups: Groups, section: "OptimSection") -> "Optimizer":
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(groups, **adam_options(section))
    optimizer.train()  # its mode of training: the parameters hold y, and `_schedule_free_average` computes x
    return optimizer


def _schedule_free_average(optimizer: "Optimizer", weight: "Tensor") -> "Tensor":
    """x, to evaluate with, from the trained y = (1 - beta1) z + beta1 x (equation 4); a new tensor."""
    z = optimizer.state.get(weight, {}).get("z")
    return weight.clone() if z is None else weight.lerp(z, 1 - 1 / optimizer.defaults["betas"][0])


def _check_schedule_free(section: "OptimSection") -> None:
    if section.betas[0] == 0:
        raise ValueError("schedule_free computes its average from betas: the first must be above 0")


def _beta_lasso(groups: Groups, section: "OptimSection") -> "Optimizer":
    from widemix.optim.optimizers import BetaLasso

    return BetaLasso(groups, section.lr, section.l1, section.lasso_beta, section.momentum)


class _Table(dict[str, OptimizerSpec]):
    """The registered optimizers, and those of timm as timm:NAME; ValueError where timm has none."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (str(name).startswith(TIMM) and bool(self[str(name)]))

    def __missing__(self, name: str) -> OptimizerSpec:
        if not name.startswith(TIMM):
            raise KeyError(name)
        from widemix.optim.timm_optimizer import timm_spec

        return timm_spec(name.removeprefix(TIMM))


OPTIMIZERS: dict[str, OptimizerSpec] = _Table(
    {
        "adamw": OptimizerSpec(_adamw, "AdamW (Loshchilov & Hutter 2019)", states=2),
        "sgd": OptimizerSpec(_sgd, "SGD with Nesterov momentum", states=1),
        "lamb": OptimizerSpec(
            _lamb, "LAMB, timm's", states=2, needs_whole="the norm of each parameter", group_counters=("step",)
        ),
        # Muon keeps one state; the few weights that it leaves to AdamW have two.
        "muon": OptimizerSpec(
            _muon,
            "Muon for matrices inside the network, AdamW for the rest",
            states=1,
            needs_whole="whole matrices",
            splits_matrices=True,
        ),
        "schedule_free": OptimizerSpec(
            _schedule_free,
            "schedule-free AdamW (Defazio et al. 2024)",
            states=2,
            group_counters=("k", "weight_sum", "lr_max"),
            evaluation_weight=_schedule_free_average,
            check=_check_schedule_free,
        ),
        "beta_lasso": OptimizerSpec(_beta_lasso, "beta-LASSO (Neyshabur 2020)", states=1, penalty="l1"),
    }
)


@check_arguments
def register(name: Name, spec: OptimizerSpec) -> None:
    """Make `optim.name: NAME` mean this optimizer, in recipes that are loaded from now on.

    Raises `InputError` where the name is taken, or an argument is of another type.
    """
    if name in OPTIMIZERS:
        raise InputError(f"optimizer {name} is already registered")
    OPTIMIZERS[name] = spec


class OptimSection(Section):
    """The optimizer. As in timm, vectors, biases and what a network exempts by name are never decayed."""

    name: Annotated[str, OneOf("optimizer", OPTIMIZERS)] = key(
        "adamw",
        "the optimizer; timm:NAME is timm's, such as timm:lion, with the values of this section where it takes two "
        "betas, an eps or a momentum, not with its own defaults (lion's betas are 0.9, 0.99)",
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
        """Values that the optimizer itself can use."""
        if self.spec.check is not None:
            self.spec.check(self)
        return self
