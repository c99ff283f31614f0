"""Ranks and devices, from whichever launcher started us, and the few collectives that the loop needs.

torchrun, DeepSpeed's launcher and `widemix train --ranks` set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT (`pipeline.distributed.launchers` translates what mpirun and srun set). With none of them
set this is a single process.
"""

import datetime
import ipaddress
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from pipeline.cgroups import usable_cpus
from pipeline.distributed.launchers import route_from
from pipeline.errors import InputError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Topology:
    """Where this process stands: `rank` of `world`, `local_rank` of `local_world` on its node, and its device."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_topology(environ: Mapping[str, str] = os.environ) -> Topology:
    """This process's place, or `InputError` where the launcher's variables contradict each other."""
    rank, world = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    local_rank = _number(environ, "LOCAL_RANK", 0)
    local_world = _number(environ, "LOCAL_WORLD_SIZE", _number(environ, "LOCAL_SIZE", 1))
    if not (0 <= rank < world and 0 <= local_rank < max(local_world, 1)):
        raise InputError(
            f"the launcher's variables do not fit: RANK {rank} of WORLD_SIZE {world}, LOCAL_RANK {local_rank}"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"LOCAL_RANK {local_rank} has no GPU of its own: this node shows {torch.cuda.device_count()}; "
                "start as many processes as there are GPUs"
            )
        device = torch.device("cuda", local_rank)
    return Topology(rank, world, local_rank, local_world, device)


def start(topology: Topology, timeout: int) -> dist.Store:
    """Join the process group; `timeout` in seconds bounds every collective. CPU tensors always travel by gloo.

    Returns the group's store: small values that all ranks can set and get. Each thread needs a clone of its own.
    """
    backend = "gloo"
    if topology.device.type == "cuda":
        torch.cuda.set_device(topology.device)
        backend = "cpu:gloo,cuda:nccl"
    limit = datetime.timedelta(seconds=timeout)
    if topology.world > topology.local_world:
        name_interface(os.environ)
    store: dist.Store = dist.HashStore()
    if topology.world > 1:
        store, _, _ = next(dist.rendezvous("env://", timeout=limit))
    dist.init_process_group(backend, store=store, rank=topology.rank, world_size=topology.world, timeout=limit)
    dist.all_reduce(torch.zeros(1))  # no rank may fail, and close its connections, while another still makes them
    return dist.PrefixStore("run", store)


def name_interface(environ: MutableMapping[str, str]) -> None:
    """Tell gloo which network leads to the others, unless somebody has.

    By itself it takes the address that the host's name resolves to, which on many a cluster is 127.0.1.1 or none.
    """
    if "GLOO_SOCKET_IFNAME" in environ:
        return
    address = route_from(environ.get("MASTER_ADDR", ""))
    if address is None or ipaddress.ip_address(address).is_loopback:
        return
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address.partition("%")[0] for entry in addresses):
            environ["GLOO_SOCKET_IFNAME"] = name


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def share_cpus(topology: Topology) -> int:
    """CPUs that this rank may keep busy: those that the process can use, divided among the ranks of the node."""
    return max(1, usable_cpus() // topology.local_world)


def seed_device(device: torch.device, seed: int) -> None:
    """`torch.manual_seed` for the CPU and this device; cheap enough for each step.

    torch's own keeps a stack trace, at every call, for each kind of device that it knows and that is not there.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The mean of a tensor over all ranks, the same on each."""
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def on_main(topology: Topology, action: Callable[[], Value]) -> Value:
    """What `action` returns on rank 0, on every rank; an `InputError` that it raises is raised on every rank."""
    box: list[Any] = [None, None]
    if topology.is_main:
        try:
            box[0] = action()
        except InputError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    if box[1] is not None:
        raise InputError(box[1])
    return box[0]


class Agreement:
    """Lets all ranks act at the same step on a flag that any one of them may raise (a signal, say).

    Each step starts a one-number all-reduce over gloo and reads the one that the step before started, so that
    training never waits for it.
    """

    def __init__(self) -> None:
        self._flag = torch.zeros(1)
        self._work: dist.Work | None = None

    def poll(self, raised: bool) -> bool:
        """Call once a step on every rank; true on all ranks one step after any of them raised its flag."""
        agreed = self.finish()
        self._flag = torch.tensor([float(raised)])
        self._work = dist.all_reduce(self._flag, async_op=True)
        return agreed

    def finish(self) -> bool:
        """Wait for the all-reduce under way, if any: whether a flag was raised in it."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._flag.item())


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name}={text!r} in the environment is not a whole number") from None
