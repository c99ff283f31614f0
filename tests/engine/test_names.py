"""The names under which a network's tensors are saved, against its state_dict; networks as engines take them."""

from collections import defaultdict

import pytest
import timm
import torch
from torch import nn

from widemix.engine.layout import adapt_network, all_names, separable_blocks
from widemix.engine.state import State, by_parameter


class Tied(nn.Module):
    """Two names of one parameter and of one buffer, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("same", self.scale)
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_each_tensor_of_the_state_dict_is_named_once():
    for module in (Tied(), timm.create_model("resnet10t")):
        expected = defaultdict(list)
        for name, tensor in module.state_dict().items():
            expected[tensor.data_ptr()].append(name)
        found = all_names(module)
        assert sorted(map(sorted, found.values())) == sorted(map(sorted, expected.values()))
        assert all(first == names[0] for first, names in found.items())


class Scaled(nn.Module):
    """A parameter without a dimension, and one that is not contiguous; `table`: a buffer of this dtype."""

    def __init__(self, table: torch.dtype | None = None):
        super().__init__()
        self.scale, self.one = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(1))
        self.linear = nn.Linear(3, 4)
        self.linear.weight = nn.Parameter(torch.arange(12.0).view(3, 4).T)
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4)])
        self.norms.append(nn.BatchNorm1d(4, track_running_stats=False))
        self.register_buffer("table", None if table is None else torch.ones(4, dtype=table))

    def forward(self, x):
        self.seen = [norm.weight.dtype for norm in self.norms]
        self.casts = torch.is_autocast_enabled("cpu")
        assert (self.scale.shape, self.one.shape) == ((), (1,))
        return self.linear(x.to(self.linear.weight.dtype)) * self.scale


def test_parameters_get_a_dimension_and_are_contiguous():
    network, x = Scaled(), torch.randn(5, 3)
    expected, names = network(x), list(network.state_dict())
    adapt_network(network, torch.float32)
    parameters = dict(network.named_parameters())
    assert parameters["scale"].shape == (1,)
    assert all(parameter.is_contiguous() for parameter in parameters.values())
    torch.testing.assert_close(network(x), expected)
    assert list(network.state_dict()) == names
    assert (type(network).__name__, type(network.norms[0])) == ("Scaled", nn.BatchNorm1d)
    parameters["scale"].data = torch.empty(0)  # of another rank
    assert network.scale.shape == (0,)


@pytest.mark.parametrize(
    ("table", "dtype", "wide"),
    [
        (None, torch.float32, ()),
        (torch.float32, torch.float32, ()),
        (None, torch.bfloat16, (0,)),
        (torch.int64, torch.bfloat16, (0,)),
        (torch.float32, torch.bfloat16, (0, 1, 2)),
        (torch.float16, torch.float16, (0, 1, 2)),
    ],
)
def test_norms_see_float32_where_statistics_or_tables_are(table, dtype, wide):
    network = Scaled(table)
    adapt_network(network, dtype)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    expected = [torch.float32 if at in wide else dtype for at in range(4)]
    assert network(torch.randn(5, 3)).dtype == dtype
    assert network.seen == expected
    assert network.casts == (1 in wide)
    assert type(network).__name__ == "Scaled"
    assert network.norms[0].running_mean.dtype == torch.float32


def blocks_of(*names: str, blocks: nn.Module | None) -> list[str]:
    """The separable blocks of a network whose head has the weights of these layers."""
    network = nn.Module()
    if blocks is not None:
        network.blocks = blocks
    network.head = nn.ModuleList([nn.Linear(2, 2)])
    for name in names:
        network.head.append(nn.Linear(2, 2))
        network.head[-1].weight = network.get_submodule(name).weight
    places = {id(part): name for name, part in network.named_modules()}
    return [places[id(part)] for part in separable_blocks(network)]


def test_blocks_that_share_no_parameter_are_separable():
    def linears(kind, count=2):
        return kind(*(nn.Linear(2, 2) for _ in range(count)))

    assert blocks_of(blocks=None) == []
    other = nn.Module()
    other.blocks = [nn.Linear(2, 2)]  # a list of its own
    assert separable_blocks(other) == []
    assert blocks_of(blocks=linears(nn.Sequential, 3)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert blocks_of("blocks.1", blocks=linears(nn.Sequential, 3)) == ["blocks.0", "blocks.2"]
    stages = nn.Sequential(linears(nn.Sequential), nn.ModuleList([nn.Linear(2, 2)]), nn.ReLU(), nn.Linear(2, 2))
    assert blocks_of(blocks=stages) == ["blocks.0.0", "blocks.0.1", "blocks.3"]
    assert blocks_of("blocks.0.1", blocks=stages) == ["blocks.0.0", "blocks.3"]
    own, shared = nn.ModuleList([Tied(), nn.Linear(2, 2)]), linears(nn.Sequential, 3)
    assert blocks_of(blocks=own) == ["blocks.0", "blocks.1"]  # what it shares with itself
    shared[2].bias = shared[0].bias
    assert blocks_of(blocks=shared) == ["blocks.1"]


def test_a_name_may_have_a_slash():
    """As a key of a ParameterDict."""
    one, two, three = (torch.tensor(float(n)) for n in range(3))
    state = State.of({"model/a/b": one, "optimizer/exp_avg/a/b": two, "ema/a/b": three}, {})
    assert (state.model, state.optimizer, state.ema) == ({"a/b": one}, {"exp_avg/a/b": two}, {"a/b": three})
    assert by_parameter(state.optimizer) == {"a/b": {"exp_avg": two}}
