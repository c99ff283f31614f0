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


@pytest.mark.parametrize(
    ("stage", "precision", "reduce_dtype", "weights", "gradients", "optimizer"),
    [  # bytes of a number, of which a rank keeps all (int) or its part (in a tuple)
        (0, "fp32", "fp32", 4, 4, 8),
        (1, "fp32", "fp32", 4, 4, (8,)),
        (1, "bf16", "bf16", 2, 2, (12,)),
        (1, "bf16", "fp32", 2, 2 + 4, (12,)),
        (1, "fp16", "fp32", 2, 2 + 4, (12,)),
        (2, "bf16", "bf16", 2, (2,), (12,)),
        (2, "bf16", "fp32", 2, (4,), (12,)),
        (3, "bf16", "fp32", (2,), (4,), (12,)),
        (3, "fp32", "fp32", (4,), (4,), (8,)),
    ],
)
def test_each_stage_shards_what_it_says_in_its_precision(
    stage, precision, reduce_dtype, weights, gradients, optimizer
):
    given = {"zero_stage": stage, "world": 8, "precision": precision, "reduce_dtype": reduce_dtype}
    cost = state_bytes(1000, engine="deepspeed", **given)
    for found, of in ((cost.weights, weights), (cost.gradients, gradients), (cost.optimizer, optimizer)):
        assert found == 1000 * (of[0] / 8 if isinstance(of, tuple) else of)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_weights_have_no_masters_and_offloaded_state_is_elsewhere(stage):
    given = {"zero_stage": stage, "world": 8, "precision": "bf16", "engine": "deepspeed"}
    whole, probe = state_bytes(1000, **given), state_bytes(1000, trained=100, ema=True, **given)
    assert probe.weights == whole.weights
    assert probe.gradients == whole.gradients / 10
    assert probe.optimizer == (12 + 4) * 100 / 8
    offloaded = state_bytes(1000, offload=True, ema=True, **given)
    assert (offloaded.weights, offloaded.gradients, offloaded.optimizer) == (whole.weights, whole.gradients, 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_torchs_engines_keep_fp32_whatever_is_computed_in(precision):
    plain = state_bytes(1000, engine="ddp", precision=precision, world=4)
    assert (plain.weights, plain.gradients, plain.optimizer) == (4000, 4000, 8000)
    assert state_bytes(1000, engine="ddp", precision=precision, world=4, offload=True) == plain
    averaged = state_bytes(1000, trained=100, engine="fsdp", precision=precision, world=4, ema=True)
    assert (averaged.weights, averaged.gradients, averaged.optimizer) == (1000, 100, (8 * 100 + 4 * 1000) / 4)
    sharded = state_bytes(1000, engine="fsdp", precision=precision, world=4)
    assert (sharded.weights, sharded.gradients, sharded.optimizer) == (1000, 1000, 2000)
