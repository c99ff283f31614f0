"""Every key of the optimizer's section changes the weights after a few steps, every key of the schedule the rates."""

from typing import Any

import pytest
import torch

from widemix.models.mixer.section import MixerSection
from widemix.models.registry import build_model
from widemix.optim.build import build_optimizer, set_rate
from widemix.optim.section import OptimSection
from widemix.recipe.sections import ScheduleSection
from widemix.training.schedule import build_schedule

LASSO = {"name": "beta_lasso", "weight_decay": 0.0, "l1": 0.01}
VALUES = {"name": "sgd", "weight_decay": 0.5, "layer_decay": 0.5, "betas": (0.8, 0.99), "eps": 0.1, "momentum": 0.5}
VALUES |= {"l1": 0.1, "lasso_beta": 5.0}
OPTIM = {  # the keys that an optimizer reads
    "adamw": "name weight_decay layer_decay betas eps",
    "sgd": "momentum weight_decay",
    **dict.fromkeys(("lamb", "schedule_free", "timm:adamw"), "weight_decay betas eps"),
    "muon": "weight_decay betas eps momentum",
    "beta_lasso": "l1 lasso_beta momentum",
}
ELSEWHERE = {"lr", "clip_grad", "decay_embeddings"}  # the schedule's, the engine's, and test_optim.py
STEP = {"name": "step", "decay_epochs": 2.0}
SCHEDULE: dict[str, tuple[dict[str, Any], Any]] = {
    "name": ({}, "linear"),
    "warmup_epochs": ({}, 1.5),
    "warmup_lr": ({"warmup_epochs": 2.0}, 0.05),
    "min_lr": ({}, 0.01),
    "decay_epochs": (STEP, 3.0),
    "decay_rate": (STEP, 0.5),
    "cooldown_epochs": ({"name": "constant"}, 2.0),
}


def trained(**keys: Any) -> list[torch.Tensor]:
    """The weights after three steps."""
    torch.manual_seed(0)
    network = build_model(MixerSection(kind="mixer", patch_size=4, channels=6, depth=2, expansion=1.0), 8, 3)
    optimizer = build_optimizer(OptimSection(lr=0.1, **keys), network)
    inputs = torch.randn(5, 3, 8, 8)
    for step in range(3):
        set_rate(optimizer, 0.1 / (1 + step))
        (network(inputs) - torch.arange(3.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in network.parameters()]


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in OPTIM.items() for key in keys.split()])
def test_another_value_trains_other_weights(name, key):
    others = LASSO if name == "beta_lasso" else {"name": name}
    first = trained(**others)
    assert all(map(torch.equal, first, trained(**others)))
    assert not all(map(torch.allclose, first, trained(**others | {key: VALUES[key]})))


def rates(**keys: Any) -> list[float]:
    schedule = build_schedule(ScheduleSection(**keys), 0.1, steps_per_epoch=4, epochs=6)
    return [schedule(step) for step in range(24)]


@pytest.mark.parametrize("key", SCHEDULE)
def test_another_value_gives_other_rates(key):
    others, value = SCHEDULE[key]
    assert rates(**others) != rates(**others | {key: value})


def test_the_tables_have_every_key():
    assert set(OptimSection.model_fields) == set(" ".join(OPTIM.values()).split()) | ELSEWHERE
    assert set(ScheduleSection.model_fields) == set(SCHEDULE)
