"""Leaving the process group: NCCL destroys its communicators on all ranks of a node together."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.forks import free_port
from widemix.distributed.rendezvous import Rendezvous
from widemix.distributed.topology import (
    Topology,
    mean_over_ranks,
    on_main,
    process_group,
    seed_device,
    usual_defaults,
)
from widemix.errors import InputError, RunError


@pytest.fixture
def calls(system, monkeypatch) -> list[str]:
    """The calls that create and destroy the group, which do nothing else."""
    made: list[str] = []
    for name in ("init_process_group", "all_reduce", "destroy_process_group"):
        system({f"torch.distributed.{name}": lambda *_, name=name, **__: made.append(name)})
    system({"torch.cuda.set_device": lambda device: made.append(f"set_device {device}")})
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")  # so that what is set is removed at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return made


@contextmanager
def joined(rank: int, world: int, local_world: int, device: str = "cpu", timeout_s: int = 60) -> Iterator[dist.Store]:
    """Join the group as one rank, which the others meet in threads."""
    with ThreadPoolExecutor(world) as pool:
        if world > 1:
            others = [pool.submit(Rendezvous(each, world, 60).join) for each in range(world) if each != rank]
        place = Topology(rank, world, rank % local_world, local_world, torch.device(device, rank % local_world))
        with process_group(place, timeout_s) as store:
            yield store
        assert world == 1 or all(other.result(60) for other in others)


def test_the_device_is_set_before_nccl_is(calls):
    with joined(1, 2, 2, "cuda"):
        pass
    device = "set_device cuda:1"  # for this thread, and for the one that creates the group
    assert calls == [device, device, "init_process_group", "all_reduce", "destroy_process_group"]


@pytest.mark.parametrize(
    ("device", "world", "destroyed"),
    [("cpu", 2, True), ("cuda", 1, True), ("cuda", 2, False)],
    ids=["gloo", "NCCL of one rank", "NCCL"],
)
def test_a_rank_that_fails_alone_does_not_wait(device, world, destroyed, calls):
    """For the others, in NCCL."""
    with pytest.raises(OSError, match="of this rank alone"), joined(0, world, world, device):
        raise OSError("of this rank alone")
    assert ("destroy_process_group" in calls) == destroyed


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.usefixtures("calls")
def test_the_group_waits_as_long_as_is_said(system, device, backend, world):
    made: list[tuple] = []
    system({"torch.distributed.init_process_group": lambda *words, **options: made.append((*words, options))})
    with joined(world - 1, world, world, device, 77) as store:
        store.set("a", "key")
        ((kind, options),) = made
        own = options.pop("store")
        assert dist.PrefixStore("run", own).check(["a"])
    group = {"rank": world - 1, "world_size": world, "timeout": timedelta(seconds=77)}
    assert (kind, options) == (backend, group)


@pytest.mark.parametrize(
    ("device", "local_world", "rank", "chosen", "printed"),
    [
        ("cpu", 2, 0, ("ib0", None), False),
        ("cuda", 2, 0, ("ib0", "=ib0"), True),
        ("cuda", 2, 3, ("ib0", "=ib0"), False),
        ("cuda", 4, 0, (None, None), False),
    ],
)
@pytest.mark.usefixtures("calls")
def test_networks_are_chosen_between_nodes(system, capsys, device, local_world, rank, chosen, printed):
    """As if the loopback device were InfiniBand."""
    address = SimpleNamespace(address="127.0.0.1", is_loopback=False)
    system({"psutil.net_if_addrs": lambda: {"ib0": [address]}, "ipaddress.ip_address": lambda _: address})
    with joined(rank, 4, local_world, device):
        assert tuple(map(os.environ.get, ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))) == chosen
    assert ("NCCL_SOCKET_IFNAME==ib0" in capsys.readouterr().err) is printed


@pytest.mark.parametrize(
    ("interface", "local_world", "by"),
    [
        ("ib0", 2, "GLOO_SOCKET_IFNAME ib0"),
        ("", 1, "the address of its host name"),
        (None, 2, "GLOO_SOCKET_IFNAME lo"),
    ],
)
@pytest.mark.usefixtures("calls")
def test_an_unreachable_rank_is_told_with_the_way(system, monkeypatch, interface, local_world, by):
    def fail(*_, **__):
        raise RuntimeError("connect timed out\nand a long story")

    system({"torch.distributed.init_process_group": fail})
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    said = rf"^rank 1 on \S+: no connection by {by}: connect timed out$"
    with pytest.raises(RunError, match=said), joined(1, 2, local_world):
        pass


@pytest.mark.parametrize("refused", [False, True])
def test_what_rank_0_alone_does_every_rank_has(system, refused):
    """Its result, or its mistake; each rank is the first of its node."""
    sent: list[list] = []
    acted: list[int] = []

    def broadcast(shared, src, device):
        assert (src, device.type) == (0, "cpu")
        if not sent:
            sent.append(list(shared))
        shared[:] = sent[0]

    def act() -> int:
        acted.append(rank)
        if refused:
            raise InputError("no such key")
        return 7

    system({"torch.distributed.broadcast_object_list": broadcast})
    for rank in (0, 2):
        place = Topology(rank, 4, 0, 2, torch.device("cpu"))
        with pytest.raises(InputError, match="no such key") if refused else nullcontext():
            assert on_main(place, act) == 7
    assert acted == [0]


def test_a_mean_over_ranks_leaves_its_own_values(system):
    system(
        {"torch.distributed.all_reduce": lambda values: values.mul_(6), "torch.distributed.get_world_size": lambda: 3}
    )
    own = torch.tensor([1.0, 4.0])
    assert mean_over_ranks(own).tolist() == [2.0, 8.0]
    assert own.tolist() == [1.0, 4.0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_host_and_device_are_seeded(system, device):
    seeded: list[int] = []
    system({"torch.cuda.manual_seed": seeded.append})
    seed_device(torch.device(device), 77)
    assert (torch.initial_seed(), seeded) == (77, [77] if device == "cuda" else [])


def test_what_a_program_set_in_torch_is_set_again():
    def fail():
        with usual_defaults():
            made = torch.zeros(1)
            assert (made.dtype, made.device.type) == (torch.float32, "cpu")
            raise ValueError("no")

    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            with pytest.raises(ValueError, match="no"):
                fail()
            made = torch.zeros(1)
        assert (made.dtype, made.device.type) == (torch.float64, "meta")
        assert torch.zeros(1).device.type == "cpu"
    finally:
        torch.set_default_dtype(torch.float32)
