"""Leaving the process group: NCCL destroys its communicators on all ranks of a node together."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from widemix.distributed import topology
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
def calls(monkeypatch) -> list[str]:
    """The calls that create and destroy the group, which do nothing else."""
    made: list[str] = []
    for name in ("init_process_group", "all_reduce", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: made.append(name))
    met = SimpleNamespace(run=lambda meet: meet(), join=dist.HashStore, waits_for=lambda _: None)
    monkeypatch.setattr(topology, "Rendezvous", lambda *_: met)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(f"set_device {device}"))
    return made


def test_the_device_is_set_before_nccl_is(calls):
    with process_group(Topology(1, 2, 1, 2, torch.device("cuda", 1)), 60):
        pass
    device = "set_device cuda:1"  # for this thread, and for the one that creates the group
    assert calls == [device, device, "init_process_group", "all_reduce", "destroy_process_group"]


@pytest.mark.parametrize(
    ("device", "world", "destroyed"),
    [("cpu", 2, True), ("cuda", 1, True), ("cuda", 2, False)],
    ids=["gloo", "NCCL of one rank", "NCCL"],
)
def test_a_rank_that_fails_alone_does_not_wait_for_the_others_in_nccl(device, world, destroyed, calls):
    topology = Topology(0, world, 0, world, torch.device(device, 0))
    with pytest.raises(OSError, match="of this rank alone"), process_group(topology, 60):
        raise OSError("of this rank alone")
    assert ("destroy_process_group" in calls) == destroyed


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
@pytest.mark.parametrize("world", [1, 3])
def test_the_group_is_of_the_ranks_and_waits_as_long_as_is_said(calls, monkeypatch, device, backend, world):
    made, met, meet = [], [], topology.Rendezvous
    monkeypatch.setattr(topology, "Rendezvous", lambda *words: met.append(words) or meet())
    monkeypatch.setattr(dist, "init_process_group", lambda *words, **options: made.append((*words, options)))
    with process_group(Topology(world - 1, world, world - 1, world, torch.device(device, 0)), 77) as store:
        store.set("a", "key")
    ((kind, options),) = made
    assert met == ([] if world == 1 else [(world - 1, world, 77)])
    own = options.pop("store")
    assert (kind, options) == (backend, {"rank": world - 1, "world_size": world, "timeout": timedelta(seconds=77)})
    assert dist.PrefixStore("run", own).check(["a"])


@pytest.mark.parametrize(
    ("device", "local_world", "rank", "chosen", "printed"),
    [
        ("cpu", 2, 0, ["gloo"], False),
        ("cuda", 2, 0, ["gloo", "nccl"], True),
        ("cuda", 2, 3, ["gloo", "nccl"], False),
        ("cuda", 4, 0, [], False),
    ],
)
@pytest.mark.usefixtures("calls")
def test_networks_are_chosen_where_ranks_are_on_several_nodes(
    monkeypatch, capsys, device, local_world, rank, chosen, printed
):
    asked = []
    monkeypatch.setattr(topology, "set_gloo_interface", lambda environ: asked.append("gloo"))
    monkeypatch.setattr(
        topology, "set_nccl_devices", lambda environ: asked.append("nccl") or ["NCCL_IB_HCA==mlx5_0:1"]
    )
    with process_group(Topology(rank, 4, rank % local_world, local_world, torch.device(device, 0)), 60):
        pass
    assert asked == chosen
    assert ("NCCL_IB_HCA==mlx5_0:1" in capsys.readouterr().err) is printed


@pytest.mark.parametrize(
    ("interface", "local_world", "by"),
    [
        ("ib0", 2, "GLOO_SOCKET_IFNAME ib0"),
        ("", 1, "the address of its host name"),
        (None, 2, "GLOO_SOCKET_IFNAME lo"),
    ],
)
@pytest.mark.usefixtures("calls")
def test_a_rank_that_cannot_reach_another_names_the_way_that_it_took(monkeypatch, interface, local_world, by):
    def fail(*_, **__):
        raise RuntimeError("connect timed out\nand a long story")

    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface or "")
    if interface is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    group = process_group(Topology(1, 2, 0, local_world, torch.device("cpu")), 60)
    with pytest.raises(RunError, match=rf"^rank 1 on \S+: no connection by {by}: connect timed out$"), group:
        pass


def test_what_rank_0_alone_does_has_its_result_or_its_mistake_on_every_rank(monkeypatch):
    sent: list[list] = []

    def broadcast(shared, src, device):
        assert (src, device.type) == (0, "cpu")
        if topologies[0].is_main:
            sent.append(list(shared))
        shared[:] = sent[-1]

    def refuse():
        raise InputError("no such key")

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    for rank in (0, 2):
        topologies = [Topology(rank, 4, 0, 2, torch.device("cpu"))]  # each is the first of its node
        assert topologies[0].is_main is (rank == 0)
        acted: list[int] = []
        sent[1:] = []
        assert on_main(topologies[0], lambda: acted.append(rank) or 7) == 7  # noqa: B023
        assert acted == ([0] if rank == 0 else [])
    for rank in (0, 2):
        topologies = [Topology(rank, 4, 0, 2, torch.device("cpu"))]
        with pytest.raises(InputError, match="no such key"):
            on_main(topologies[0], refuse)


def test_a_mean_over_ranks_leaves_its_own_values(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda values: values.mul_(6))
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    own = torch.tensor([1.0, 4.0])
    assert mean_over_ranks(own).tolist() == [2.0, 8.0]
    assert own.tolist() == [1.0, 4.0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_host_and_device_are_seeded(monkeypatch, device):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeded.append)
    seed_device(torch.device(device), 77)
    assert (torch.initial_seed(), seeded) == (77, [77] if device == "cuda" else [])


def test_what_a_program_has_set_in_torch_is_set_again_after_an_error_too():
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
