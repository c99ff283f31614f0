"""Every engine against one plain PyTorch loop that shares nothing with it but the model and the batches."""

import functools
import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import timm
import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from tests.engine.plain import plain_loop
from tests.engine.ranks import ENGINES, STEPS, Setting, assert_same, overrides_for
from widemix.distributed.topology import Topology
from widemix.engine import apply_training_options, check_engine, set_head_bias
from widemix.errors import InputError
from widemix.evaluation.networks import initial_module
from widemix.recipe.sections import TrainSection

# DeepSpeed's imports warn of its own deprecations.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]


@pytest.fixture
def case(digits):
    """case(engine, *overrides): the settings of a small Mixer of random permutations."""
    return lambda name, *overrides: Setting("rp_mixer", digits, *overrides_for(name), *overrides)


OPTIONS = {
    "adamw, clipped": [],
    "accumulated": [("optim.clip_grad", "null"), ("train.grad_accum_steps", "2")],
    "nesterov": [("optim.name", "sgd"), ("optim.weight_decay", "0.01")],
    "sigmoid, checkpointed": [("train.loss", "sigmoid"), ("train.activation_checkpointing", "true")],
    "lamb": [("optim.name", "lamb")],
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param(name, keys, id=f"{option}-{name}")
        for option, keys in OPTIONS.items()
        for name in (("ddp", "fsdp", "deepspeed 0") if option == "lamb" else ENGINES)
    ],
)
def test_losses_and_weights_are_those_of_the_plain_loop(case, name, overrides):
    given = case(name, *overrides)
    expected, model, _ = given.plain()
    engine = given.engine()
    assert given.run(engine) == pytest.approx(expected, rel=2e-6)
    found = engine.state().model
    for key, value in model.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-5, msg=key)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed 1"])
def test_the_weights_are_sharded_by_fsdp_alone(case, name):
    module = case(name).engine().module
    assert all(isinstance(each, DTensor) for each in module.parameters()) is (name == "fsdp")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ENGINES)
def test_stochastic_depth_drops_what_the_plain_loop_drops(case, name):
    """And drops the same again where a checkpointed block is computed a second time."""
    given = case(name, ("model.drop_path", "0.5"), ("train.activation_checkpointing", "true"))
    given.steps = [[replace(batch, keys=None) for batch in own] for own in given.steps]  # torch's generator decides

    def seeded(steps):
        for number, step in enumerate(steps):
            torch.manual_seed(number)
            yield step

    expected = plain_loop(given.model(), seeded(given.whole()), given.rates, optim=given.recipe.optim)
    engine = given.engine()
    found = [engine.step(given.steps[step], given.rates[step]).loss.item() for step in seeded(range(STEPS))]
    assert found == pytest.approx(expected, rel=2e-6)
    assert found != pytest.approx(given.run(given.engine()), rel=5e-5)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed 1", "deepspeed 3"])
def test_half_precision_starts_from_the_weights_in_fp32(case, name):
    """DeepSpeed rounds the network before it takes its fp32 copies."""
    given = case(name, ("train.precision", "bf16"), ("train.ema_decay", "0.9"))
    state, weights = given.engine().state(), given.model().state_dict()
    assert_same(state.model, weights)
    assert all(torch.equal(value, weights[key]) for key, value in state.ema.items())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed 1"])
def test_compiled_networks_have_the_losses_of_the_plain_loop(case, name, system):
    """Dynamo's part alone, which the engines' hooks could disturb: generated code takes minutes.

    "deepspeed 3" passes too; its hooks break the graph at every module, so that it takes 85 s.
    """
    compiled = []

    def keep(graph, inputs):
        compiled.append(graph)
        return graph.forward

    system({"torch.nn.Module.compile": functools.partialmethod(torch.nn.Module.compile, backend=keep)})
    given = case(name, ("train.compile", "true"))
    expected, *_ = given.plain()
    engine = given.engine()
    assert given.run(engine) == pytest.approx(expected, rel=2e-6)
    assert compiled
    assert engine.state().model.keys() == given.model().state_dict().keys()


