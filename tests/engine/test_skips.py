"""A step whose gradient is not finite changes nothing, on any engine: the next is as if it had not been."""

import functools
import itertools
import traceback
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.ranks import (
    EMA,
    ENGINES,
    REPMLP,
    STATEFUL,
    SUPPORTED,
    Setting,
    assert_equal,
    overrides_for,
    stateful_engine,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]


CASES = [("mixer", name, {"train.precision": precision, "model.depth": "1"}) for name, precision in SUPPORTED]
# An optimizer whose own code can't skip a step.
CASES += [("mixer", name, {"optim.name": "lamb", "model.depth": "1"}) for name in ("ddp", "fsdp", "deepspeed 0")]
# Batch norms, of which the forward pass has already taken the batch into the statistics by then.
CASES += [
    (REPMLP, name, {"train.activation_checkpointing": recomputed, "train.grad_accum_steps": accumulated})
    for recomputed, accumulated, name in itertools.product(("false", "true"), "12", ENGINES)
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("recipe", "name", "keys"), CASES)
def test_a_step_that_is_not_finite_changes_nothing(digits, recipe, name, keys):
    setting = Setting(recipe, digits, *overrides_for(name), *keys.items(), *(EMA if recipe == REPMLP else ()))
    skip_a_step(setting, setting.engine)


@pytest.mark.parametrize("layer", STATEFUL)
def test_nor_does_what_else_a_forward_pass_changes(digits, layer):
    setting = Setting(REPMLP, digits, *EMA)
    skip_a_step(setting, lambda: stateful_engine(setting, layer))


def skip_a_step(setting, make):
    """Two steps, one that is not finite, which must change nothing, and two steps as if it had not been."""
    engine, undisturbed = make(), make()
    for one in (engine, undisturbed):
        setting.run(one, range(2))
    before = engine.state()
    *rest, batch = setting.steps[2]
    result = engine.step([*rest, replace(batch, inputs=batch.inputs * float("nan"))], setting.rates[2])
    assert not result.loss.isfinite()
    assert not torch.as_tensor(result.grad_norm).isfinite()
    assert_equal(before, engine.state())
    assert setting.run(engine, range(3, 5)) == setting.run(undisturbed, range(3, 5))
    assert_equal(engine.state(), undisturbed.state())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_nor_does_a_first_step_that_is_not_finite(digits, name, optim, system):
    """torch's fused SGD would then start from a momentum that was never initialised."""
    system({"torch.empty_like": functools.partial(torch.full_like, fill_value=7.0)})
    setting = Setting("mixer", digits, *overrides_for(name), ("optim.name", optim), ("model.depth", "1"))
    engine, undisturbed = setting.engine(), setting.engine()
    (batch,) = setting.steps[2]
    engine.step([replace(batch, inputs=batch.inputs * float("nan"))], setting.rates[2])
    assert setting.run(engine, range(3, 6)) == setting.run(undisturbed, range(3, 6))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed 0"])
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("recipe", ["mixer", REPMLP], ids=["mixer", "batch norms"])
def test_the_host_never_waits_for_the_device(digits, name, optim, recipe):
    """Nothing reads a tensor's value: on a GPU that would stop the queue of kernels."""
    setting = Setting(recipe, digits, *overrides_for(name), ("optim.name", optim), ("model.depth", "1"), *EMA)
    engine = setting.engine()
    setting.run(engine, range(2))
    with ReadValues() as read:
        engine.step(setting.steps[2], setting.rates[2])
    assert read.stacks == []


class ReadValues(TorchDispatchMode):
    """Collects where a tensor's value is read."""

    def __init__(self):
        super().__init__()
        self.stacks: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() == "aten::_local_scalar_dense":
            self.stacks.append("".join(traceback.format_stack(limit=8)))
        return function(*args, **(kwargs or {}))
