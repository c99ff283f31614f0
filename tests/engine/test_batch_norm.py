"""Batch norms over ranks against torch's own on the ranks' batches together."""

import os
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d, EvoNorm2dB0, FrozenBatchNormAct2d
from torch import nn

from tests.conftest import Command
from tests.engine.ranks import EMA, ENGINES, REPMLP, Setting, overrides_for, stateful_engine
from tests.forks import Forks, group_of
from widemix.engine.batch_norm import ForwardBuffers, freeze_batch_norms, sync_batch_norms
from widemix.errors import InputError

SHAPES = {"1d": (6, 5), "1d with places": (6, 5, 7), "2d": (6, 5, 3, 4)}


def network(name: str) -> nn.Module:
    kind = nn.BatchNorm2d if name == "2d" else nn.BatchNorm1d
    model = nn.Sequential(kind(5), nn.ReLU(), kind(5, momentum=None))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(0.5, 1.5 + number, 5))
    return model


def batches(name: str) -> torch.Tensor:
    """Two steps of a batch that six ranks may share: [2, B, ...]."""
    numbers = torch.Generator().manual_seed(3)
    return 1 + 4 * torch.randn(2, *SHAPES[name], generator=numbers)


def train(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output and the input's gradient of the last step, the parameters' gradients summed, and the buffers."""
    for given in inputs:
        x = given.clone().requires_grad_()
        out = model(x)
        (out * torch.arange(out.numel()).view_as(out).sin()[: len(out)]).sum().backward()
    return [out, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def be(folder, world):
    rank = int(os.environ["RANK"])
    store = f"file://{folder}/store-{world}"
    dist.init_process_group("gloo", store, timeout=timedelta(seconds=600), rank=rank, world_size=world)
    found = {}
    for name in SHAPES:
        model = network(name)
        sync_batch_norms(model)
        found[name] = train(model, batches(name).chunk(world, dim=1)[rank])
        evaluated = model.eval()(batches(name)[0])
        found[name].append(evaluated)
    torch.save(found, folder / f"{world}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def of_ranks(request, tmp_path_factory):
    folder, world = tmp_path_factory.mktemp("norms"), request.param
    codes, said = Forks(be, folder, world, log=folder / "log", environs=group_of(world)).wait()
    assert codes == [0] * world, said
    return [torch.load(folder / f"{world}-{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_together_compute_what_one_computes(of_ranks, name):
    model, world = network(name), len(of_ranks)
    inputs = batches(name)
    weights = torch.cat([torch.arange(part[0].numel()).view_as(part[0]).sin() for part in inputs.chunk(world, 1)])
    for given in inputs:
        x = given.clone().requires_grad_()
        out = model(x)
        (out * weights).sum().backward()
    parameters, buffers = list(model.parameters()), list(model.buffers())
    found = [of_rank[name] for of_rank in of_ranks]
    torch.testing.assert_close(torch.cat([f[0] for f in found]), out)
    torch.testing.assert_close(torch.cat([f[1] for f in found]), x.grad)
    for number, parameter in enumerate(parameters, 2):
        torch.testing.assert_close(sum(f[number] for f in found), parameter.grad)
    for number, buffer in enumerate(buffers, 2 + len(parameters)):
        for of_rank in found:
            torch.testing.assert_close(of_rank[number], buffer)
    for of_rank in found:
        torch.testing.assert_close(of_rank[-1], model.eval()(inputs[0]))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("accumulated", ["1", "2"])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_activation_checkpointing_counts_no_batch_twice(digits, name, accumulated):
    states = []
    for checkpointed in ("false", "true"):
        keys = [("train.activation_checkpointing", checkpointed), ("train.grad_accum_steps", accumulated)]
        setting = Setting(REPMLP, digits, *overrides_for(name), *keys, *EMA)
        engine = setting.engine()
        setting.run(engine, range(3))
        states.append(engine.state())
    plain, recomputed = states
    counts = [value for key, value in recomputed.model.items() if key.endswith("num_batches_tracked")]
    assert {int(count) for count in counts} == {3 * int(accumulated)}
    for one, other in ((plain.model, recomputed.model), (plain.ema, recomputed.ema)):
        assert [key for key in one if not torch.equal(one[key], other[key])] == []


@pytest.mark.usefixtures("alone")
def test_a_network_that_recomputes_by_itself_counts_no_batch_twice(digits):
    setting = Setting(REPMLP, digits, ("train.grad_accum_steps", "2"))
    states = []
    for recomputed in (False, True):
        engine = stateful_engine(setting, "batch norm", recomputed)
        setting.run(engine, range(2))
        states.append(engine.state().model)
    plain, recomputed = states
    assert int(recomputed["layer.num_batches_tracked"]) == 4
    assert [key for key in plain if not torch.equal(plain[key], recomputed[key])] == []


@pytest.mark.usefixtures("alone")
def test_a_table_of_integers_that_changes_is_refused(digits):
    setting = Setting(REPMLP, digits)
    with pytest.raises(InputError, match=r"its forward pass changes layer\.uses, a table of integers"):
        setting.run(stateful_engine(setting, "table"), range(1))


@pytest.mark.long
def test_a_user_sees_no_warning_of_torchs(digits, tmp_path):
    """Of its sums over ranks, or of strides of gradients along dimensions of size 1, as depthwise kernels have."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"data:\n  path: {digits}\n  eval_split: test\n  image_size: 32\n"
        "model:\n  kind: timm\n  name: efficientnet_b0\n"
        "optim:\n  name: adamw\n  lr: 1e-3\ntrain:\n  epochs: 1\n  global_batch: 4\n  max_steps: 1\n"
        "eval:\n  every_epochs: 2\nlog:\n  tensorboard: false\n"
    )
    code, output = Command("train", recipe, "--ranks", "2", "--run-dir", tmp_path / "run").wait()
    assert code == 0, output
    assert "Warning" not in output


