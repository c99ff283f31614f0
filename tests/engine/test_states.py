"""States and averages: any engine goes on from any other's, on one rank and on two, as if it had been one run."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from timm.utils import ModelEmaV3
from torch.nn.functional import cross_entropy

from tests.engine.ranks import (
    CHAIN,
    EMA,
    ENGINES,
    REPMLP,
    STEPS,
    SUPPORTED,
    Setting,
    assert_equal,
    assert_same,
    chain,
    overrides_for,
    saved_by,
)
from widemix.data.loader import EvalLoader
from widemix.engine import State
from widemix.engine.ema import ema_decay
from widemix.errors import InputError
from widemix.evaluation.evaluate import evaluate_engine
from widemix.run.saving import assembled

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]


timms_average = functools.partial(ModelEmaV3, decay=0.8, use_warmup=True)


@pytest.fixture(scope="module")
def expected(alone, digits):
    setting = Setting("mixer", digits, ("data.eval_split", "train"))
    losses, model, ema = setting.plain(timms_average)
    metrics = {}
    with EvalLoader(setting.data, 1437, setting.topology).batches() as batches, torch.no_grad():
        (batch,) = batches
        for prefix, network in (("", model), ("ema_", ema)):
            logits = network.eval()(batch.inputs)
            hit = logits.topk(5).indices == batch.targets[:, None]
            metrics[f"{prefix}loss"] = cross_entropy(logits, batch.targets).item()
            metrics[f"{prefix}top1"] = 100 * hit[:, 0].double().mean().item()
            metrics[f"{prefix}top5"] = 100 * hit.any(dim=1).double().mean().item()
    return {"losses": losses, "model": model.state_dict(), "ema": ema.state_dict(), "metrics": metrics}


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_run_on_one_engine_after_another_is_one_run(expected, request, digits, world):
    assert set(CHAIN) == set(ENGINES) - {"deepspeed 0"}
    found = chain(digits) if world == 1 else request.getfixturevalue("ranks")(2, "chain")
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    for weights in ("model", "ema"):
        assert found[weights].keys() == expected[weights].keys()
        for name, value in expected[weights].items():
            if name.endswith("mlp_tokens.fc2.bias"):
                continue  # has no gradient but rounding, which Adam makes large
            torch.testing.assert_close(found[weights][name], value, rtol=1e-4, atol=2e-5, msg=name)
    assert found["metrics"].keys() == expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        assert found["metrics"][name] == pytest.approx(value, rel=1e-4 if "loss" in name else 0, abs=0.07)
    assert found["metrics"]["ema_loss"] != pytest.approx(found["metrics"]["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed 1"])
def test_the_saved_average_of_statistics_is_timms(digits, name):
    setting = Setting(REPMLP, digits, *overrides_for(name), *EMA)
    model, engine = setting.model(), setting.engine()
    average = timms_average(model)
    for step in range(4):
        setting.run(engine, range(step, step + 1))
        state = engine.state()
        model.load_state_dict(state.model)
        average.update(model, step + 1)
    for key, value in average.module.state_dict().items():
        if key.endswith(("running_mean", "running_var")):
            assert not torch.allclose(value, state.model[key], rtol=1e-3)
            torch.testing.assert_close(state.ema[key], value)
    other = setting.engine()
    other.load(state)
    assert_equal(other.state(), state)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed 1", "deepspeed 3"])
def test_frozen_weights_stay_and_are_saved_and_loaded(digits, name):
    overrides = (*overrides_for(name), ("train.freeze", "[stem.*, blocks.0.*]"), ("model.depth", "2"))
    setting = Setting("mixer", digits, *overrides)
    first, (expected, *_) = setting.model().state_dict(), setting.plain()
    engine, other = setting.engine(), setting.engine()
    losses = setting.run(engine, range(4))
    state = engine.state()
    assert_equal(saved_by(engine), state)
    assert state.model.keys() == first.keys()
    for key, value in first.items():
        assert torch.equal(state.model[key], value) == key.startswith(("stem.", "blocks.0.")), key
    moved = {key: value + 1 if key.startswith("stem.") else value for key, value in state.model.items()}
    other.load(replace(state, model=moved))
    assert torch.equal(other.state().model["stem.proj.weight"], moved["stem.proj.weight"])
    other.load(state)
    assert losses + setting.run(other, range(4, STEPS)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("optim", ["adamw", "schedule_free"])
@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed 2"])
def test_weights_that_were_frozen_begin_to_count_steps(digits, name, optim):
    """Late in schedule-free's count their first steps would be 30 times the rate, with ZeRO from zeros in z."""
    overrides = [*overrides_for(name), ("model.depth", "1"), ("optim.name", optim)]
    overrides += [("schedule.name", "constant"), ("schedule.min_lr", "0")]
    frozen, trained = (Setting("mixer", digits, *overrides, ("train.freeze", each)) for each in ("[stem.*]", "[]"))
    engine, other, less = frozen.engine(), trained.engine(), frozen.engine()
    frozen.run(engine, range(4))
    before = engine.state()
    if name == "deepspeed 2" or optim == "schedule_free":
        together = "the optimizer" if optim == "schedule_free" else "ZeRO"
        with pytest.raises(InputError, match=rf"{together}.* counts their steps together; keep train\.freeze"):
            other.load(before)
        trained.run(other, range(4))
        less.load(other.state())  # fewer of them are fine
        return
    other.load(before)
    trained.run(other, range(4, 5))
    steps = other.state().optimizer
    assert [steps[f"step/{each}.weight"] for each in ("stem.proj", "head")] == [1, 5]


