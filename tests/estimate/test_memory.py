"""Memory of weights, gradients and optimizer state, against real tensors and the figures of ZeRO's paper."""

import pytest
import torch

from widemix.estimate.traffic import state_bytes


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_plain_training_keeps_what_the_formula_says(name):
    model = torch.nn.Linear(30, 20)
    options = {"momentum": 0.9, "nesterov": True} if name == "sgd" else {}
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](model.parameters(), lr=0.1, **options)
    model(torch.randn(2, 30)).sum().backward()
    optimizer.step()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    cost = state_bytes(numbers, optimizer=name)
    assert cost.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert cost.gradients == sum(parameter.grad.nbytes for parameter in model.parameters())
    states = [tensor for state in optimizer.state.values() for key, tensor in state.items() if key != "step"]
    assert cost.optimizer == sum(tensor.nbytes for tensor in states)


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed"])
def test_a_network_frozen_as_a_whole_has_weights_alone(engine):
    given = {"engine": engine, "zero_stage": 3, "world": 4, "trained": 0}
    found = state_bytes(1000, **given)
    assert (found.weights, found.gradients, found.optimizer) == (4000 if engine == "ddp" else 1000, 0, 0)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_stages_are_those_of_its_paper(stage, gigabytes):
    """Figure 1 of Rajbhandari et al. 2020: 7.5 B weights, Adam, half precision, 64 ranks."""
    given = {"zero_stage": stage, "world": 64, "precision": "bf16", "reduce_dtype": "bf16"}
    cost = state_bytes(7_500_000_000, engine="deepspeed", **given)
    assert cost.total / 1e9 == pytest.approx(gigabytes, abs=0.06)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_weights_have_no_masters_and_offloaded_state_is_elsewhere(stage):
    given = {"zero_stage": stage, "world": 8, "precision": "bf16", "engine": "deepspeed"}
    whole, probe = state_bytes(1000, **given), state_bytes(1000, trained=100, ema=True, **given)
    assert probe.weights == whole.weights
    assert probe.gradients == whole.gradients / 10
    assert probe.optimizer == (12 + 4) * 100 / 8
    offloaded = state_bytes(1000, offload=True, ema=True, **given)
    assert (offloaded.weights, offloaded.gradients, offloaded.optimizer) == (whole.weights, whole.gradients, 0)
    assert state_bytes(1000, engine="ddp", offload=True).optimizer == 8000  # which offloads nothing