@pytest.fixture
def two_ranks(system):
    """Two ranks with the same batch, as this one sees them."""
    ranks = {"is_initialized": lambda: True, "get_world_size": lambda: 2, "all_reduce": lambda own: own.mul_(2)}
    system({f"torch.distributed.{name}": answer for name, answer in ranks.items()})


@pytest.mark.usefixtures("two_ranks")
def test_statistics_are_of_float32():
    x = (30 + torch.randn(64, 5, 9)).bfloat16()
    norm, expected = nn.Sequential(nn.BatchNorm1d(5)), nn.BatchNorm1d(5)
    sync_batch_norms(norm)
    found, wanted = norm(x), expected(torch.cat([x, x]).float())[:64]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted.bfloat16(), rtol=0.01, atol=0.001)
    torch.testing.assert_close(norm[0].running_mean, expected.running_mean)
    torch.testing.assert_close(norm[0].running_var, expected.running_var)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    "keys", [{"momentum": 0.0}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.5}]
)
def test_each_kind_of_batch_norm_is_that_of_both_batches(keys):
    numbers = torch.Generator().manual_seed(1)
    norm, expected = nn.Sequential(nn.BatchNorm1d(5, **keys)), nn.BatchNorm1d(5, **keys)
    sync_batch_norms(norm)
    for step in range(2):
        for parameter, other in zip(norm.parameters(), expected.parameters(), strict=True):
            parameter.data = other.data = torch.randn(5, generator=numbers)
        x = 3 + step + torch.randn(6, 5, generator=numbers)
        torch.testing.assert_close(norm(x), expected(torch.cat([x, x]))[:6])
    for buffer, other in zip(norm.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)
    torch.testing.assert_close(norm.eval()(x), expected.eval()(x))


@pytest.mark.usefixtures("two_ranks")
def test_timms_batch_norms_keep_their_activation_and_drop():
    norm, expected = BatchNormAct2d(5), BatchNormAct2d(5)
    norm.drop = expected.drop = nn.Threshold(0.5, 7.0)
    network = nn.Sequential(norm)
    sync_batch_norms(network)
    x = torch.randn(4, 5, 2, 2)
    torch.testing.assert_close(network(x), expected(torch.cat([x, x]))[:4])


class OfOwn(nn.BatchNorm1d):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.usefixtures("two_ranks")
def test_only_norms_of_the_batch_with_own_passes_are_refused():
    of_samples = nn.Sequential(nn.InstanceNorm2d(5, affine=True, track_running_stats=True), FrozenBatchNormAct2d(5))
    kinds = [type(part) for part in of_samples]
    sync_batch_norms(of_samples)
    assert [type(part) for part in of_samples] == kinds
    with pytest.raises(InputError, match="EvoNorm2dB0 has a forward pass of its own"):
        sync_batch_norms(nn.Sequential(EvoNorm2dB0(5)))


def test_a_batch_norm_with_an_own_pass_needs_one_rank(system):
    for initialized, world in ((False, 1), (True, 1), (True, 2)):
        system({"torch.distributed.is_initialized": lambda initialized=initialized: initialized})
        system({"torch.distributed.get_world_size": lambda world=world: world})
        network, x = nn.Sequential(nn.BatchNorm1d(5), nn.SyncBatchNorm(5)), torch.randn(6, 5)
        sync_batch_norms(network)
        kinds = [type(part) for part in network]
        sync_batch_norms(network)
        assert [type(part) for part in network] == kinds
        assert kinds[1] is nn.SyncBatchNorm
        own = nn.Sequential(OfOwn(5))
        with pytest.raises(InputError, match="OfOwn has a forward pass of its own") if world > 1 else nullcontext():
            sync_batch_norms(own)
        torch.testing.assert_close(own(x), 2 * nn.BatchNorm1d(5)(x))
        if world == 1:
            torch.testing.assert_close(network[0](x), nn.BatchNorm1d(5)(x))


def test_buffers_that_a_forward_pass_changes_go_back():
    module = nn.Module()
    counts = {"count": torch.tensor(4), "one": torch.tensor([5])}
    values = {"mean": torch.ones(2, 3), "low": torch.ones(2).half(), **counts}
    for name, value in (values | {"indices": torch.arange(3)}).items():
        module.register_buffer(name, value.clone())
    buffers = ForwardBuffers(module)
    before = buffers.copy()
    for unless, expected in ((None, 0), (torch.tensor(False), 0), (torch.tensor(True), 1)):
        for buffer in module.buffers():
            buffer += 1
        buffers.restore(before, unless)
        for name, value in values.items():
            assert torch.equal(getattr(module, name), value + expected), name
    assert module.indices.tolist() == [3, 4, 5]
    ForwardBuffers(nn.Linear(2, 2)).restore([])


def test_only_wholly_frozen_batch_norms_keep_their_statistics():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    freeze_batch_norms(model)
    assert [part.training for part in model] == [False, True, True]  # at once: nothing switches a new network
    for part in model.train():
        part(torch.arange(12.0).reshape(4, 3))
    assert [part.running_mean.any().item() for part in model] == [False, True, True]