@pytest.mark.parametrize("name", [name for name, precision in SUPPORTED if precision == "bf16"])
def test_frozen_weights_keep_all_bits_in_half_precision(digits, name):
    """All bits, also after other ones were loaded, and in the average."""
    overrides = [*overrides_for(name), ("train.freeze", "[stem.*]"), ("model.depth", "1"), *EMA]
    setting = Setting("mixer", digits, *overrides, ("train.precision", "bf16"))
    first = setting.model().state_dict()["stem.proj.weight"]
    assert not torch.equal(first.bfloat16().float(), first)
    engine = setting.engine()
    setting.run(engine, range(2))
    for state in (engine.state(), saved_by(engine)):
        for weights in (state.model, state.ema):
            torch.testing.assert_close(weights["stem.proj.weight"], first, rtol=0, atol=0)
    moved = state.model | {"stem.proj.weight": first + 1 / 3}
    engine.load(replace(state, model=moved))
    assert torch.equal(engine.state().model["stem.proj.weight"], first + 1 / 3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "precision"), SUPPORTED)
def test_evaluating_the_average_uses_it_and_changes_nothing(digits, name, precision):
    setting = Setting("mixer", digits, *overrides_for(name), *EMA, ("train.precision", precision))
    engine = setting.engine()
    setting.run(engine, range(4))
    before = engine.state()
    inputs = setting.steps[5][0].inputs

    def logits():
        with torch.no_grad(), engine.evaluate_mode():
            return engine.module(inputs.to(getattr(engine, "dtype", torch.float32))).float()

    raw = logits()
    with engine.weights()["ema_"]:
        averaged = logits()
    assert torch.equal(logits(), raw)
    assert_equal(engine.state(), before)
    network = setting.model()
    network.load_state_dict(before.ema)
    tolerance = 1e-5 if precision == "fp32" else 3e-2
    expected = network(inputs).detach()
    torch.testing.assert_close(averaged, expected, rtol=tolerance, atol=tolerance)
    assert (raw - expected).norm() > 5 * (averaged - expected).norm()


@pytest.mark.parametrize("warmup", [False, True])
def test_the_decay_is_timms(warmup):
    theirs = ModelEmaV3(torch.nn.Linear(1, 1), decay=0.99, use_warmup=warmup)
    updates = torch.arange(1, 2000, dtype=torch.float64)
    ours = ema_decay(updates, decay=0.99, warmup=warmup)
    assert ours.tolist() == pytest.approx([theirs.get_decay(update) for update in range(1, 2000)])


@pytest.mark.parametrize("name", ENGINES)
def test_norm_and_zeros_of_the_weights_are_without_frozen_ones(digits, name):
    lasso = {"name": "beta_lasso", "weight_decay": 0, "l1": 0.001, "lasso_beta": 50}
    keys = [(f"optim.{key}", str(value)) for key, value in lasso.items()]
    setting = Setting("mixer", digits, *overrides_for(name), *keys, *EMA, ("train.freeze", "[stem.*]"))
    engine = setting.engine()
    setting.run(engine)
    trained = torch.cat([w.flatten() for name, w in engine.state().model.items() if not name.startswith("stem")])
    zeros = 100 * (trained == 0).double().mean().item()
    assert 5 < zeros < 95
    metrics = evaluate_engine(engine, EvalLoader(setting.data, 359, setting.topology), setting.data.num_classes)
    assert metrics["zero_weights"] == pytest.approx(zeros)
    assert "ema_zero_weights" not in metrics
    assert engine.weight_norm() == pytest.approx(trained.double().norm().item())


@pytest.mark.parametrize("name", ["ddp", "deepspeed 2"])
def test_later_steps_change_nothing_of_what_is_saved(digits, name):
    setting = Setting(REPMLP, digits, *overrides_for(name), *EMA)
    engine = setting.engine()
    setting.run(engine, range(1))
    state, shards = engine.state(), engine.local_shards()
    kept = copy.deepcopy(state)
    setting.run(engine, range(1, 2))
    for found in (state, State.of(assembled(shards), state.scalars)):
        assert_equal(found, kept)


def test_an_average_that_is_not_saved_starts_from_weights(digits):
    keys = (*overrides_for("ddp"), ("model.depth", "1"))
    plain_one, averaging = Setting("mixer", digits, *keys), Setting("mixer", digits, *keys, *EMA)
    engine, other = plain_one.engine(), averaging.engine()
    plain_one.run(engine, range(2))
    averaging.run(other, range(3, 5))
    state = engine.state()
    assert (state.ema, "ema_updates" in state.scalars) == ({}, False)
    other.load(state)
    found = other.state()
    assert found.scalars["ema_updates"] == 0
    assert_same(found.ema, state.model)
    averaging.run(other, range(2, 4))
    engine.load(other.state())  # and one that is not wanted is left out
    assert other.state().scalars["ema_updates"] == 2
    assert engine.state().ema == {}
