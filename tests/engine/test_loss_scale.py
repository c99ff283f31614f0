"""fp16 under ZeRO, which DeepSpeed has on GPUs only and is forced here: the loss scale in checkpoints."""

import copy
from dataclasses import replace

import pytest

from tests.engine.ranks import Setting, overrides_for

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]
OVERFLOWS = [0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]


@pytest.fixture
def setting(digits, system):
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    system({f"{accelerator.__module__}.{accelerator.__qualname__}.is_fp16_supported": lambda _: True})

    def made(name: str) -> Setting:
        keys = [("train.precision", "fp16"), ("model.depth", "1")]
        return Setting("mixer", digits, *overrides_for(name), *keys)

    return made


def scales(scaler, overflows) -> list[float]:
    """The scale after each of these steps."""
    found = []
    for overflow in overflows:
        scaler.update_scale(bool(overflow))
        found.append(scaler.cur_scale)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resumed_run_has_the_loss_scale_and_its_counts(setting, stage):
    engine, other = (setting(f"deepspeed {stage}").engine() for _ in range(2))
    for one in (engine, other):
        one.zero.loss_scaler.scale_window = 4
    for stop in range(len(OVERFLOWS)):
        other.load(engine.state())
        assert other.scalars() == engine.scalars()
        undisturbed = copy.copy(engine.zero.loss_scaler)
        rest = scales(undisturbed, OVERFLOWS[stop:])
        assert scales(other.zero.loss_scaler, OVERFLOWS[stop:]) == rest
        assert len({*rest}) > 1 or stop == len(OVERFLOWS) - 1
        scales(engine.zero.loss_scaler, OVERFLOWS[stop : stop + 1])


def test_torchs_engines_go_on_from_it_and_back(setting):
    engine, ddp = setting("deepspeed 1").engine(), setting("ddp").engine()
    scales(engine.zero.loss_scaler, [1, 1, 1, 0, 0])
    ddp.load(engine.state())
    assert ddp.scaler.state_dict()["scale"] == engine.zero.loss_scaler.cur_scale
    assert ddp.scaler.state_dict()["_growth_tracker"] == 2
    other = setting("deepspeed 2").engine()
    other.load(ddp.state())
    assert other.scalars() == {**ddp.scalars(), "loss_scale_hysteresis": 2.0}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overflows_without_end_are_no_error_of_deepspeeds(setting, stage):
    given = setting(f"deepspeed {stage}")
    engine, (batch,) = given.engine(), given.steps[0]
    for _ in range(22):
        result = engine.step([replace(batch, inputs=batch.inputs * float("nan"))], 1e-3)
        assert not result.grad_norm.isfinite()
    assert engine.zero.loss_scaler.cur_scale == 1
    assert result.grad_norm.isnan() or result.grad_norm.isinf()
