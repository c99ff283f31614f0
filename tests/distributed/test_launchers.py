"""Every launcher's variables become torchrun's, and every rank writes an exit status that a launcher can read."""

import json
import os
import platform
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, Command
from widemix.distributed.launchers import USES, first_host, job_port, route_from, tasks_per_node
from widemix.distributed.rank_status import (
    RankStatus,
    has_rank_status,
    node_name,
    read_rank_statuses,
    remove_earlier_statuses,
    write_rank_status,
)
from widemix.distributed.topology import (
    read_topology,
    set_gloo_interface,
    set_nccl_devices,
    set_torch_threads,
    share_cpus,
)
from widemix.errors import InputError

# As Slurm 22.05 set them for rank 2 of 2 x 2.
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "77",
}


def no_quota(*_, **__) -> str:
    raise FileNotFoundError


def cpus(count: int) -> dict:
    """A machine with so many CPUs, and no cgroups."""
    return {"os.sched_getaffinity": lambda _: set(range(count)), "pathlib.Path.read_text": no_quota}


@pytest.mark.parametrize(
    ("given", "torchrun", "local_world", "threads"),
    [(None, False, 2, 4), ("1", False, 2, None), ("1", True, 2, 4), ("3", True, 2, None), ("1", True, 1, None)],
)
def test_torch_computes_on_a_share_of_the_cpus(system, monkeypatch, given, torchrun, local_world, threads):
    """Unless the user says on how many threads."""
    chosen: list[int] = []
    system(cpus(8) | {"torch.set_num_threads": chosen.append})
    for name, value in (("OMP_NUM_THREADS", given), ("TORCHELASTIC_RUN_ID", "none" if torchrun else None)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    set_torch_threads(read_topology({"LOCAL_WORLD_SIZE": str(local_world), "WORLD_SIZE": "4"}))
    assert chosen == ([threads] if threads else [])


@pytest.mark.parametrize(("gpus", "hint"), [(1, True), (2, False), (3, False)])
def test_a_rank_without_a_gpu_is_an_error(system, gpus, hint):
    system({"torch.cuda.is_available": lambda: True, "torch.cuda.device_count": lambda: gpus})
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(InputError, match=f"LOCAL_RANK 3 .* sees {gpus}; start as many processes") as error:
        read_topology(environ)
    assert ("--gpus-per-node instead of --gpus-per-task" in str(error.value)) == hint


@pytest.mark.parametrize(("there", "device"), [(False, "cpu"), (True, "cuda:1")])
def test_the_device_is_the_number_on_the_node(system, there, device):
    environ = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    system({"torch.cuda.is_available": lambda: there, "torch.cuda.device_count": lambda: 2})
    assert str(read_topology(environ).device) == device


def test_ranks_more_than_the_cpus_have_one_each(system):
    system(cpus(3))
    shares = [share_cpus(read_topology({"LOCAL_WORLD_SIZE": n, "WORLD_SIZE": "8"})) for n in "1248"]
    assert shares == [3, 1, 1, 1]


def test_jobs_that_may_share_a_node_share_no_port():
    ports = [job_port(job, use) for job in range(9_000, 13_000) for use in USES]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 20_000
    assert max(ports) < 32_000


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n7", "n7"),
        ("n[2-3]", "n2"),
        ("gpu[007-012,20]-ib,login1", "gpu007-ib"),
        ("a-b.c,d[1,2]", "a-b.c"),
        ("r[1-2]n[03-04],x", "r1n03"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes, first):
    assert first_host(nodes) == first


def test_slurms_counts_of_tasks():
    assert tasks_per_node("4(x3),2,1(x2)") == [4, 4, 4, 2, 1, 1]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_route_to_an_address_of_this_machine_starts_there(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            pytest.skip(f"no {address} here")
    assert route_from(address) == address


def routes(own: str | None, *families: str) -> tuple[dict, list[str]]:
    """A network in which sockets of "no route" reach nothing, and those of another family have the address `own`.

    Returns also the families of the sockets that were closed.
    """

    class Probe:
        def __init__(self, family, kind):
            self.family = family

        def __enter__(self):
            return self

        def __exit__(self, *_):
            closed.append(self.family)

        def connect(self, address):
            if self.family == "no route":
                raise OSError(101, "Network is unreachable")

        def getsockname(self):
            return own, 9, 0, 2

    closed: list[str] = []
    known = [(family, 2, 0, "", (family, 9)) for family in families]
    return {"socket.getaddrinfo": lambda *_, **__: known, "socket.socket": Probe}, closed


def test_a_route_is_by_the_first_address_with_one(system):
    """Without the name of the interface."""
    answers, closed = routes("fe80::1%ib0", "no route", "IPv6", "another")
    system(answers)
    assert route_from("n0") == "fe80::1"
    assert closed == ["no route", "IPv6"]
    system(routes(None, "no route")[0])
    assert route_from("n0") is None


def test_no_gloo_interface_is_set_without_need():
    chosen = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "ib0"}
    for environ in (chosen, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "no.such.host.invalid"}):
        before = dict(environ)
        set_gloo_interface(environ)
        assert environ == before


