"""Leaving the process group: NCCL destroys its communicators on all ranks of a node together."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from widemix.distributed import topology
from widemix.distributed.topology import Topology, process_group


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
    made = []
    monkeypatch.setattr(dist, "init_process_group", lambda *words, **options: made.append((*words, options)))
    with process_group(Topology(world - 1, world, world - 1, world, torch.device(device, 0)), 77) as store:
        store.set("a", "key")
    ((kind, options),) = made
    own = options.pop("store")
    assert (kind, options) == (backend, {"rank": world - 1, "world_size": world, "timeout": timedelta(seconds=77)})
    assert dist.PrefixStore("run", own).check(["a"])
