"""Rank and device of this process, its process group, and the few collectives that the loop needs.

torchrun, DeepSpeed's launcher and `widemix train --ranks` set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT (`widemix.distributed.launchers` translates what others set). With none of them set the
run is a single process.
"""

import ctypes
import datetime
import ipaddress
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from widemix.cgroups import usable_cpus
from widemix.distributed.launchers import read_place, route_from
from widemix.distributed.rendezvous import Rendezvous
from widemix.errors import InputError, LauncherError, RunError
from widemix.terminal import print

Value = TypeVar("Value")

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h


@dataclass(frozen=True)
class Topology:
    """`rank` of `world` processes, `local_rank` of `local_world` on its node, and the device of this process."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the run folder."""
        return self.rank == 0


def read_topology(environ: Mapping[str, str] = os.environ) -> Topology:
    """Read rank and device from the launcher's variables; `LauncherError` if they contradict each other."""
    place = read_place(environ)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if place.local_rank >= gpus:
            cure = "start as many processes as there are GPUs"
            if gpus == 1:  # the same, or for each process another: a number does not tell
                cure += ", and let each see all of the node's: with srun --gpus-per-node instead of --gpus-per-task"
            raise LauncherError(
                f"LOCAL_RANK {place.local_rank} has no GPU of its own: this process sees {gpus}; {cure}"
            )
        device = torch.device("cuda", place.local_rank)
    return Topology(*place, device)


@contextmanager
def process_group(topology: Topology, timeout_s: int) -> Iterator[dist.Store]:
    """Join the process group: gloo for CPU tensors, NCCL for CUDA tensors. `timeout_s` bounds every collective.

    Yields the group's key-value store, which all ranks share. Each thread needs its own clone of it. After an error
    on one of several GPUs the process is to end: it leaves the group as it is.
    """
    if topology.device.type == "cuda":
        torch.cuda.set_device(topology.device)
    limit = datetime.timedelta(seconds=timeout_s)
    if topology.world == 1:
        store: dist.Store = dist.HashStore()
        _create_group(topology, store, limit)
    else:
        rendezvous = Rendezvous(topology.rank, topology.world, timeout_s)
        store = rendezvous.run(lambda: _join(rendezvous, topology, limit))
    failed = True
    try:
        yield dist.PrefixStore("run", store)
        failed = False
    finally:
        # NCCL waits for its collectives in flight, and for the node's other ranks. One that has failed alone would
        # wait for ranks that wait for it, with its error not yet printed.
        if not failed or topology.world == 1 or topology.device.type == "cpu":
            dist.destroy_process_group()


def _join(rendezvous: Rendezvous, topology: Topology, limit: datetime.timedelta) -> dist.Store:
    """Meet the other ranks and create the group with them; return the store of this attempt."""
    store = rendezvous.join()
    rendezvous.waits_for("connections to the other ranks, all of which have joined")
    if topology.world > topology.local_world:
        set_gloo_interface(os.environ)
        if topology.device.type == "cuda" and (chosen := set_nccl_devices(os.environ)) and topology.is_main:
            print(f"NCCL on {platform.node()}: {', '.join(chosen)}", file=sys.stderr, flush=True)
    elif "lo" in psutil.net_if_addrs():  # on one machine nobody else is to reach the ranks
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        _create_group(topology, store, limit)
    except RuntimeError as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        on = f"GLOO_SOCKET_IFNAME {interface}" if interface else "the address of its host name"
        reason = str(error).splitlines()[0]
        raise RunError(f"rank {topology.rank} on {platform.node()}: no connection by {on}: {reason}") from error
    return store