def write_port(folder, port: str, state: str, rate: str) -> None:
    device, number = port.split(":")
    place = folder / device / "ports" / number
    place.mkdir(parents=True)
    (place / "state").write_text(f"{state}\n")
    (place / "rate").write_text(f"{rate}\n")


def test_nccl_uses_the_fastest_active_ports(tmp_path, system):
    """And the interface of the first node."""
    for port, state, rate in (
        ("mlx5_0:1", "4: ACTIVE", "100 Gb/sec (4X EDR)"),
        ("mlx5_1:1", "4: ACTIVE", "100 Gb/sec (4X EDR)"),
        ("mlx5_2:1", "4: ACTIVE", "25 Gb/sec (1X EDR)"),  # for management
        ("mlx5_3:1", "1: DOWN", "200 Gb/sec (4X HDR)"),
        ("mlx5_4:1", "4: ACTIVE", "none"),
        ("mlx5_6:1", "4: ACTIVE", ""),
        ("mlx5_7:1", "2: INIT", "400 Gb/sec (4X NDR)"),
        ("mlx5_7:2", "4: ACTIVE", "100 Gb/sec (4X EDR)"),
    ):
        write_port(tmp_path, port, state, rate)
    (tmp_path / "mlx5_5/ports/1").mkdir(parents=True)
    addresses = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "ib0": ["fe80::1%ib0", "10.0.0.7"]}
    known = {name: [SimpleNamespace(address=text) for text in texts] for name, texts in addresses.items()}
    system({"psutil.net_if_addrs": lambda: known} | routes("10.0.0.7", "IPv4")[0])
    environ = {"MASTER_ADDR": "10.0.0.1"}
    chosen = set_nccl_devices(environ, tmp_path)
    set_gloo_interface(environ)
    assert chosen == ["NCCL_SOCKET_IFNAME==ib0", "NCCL_IB_HCA==mlx5_0:1,mlx5_1:1,mlx5_7:2"]
    assert environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert environ["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1,mlx5_7:2"
    assert set_nccl_devices(environ, tmp_path) == []  # what is set stays
    environ = {"MASTER_ADDR": "10.0.0.1", "NCCL_IB_HCA": "mlx5_3"}
    assert set_nccl_devices(environ, tmp_path / "none") == ["NCCL_SOCKET_IFNAME==ib0"]
    assert environ["NCCL_IB_HCA"] == "mlx5_3"
    for address, named in (("fe80::1", "ib0"), ("192.0.2.1", None), ("127.0.0.1", None), (None, None)):
        system(routes(address, "IPv4" if address else "no route")[0])
        environ, chosen = {"MASTER_ADDR": "n0"}, {"MASTER_ADDR": "n0", "GLOO_SOCKET_IFNAME": ""}
        set_gloo_interface(environ)
        set_gloo_interface(chosen)
        assert (environ.get("GLOO_SOCKET_IFNAME"), chosen["GLOO_SOCKET_IFNAME"]) == (named, "")


def test_codes_that_no_restart_changes_are_0_to_launchers(tmp_path, monkeypatch):
    monkeypatch.setenv("WIDEMIX_RANK_STATUS_DIR", str(tmp_path))
    assert write_rank_status(75) == 75  # no RANK, no status: no launcher started this process
    assert read_rank_statuses(tmp_path) == []
    monkeypatch.setenv("RANK", "3")
    assert [write_rank_status(code) for code in (0, 2, 75, 1)] == [0, 0, 0, 1]
    (status,) = read_rank_statuses(tmp_path)
    assert (status.rank, status.code) == (3, 1)
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert write_rank_status(None, "it runs") == 0
    (status,) = read_rank_statuses(tmp_path)
    assert (status.host, status.code, status.message) == ("n7", None, "it runs")
    monkeypatch.setenv("SLURMD_NODENAME", "")
    assert node_name() == platform.node()
    monkeypatch.setenv("WIDEMIX_RANK_STATUS_DIR", f"{tmp_path}/not/yet")
    assert write_rank_status(75) == 0
    assert len(read_rank_statuses(tmp_path / "not/yet")) == 1
    monkeypatch.setenv("RANK", "three")
    assert write_rank_status(75) == 75
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WIDEMIX_RANK_STATUS_DIR", "/dev/null/no-folder")
    assert write_rank_status(75) == 75
    monkeypatch.delenv("WIDEMIX_RANK_STATUS_DIR")
    assert write_rank_status(75) == 75


def test_statuses_of_an_earlier_attempt_are_removed(tmp_path, monkeypatch):
    """As in an elastic job that has lost a node: there were 3 nodes of 2 ranks, and this one is now the second."""
    monkeypatch.setenv("WIDEMIX_RANK_STATUS_DIR", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "6")
    for node, name in enumerate(("n1", "n2", "n3")):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        for rank in (2 * node, 2 * node + 1):
            monkeypatch.setenv("RANK", str(rank))
            write_rank_status(None)
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    remove_earlier_statuses()
    assert len(read_rank_statuses(tmp_path)) == 6  # left to local rank 0
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    remove_earlier_statuses()
    assert [status.rank for status in read_rank_statuses(tmp_path)] == [0, 1, 2, 3]
    for name, rank, left in (("n2", "0", [0, 1]), ("n1", "2", [])):  # in another order, which comes later
        monkeypatch.setenv("SLURMD_NODENAME", name)
        monkeypatch.setenv("RANK", rank)
        remove_earlier_statuses()
        assert [status.rank for status in read_rank_statuses(tmp_path)] == left


def test_a_rank_with_wrong_input_writes_it_to_its_status(tmp_path):
    environ = {"WIDEMIX_RANK_STATUS_DIR": str(tmp_path / "status"), "RANK": "1", "WORLD_SIZE": "2"}
    code, output = Command("train", "no/such.yaml", env=environ).wait()
    assert (code, output) == (0, "")  # rank 0 would print it
    (status,) = read_rank_statuses(tmp_path / "status")
    assert status.code == 2
    assert "no/such.yaml" in status.message


def test_a_crash_writes_its_message_to_the_status(tmp_path):
    environ = os.environ | {"WIDEMIX_RANK_STATUS_DIR": str(tmp_path), "RANK": "0", "PYTHONPATH": str(ROOT)}
    program = "from widemix.cli.commands import *; sys.exit(run_command(Parser(), lambda _: 1 / 0, []))"
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "in <lambda>" in done.stderr  # a bug shows where it is
    assert "ZeroDivisionError" in done.stderr
    status = RankStatus(**json.loads((tmp_path / "rank-0.json").read_text()))
    assert status.code == 1
    assert status.message == "ZeroDivisionError: division by zero"


def test_statuses_are_in_the_order_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("WIDEMIX_RANK_STATUS_DIR", str(tmp_path))
    for rank in ("10", "2"):
        monkeypatch.setenv("RANK", rank)
        assert not has_rank_status()
        write_rank_status(0)
        assert has_rank_status()
    for name, text in (("rank-12.json", '{"rank": 12, "ho'), ("rank-7.json", "3"), ("rank-3.json", '{"rank": 3}')):
        (tmp_path / name).write_text(text)
    found = read_rank_statuses(tmp_path)
    assert [(status.rank, status.code) for status in found] == [(2, 0), (3, None), (7, None), (10, 0), (12, None)]
    assert "rank-12.json: is damaged" in found[-1].message
    assert found[-1].time == (tmp_path / "rank-12.json").stat().st_mtime
