"""Batch norms over ranks against torch's own on the ranks' batches together."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from timm.layers import BatchNormAct2d, EvoNorm2dB0, FrozenBatchNormAct2d
from torch import nn

from tests.conftest import Command
from tests.engine.ranks import EMA, ENGINES, REPMLP, Setting, overrides_for, stateful_engine
from widemix.engine.batch_norm import ForwardBuffers, freeze_batch_norms, sync_batch_norms
from widemix.errors import InputError


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


def drops(norm: BatchNormAct2d) -> BatchNormAct2d:
    """With timm's activation, and something in the place of its dropout."""
    norm.drop = nn.Threshold(0.5, 7.0)
    return norm


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        *((partial(nn.BatchNorm1d, 5, momentum=momentum), (6, 5)) for momentum in (0.0, 0.1, None)),
        (partial(nn.BatchNorm1d, 5, affine=False), (6, 5, 7)),
        (partial(nn.BatchNorm1d, 5, track_running_stats=False), (6, 5)),
        (partial(nn.BatchNorm2d, 5, eps=0.5), (6, 5, 3, 4)),
        (lambda: drops(BatchNormAct2d(5)), (4, 5, 2, 2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_kind_of_batch_norm_is_that_of_both_batches(make, shape, dtype):
    """Its outputs, gradients and statistics, which are of float32, over two steps; and in evaluation."""
    numbers = torch.Generator().manual_seed(1)
    norm, expected = nn.Sequential(make()), make()
    sync_batch_norms(norm)
    near = {} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.02}
    for step in range(2):
        for parameter, other in zip(norm.parameters(), expected.parameters(), strict=True):
            parameter.data, other.data = (torch.randn(5, generator=numbers),) * 2
        own = (3 + step + 4 * torch.randn(shape, generator=numbers)).to(dtype).requires_grad_()
        both = own.detach().float().repeat(2, *[1] * (len(shape) - 1)).requires_grad_()
        found, wanted = norm(own), expected(both)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted[: len(own)], **near)
        weights = torch.arange(wanted[0].numel()).view(shape[1:]).sin()
        for outputs in (found, wanted):
            (outputs * weights).sum().backward()
        torch.testing.assert_close(own.grad.float(), both.grad[: len(own)], **near)
    for parameter, other in zip(norm.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(2 * parameter.grad, other.grad, **(near and {"rtol": 0.02, "atol": 1.0}))
    for buffer, other in zip(norm.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)
    torch.testing.assert_close(norm.eval()(both), expected.eval()(both))


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