@pytest.mark.parametrize("given", [{}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"}])
def test_cublas_and_nccl_are_deterministic_too(given, system):
    """Where the environment says nothing else."""
    asked = []
    system({"os.environ": dict(given), "torch.use_deterministic_algorithms": asked.append})
    system({"torch.backends.cudnn.benchmark": True})
    network, cpu = torch.nn.Linear(1, 1), torch.device("cpu")  # its head is none, which has no bias to set
    train = TrainSection(epochs=1, global_batch=1, deterministic=True)
    apply_training_options(network, train.model_copy(update={"deterministic": False}), cpu)
    assert (asked, torch.backends.cudnn.benchmark, os.environ) == ([], True, given)
    apply_training_options(network, train, cpu)
    assert (asked, torch.backends.cudnn.benchmark) == ([True], False)
    assert os.environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"} | given


def test_the_heads_first_bias_is_the_recipes(case):
    given = case("ddp", ("train.head_bias", "-2.0"))
    model = given.model()
    apply_training_options(model, given.recipe.train, torch.device("cpu"))
    for started in (model, initial_module(given.recipe)):  # the one that trains, and the one that analyses look at
        assert torch.equal(started.head.bias, torch.full((10,), -2.0))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("deit_tiny_distilled_patch16_224", ["head", "head_dist"]),
        ("crossvit_tiny_240", ["head.0", "head.1"]),
        ("repvit_m0_9", ["head.head.l", "head.head_dist.l"]),  # each after a batch norm
    ],
)
def test_heads_of_several_layers_have_it_too(name, layers):
    network = timm.create_model(name, num_classes=7)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    set_head_bias(network, TrainSection(epochs=1, global_batch=1, head_bias=-2.0))
    changed = {key for key, value in network.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {f"{layer}.bias" for layer in layers}
    assert all(torch.equal(network.get_submodule(layer).bias, torch.full((7,), -2.0)) for layer in layers)


def test_a_head_without_a_bias_is_refused():
    network = timm.create_model("resnet10t", num_classes=7)
    network.fc = torch.nn.Linear(network.num_features, 7, bias=False)
    with pytest.raises(InputError, match=r"train\.head_bias -2: the head of ResNet has no bias; set it to 0"):
        set_head_bias(network, TrainSection(epochs=1, global_batch=1, head_bias=-2.0))


@pytest.mark.parametrize("name", ENGINES)
def test_the_gradient_norm_is_that_of_the_plain_loop(case, name):
    given = case(name)
    model, (images, targets) = given.model(), given.whole()[0]
    cross_entropy(model(images), targets).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    result = given.engine().step(given.steps[0], given.rates[0])
    assert result.grad_norm.item() == pytest.approx(expected, rel=1e-5)


HALF = [("ddp", "bf16"), ("ddp", "fp16"), ("fsdp", "bf16"), ("fsdp", "fp16"), ("deepspeed 1", "bf16")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("writer", "reader", "keys"),
    [
        ("ddp", "deepspeed 0", ()),
        ("deepspeed 0", "deepspeed 3", ()),
        *((name, name, (("train.precision", precision),)) for name, precision in HALF),
        ("ddp", "ddp", (("optim.name", "lamb"),)),  # timm's counts its steps in the groups
    ],
)
def test_any_engine_loads_the_state_of_any_other(case, writer, reader, keys):
    """An engine of the same kind exactly; whatever it had done is forgotten."""
    given = case(writer, *keys)
    expected = given.run(given.engine())
    engine, other = given.engine(), case(reader, *keys).engine()
    before = given.run(engine, range(5))
    given.run(other, range(3))
    other.load(engine.state())
    after = before + given.run(other, range(5, STEPS))
    assert after == (expected if writer == reader else pytest.approx(expected, rel=2e-6))


@pytest.mark.parametrize("stage", range(3))
def test_deepspeed_does_not_wait_for_the_device(case, stage, system):
    from deepspeed.accelerator import get_accelerator

    given = case(f"deepspeed {stage}")
    engine, waited, kind = given.engine(), [], type(get_accelerator())
    system({f"{kind.__module__}.{kind.__qualname__}.synchronize": lambda *_: waited.append(None)})
    given.run(engine)
    assert not waited


@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed 1"])
def test_fp16_on_a_cpu_is_refused_where_deepspeed_has_none(case, name):
    for precision, device in (("fp16", "cpu"), ("fp16", "cuda"), ("bf16", "cpu")):
        recipe, place = case(name, ("train.precision", precision)).recipe, Topology(0, 1, 0, 1, torch.device(device))
        refused = name == "deepspeed 1" and (precision, device) == ("fp16", "cpu")
        with pytest.raises(InputError, match="take bf16, engine") if refused else nullcontext():
            check_engine(recipe.engine, recipe.optim, recipe.train, place)
