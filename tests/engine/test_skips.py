"""A step whose gradient is not finite changes nothing, on any engine: the next is as if it had not been."""

import functools
import traceback
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.ranks import ENGINES, SUPPORTED, Setting, overrides_for

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]


CASES = [(name, precision, "adamw") for name, precision in SUPPORTED]
CASES += [(name, "fp32", "lamb") for name in ("ddp", "fsdp", "deepspeed 0")]  # whose own code can't skip a step


@pytest.mark.parametrize(("name", "precision", "optim"), CASES)
def test_a_step_that_is_not_finite_changes_nothing(digits, name, precision, optim):
    keys = [("train.precision", precision), ("optim.name", optim), ("model.depth", "1")]
    setting = Setting("mixer", digits, *overrides_for(name), *keys)
    engine, undisturbed = setting.engine(), setting.engine()
    for one in (engine, undisturbed):
        setting.run(one, range(2))
    before = engine.state()
    (batch,) = setting.steps[2]
    result = engine.step([replace(batch, inputs=batch.inputs * float("nan"))], setting.rates[2])
    assert not result.loss.isfinite()
    assert not torch.as_tensor(result.grad_norm).isfinite()
    after = engine.state()
    for one, other in ((before.model, after.model), (before.optimizer, after.optimizer)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert setting.run(engine, range(3, 5)) == setting.run(undisturbed, range(3, 5))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_nor_does_the_very_first_step(digits, name, optim, monkeypatch):
    """torch's fused SGD would then start from a momentum that was never initialised."""
    monkeypatch.setattr(torch, "empty_like", functools.partial(torch.full_like, fill_value=7.0))
    setting = Setting("mixer", digits, *overrides_for(name), ("optim.name", optim), ("model.depth", "1"))
    engine, undisturbed = setting.engine(), setting.engine()
    (batch,) = setting.steps[2]
    engine.step([replace(batch, inputs=batch.inputs * float("nan"))], setting.rates[2])
    assert setting.run(engine, range(3, 6)) == setting.run(undisturbed, range(3, 6))


@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed 0"])
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_the_host_never_waits_for_the_device_in_a_step(digits, name, optim):
    """Nothing reads a tensor's value: on a GPU that would stop the queue of kernels."""
    setting = Setting("mixer", digits, *overrides_for(name), ("optim.name", optim), ("model.depth", "1"))
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
        if function is torch.ops.aten._local_scalar_dense.default:
            self.stacks.append("".join(traceback.format_stack(limit=8)))
        return function(*args, **(kwargs or {}))