def _create_group(topology: Topology, store: dist.Store, limit: datetime.timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if topology.device.type == "cuda" else "gloo"
    if topology.device.type == "cuda":
        torch.cuda.set_device(topology.device)  # in this thread
    dist.init_process_group(backend, store=store, rank=topology.rank, world_size=topology.world, timeout=limit)
    dist.all_reduce(
        torch.zeros(1, device="cpu")
    )  # no rank may fail, and close its connections, while another still opens its own


def set_gloo_interface(environ: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME to the network interface that reaches MASTER_ADDR, unless it is set.

    gloo's default is the address that the host name resolves to: on many clusters 127.0.1.1, or none.
    """
    if "GLOO_SOCKET_IFNAME" not in environ and (name := _interface(environ)):
        environ["GLOO_SOCKET_IFNAME"] = name


def set_nccl_devices(
    environ: MutableMapping[str, str], infiniband: Path = Path("/sys/class/infiniband")
) -> list[str]:
    """Set NCCL_SOCKET_IFNAME as gloo's interface, and NCCL_IB_HCA to the fastest ports that are active.

    Returns what is set, as NAME=VALUE; what the environment has stays. NCCL itself takes any interface that is up, a
    container's bridge too, and every active port, also a slow one for management.
    """
    chosen = {}
    if name := _interface(environ):
        chosen["NCCL_SOCKET_IFNAME"] = f"={name}"
    rates = {}
    for port in sorted(infiniband.glob("*/ports/*")):
        with suppress(OSError, ValueError, IndexError):  # a port without these files
            if "ACTIVE" in (port / "state").read_text():
                rates[f"{port.parts[-3]}:{port.name}"] = float((port / "rate").read_text().split()[0])
    if rates:
        chosen["NCCL_IB_HCA"] = "=" + ",".join(port for port, rate in rates.items() if rate == max(rates.values()))
    chosen = {name: value for name, value in chosen.items() if name not in environ}
    environ.update(chosen)
    return [f"{name}={value}" for name, value in chosen.items()]


def _interface(environ: Mapping[str, str]) -> str | None:
    """The network interface that reaches MASTER_ADDR; None if that is this machine, or there is no route."""
    address = route_from(environ.get("MASTER_ADDR", ""))
    if address is None or ipaddress.ip_address(address).is_loopback:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address.partition("%")[0] for entry in addresses):
            return name
    return None


def share_cpus(topology: Topology) -> int:
    """Return the number of CPUs for this rank: those that the process may use, divided by the node's ranks."""
    return max(1, usable_cpus() // topology.local_world)


def set_torch_threads(topology: Topology) -> None:
    """Let torch compute on this rank's part of the CPUs, or on as many threads as OMP_NUM_THREADS says.

    torchrun sets it to 1 for several ranks where the user has not set it, so that 1 is not read there. More threads
    than idle CPUs wait for each other most of the time.
    """
    given = os.environ.get("OMP_NUM_THREADS")
    set_by_torchrun = given == "1" and topology.local_world > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if given is None or set_by_torchrun:
        torch.set_num_threads(share_cpus(topology))


def keep_freed_memory(device: torch.device) -> None:
    """Let glibc keep the memory of a step on a CPU for the next one.

    It gives blocks of more than some hundred kB back to the kernel, for whose pages a step then waits, 3 to 20 % of
    its time.
    """
    if device.type == "cpu" and sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)


def set_matmul_precision(precision: str) -> None:
    """Set what GPUs compute products and convolutions of fp32 in: "highest" is fp32, "high" TF32.

    torch's own default is TF32 for convolutions alone, such as the first layer of a Mixer.
    """
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"


def seed_device(device: torch.device, seed: int) -> None:
    """`torch.manual_seed` for the CPU and one device, cheap enough for every step.

    torch's own records a stack trace at each call for every known kind of device that is missing.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that `seed_device` seeds, which differ once a random number was drawn."""
    return [
        torch.default_generator.get_state(),
        *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else []),
    ]


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor over all ranks, the same on each."""
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def on_main(topology: Topology, action: Callable[[], Value]) -> Value:
    """Run `action` on rank 0 and return its result on every rank; its `InputError` is raised on every rank."""
    shared: list[Any] = [None, None]  # result, message of an InputError
    if topology.is_main:
        try:
            shared[0] = action()
        except InputError as error:
            shared[1] = str(error)
    dist.broadcast_object_list(shared, src=0, device=torch.device("cpu"))
    if shared[1] is not None:
        raise InputError(shared[1])
    return shared[0]


@contextmanager
def usual_defaults() -> Iterator[None]:
    """Within it new tensors are float32 on the host, whatever the program that calls us has set in torch."""
    dtype, moved = torch.get_default_dtype(), torch.get_default_device().type != "cpu"
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu") if moved else nullcontext():
            yield
    finally:
        torch.set_default_dtype(dtype)
