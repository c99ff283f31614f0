"""A step whose gradient is not finite changes nothing, on any engine: the next is as if it had not been."""

from dataclasses import replace

import pytest
import torch

from pipeline.engine.ddp import DDPEngine
from tests.engine.ranks import ENGINES, Setting, overrides_for

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_is_not_finite_changes_nothing(digits, name, precision):
    if (name, precision) == ("deepspeed 0", "bf16"):
        return  # refused
    setting = Setting("mixer", digits, *overrides_for(name), ("train.precision", precision), ("model.depth", "1"))
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


def test_a_fused_optimizer_skips_on_its_device(digits):
    setting = Setting("mixer", digits, ("model.depth", "1"))
    engine: DDPEngine = setting.engine()
    kept = ("params", "weight_decay", "lr_scale")
    groups = [{name: group[name] for name in kept} for group in engine.optimizer.param_groups]
    engine.optimizer = torch.optim.AdamW(groups, fused=True)
    setting.run(engine, range(2))
    before = engine.state()
    (batch,) = setting.steps[2]
    engine.step([replace(batch, inputs=batch.inputs * float("nan"))], setting.rates[2])
    after = engine.state()
    for one, other in ((before.model, after.model), (before.optimizer, after.optimizer)):
        assert all(torch.equal(one[key], other[key]) for key in one)
    setting.run(engine, range(3, 4))
    assert not torch.equal(engine.state().model["stem.proj.weight"], before.model["stem.proj.weight"])
