"""`optim.name: timm:NAME` is timm's optimizer; one whose state checkpoints cannot hold is refused."""

import pytest
import timm.optim
import torch

from widemix.errors import InputError
from widemix.optim.build import build_optimizer, set_group_scalars
from widemix.optim.section import OPTIMIZERS, OptimSection
from widemix.optim.timm_optimizer import ELEMENTWISE, tried


def test_its_steps_are_timms() -> None:
    torch.manual_seed(0)
    network, twin = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 3, bias=False)
    twin.load_state_dict(network.state_dict())
    section = OptimSection(name="timm:lion", lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))
    ours = build_optimizer(section, network)
    theirs = timm.optim.Lion(twin.parameters(), lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))
    for _ in range(4):
        x = torch.randn(5, 4)
        for net, optimizer in ((network, ours), (twin, theirs)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    assert torch.equal(network.weight, twin.weight)


@pytest.mark.parametrize("momentum", [0.25, 0.5])
def test_its_momentum_is_the_recipes(momentum: float) -> None:
    optimizer = build_optimizer(OptimSection(name="timm:sgdw", lr=0.1, momentum=momentum), torch.nn.Linear(2, 2))
    assert {group["momentum"] for group in optimizer.param_groups} == {momentum}


def test_values_that_it_does_not_take_are_one_line() -> None:
    section = OptimSection(name="timm:sgdw", lr=0.1, momentum=0.0)
    with pytest.raises(InputError, match=r"optim\.name timm:sgdw: does not take .* \(Nesterov momentum requires"):
        build_optimizer(section, torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["lamb", "timm:lamb"])
def test_lamb_clips_no_gradient_by_itself(name: str) -> None:
    """optim.clip_grad does, where it is set; timm's default is a norm of 1. The second gradient is another's size."""
    network, twin = (torch.nn.Linear(4, 3, bias=False) for _ in range(2))
    twin.load_state_dict(network.state_dict())
    ours = build_optimizer(OptimSection(name=name, lr=0.01, weight_decay=0.1), network)
    limit = None if name == "lamb" else 1.0
    theirs = timm.optim.Lamb(twin.parameters(), lr=0.01, weight_decay=0.1, eps=1e-8, max_grad_norm=limit)
    for scale in (100.0, 3.0, 20.0):
        for weight, optimizer in ((network.weight, ours), (twin.weight, theirs)):
            weight.grad = scale * torch.arange(12.0).reshape(3, 4)
            optimizer.step()
    torch.testing.assert_close(network.weight, twin.weight)


def test_what_checkpoints_need_to_know_is_found() -> None:
    known = {name: OPTIMIZERS[f"timm:{name}"] for name in ("lion", "adamw", "adan", "lamb")}
    assert {name: (spec.states, spec.group_counters) for name, spec in known.items()} == {
        "lion": (1, ()),
        "adamw": (2, ()),
        "adan": (4, ("step",)),
        "lamb": (2, ("step",)),
    }
    assert [name for name, spec in known.items() if spec.needs_whole] == ["lamb"]
    assert OPTIMIZERS["timm:cadamw"].needs_whole  # a cautious one scales its steps by how many agree


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_elementwise_optimizers_take_the_same_steps_on_slices(name: str) -> None:
    whole, slices = (tried(name, shapes).param_groups[0]["params"] for shapes in ([(2, 4)], [(4,), (4,)]))
    assert torch.equal(torch.cat(list(slices)), whole[0].reshape(-1))


def test_adans_steps_stay_a_plain_number_from_the_start() -> None:
    """It adds them up in its groups from the first step on; as a tensor its powers are float32's."""
    group = {"params": [torch.nn.Parameter(torch.ones(3))], "weight_decay": 0.0}
    optimizer = OPTIMIZERS["timm:adan"].build([group], OptimSection(name="timm:adan", lr=0.1))
    set_group_scalars(optimizer, ("step",), {"group0/step": 7.0})
    assert optimizer.param_groups[0]["step"] == 7
    assert isinstance(optimizer.param_groups[0]["step"], int)


def test_other_groups_than_those_saved_share_their_count() -> None:
    """As after --resume PATH with another optim.layer_decay: new groups once counted from 0."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "weight_decay": 0.0} for _ in range(3)]
    optimizer = OPTIMIZERS["timm:lamb"].build(groups, OptimSection(name="timm:lamb", lr=0.1))
    set_group_scalars(optimizer, ("step",), {"group0/step": 7.0, "group1/step": 7.0, "loss_scale": 2.0})
    assert [float(group["step"]) for group in optimizer.param_groups] == [7, 7, 7]
    with pytest.raises(InputError, match=r"step of 2 parameter groups, the optimizer now has 3; keep optim\.layer_d"):
        set_group_scalars(optimizer, ("step",), {"group0/step": 7.0, "group1/step": 8.0})
