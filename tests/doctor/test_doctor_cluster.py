"""`widemix doctor --cluster` on real ranks over gloo, one faulty or missing, and comparisons of made-up surveys."""

import itertools
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.conftest import Command
from tests.forks import free_port
from widemix.distributed.topology import Topology
from widemix.doctor.cluster import _measure_network, _reads_disk
from widemix.doctor.compare import compare_nodes
from widemix.doctor.links import measure_links, pairings
from widemix.doctor.survey import health, read_rate


def launch(world: int, rank: int, port: int, *options: str, **environ: str) -> Command:
    """A rank as srun starts it on a node of its own."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": f"1(x{world})", "SLURM_STEP_NODELIST": "node[0-9]"}
    counts = {"SLURM_STEP_NUM_TASKS": world, "SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": 0}
    place = step | {name: str(count) for name, count in counts.items()} | {"SLURM_JOB_ID": "1"}
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    name = {"SLURMD_NODENAME": f"node{rank}"}
    return Command("doctor", "--cluster", *options, env=place | meet | name | environ)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.long
def test_a_rank_with_another_version_is_named_by_real_ranks(port: int, tmp_path: Path) -> None:
    metadata = tmp_path / "timm-0.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: timm\nVersion: 0.0.1\n")
    options = ("--exclude", str(tmp_path / "faulty"), "--timeout", "60")
    faulty = launch(2, 1, port, *options, PYTHONPATH=str(tmp_path))
    time.sleep(2)  # started later, a rank is surveyed later: its clock is right all the same
    first = launch(2, 0, port, *options)
    code, output = first.wait()
    assert code == 1, output
    assert "faulty  node1  timm " in output
    assert "all-reduce: " in output  # which both took part in
    assert "clock" not in output
    assert "node1" in (tmp_path / "faulty").read_text().split()
    assert "sbatch --exclude=" in output
    assert faulty.wait()[0] == 1


@pytest.mark.long
def test_a_rank_that_does_not_start_is_named(port: int, tmp_path: Path) -> None:
    faulty, nowhere = tmp_path / "faulty", tmp_path / "none" / "faulty"
    code, output = launch(2, 0, port, "--timeout", "1", "--exclude", str(faulty)).wait()
    assert code == 1, output
    assert "rank 1 has not started" in output
    assert faulty.read_text() == ""  # of a rank that never started nobody knows the node
    code, output = launch(2, 0, port, "--timeout", "1", "--exclude", str(nowhere)).wait()
    assert code == 2, output
    assert output == f"error: --exclude {nowhere}: there is no folder {nowhere.parent}\n"


def rank(host: str, **changes) -> dict:
    healthy = {
        "host": host,
        "rank": 0,
        "local_rank": 0,
        "clock": 1000.0,
        "versions": {"torch": "3.0"},
        "open_files": 4096,
        "locked_memory": -1,
        "shared_memory": 8 << 30,
        "gpu": {"name": "H200", "celsius": 40, "used_mib": 0},
        "cpu": 1.0,
        "flops": 1e12,
        "disk": 1e9,
        "pairs": [1e9, 2e9],
    }
    return healthy | changes


@pytest.mark.parametrize(
    ("changes", "what", "state"),
    [
        ({"versions": {"torch": "2.9"}}, "torch", "faulty"),
        ({"gpu": {"name": "V100"}}, "GPU", "faulty"),
        ({"gpu": {"name": "H200", "fault": "3 uncorrected memory errors"}}, "GPU 0", "faulty"),
        ({"gpu": {"name": "H200", "celsius": 95}}, "GPU 0", "note"),
        ({"gpu": {"name": "H200", "used_mib": 9000}}, "GPU 0", "note"),
        ({"flops": 5e11}, "computing", "faulty"),
        ({"cpu": 0.3}, "CPU", "note"),
        ({"disk": 1e8}, "disk", "faulty"),
        ({"disk": 0}, "disk", "faulty"),
        ({"pairs": [1e8, 2e8]}, "network", "faulty"),
        ({"clock": 1003.0}, "clock", "note"),
        ({"open_files": 256}, "open files", "note"),
        ({"locked_memory": 65536}, "locked memory", "note"),
        ({"shared_memory": 64 << 20}, "shared memory", "note"),
    ],
)
def test_a_faulty_node_is_named(changes: dict, what: str, state: str) -> None:
    for faulty in (0, 3):  # the first node is no better than others
        surveys = [rank(f"n{i}", **(changes if i == faulty else {})) for i in range(4)]
        (problem,) = compare_nodes(surveys)
        assert (problem.host, problem.what, problem.state) == (f"n{faulty}", what, state)
    assert compare_nodes([rank(f"n{i}") for i in range(4)]) == []


def test_a_link_is_rated_by_its_fastest_partner_and_a_node_by_its_slowest_rank() -> None:
    surveys = [rank("a", pairs=[1e8, 2e9]), rank("b", pairs=[1e8, 1e8]), rank("c"), rank("c", flops=1e11)]
    found = {(c.host, c.what) for c in compare_nodes(surveys)}
    assert found == {("b", "network"), ("c", "computing"), ("c", "ranks")}


def test_of_two_nodes_the_slower_is_compared_with_the_faster_and_one_node_with_none() -> None:
    slow = rank("a", flops=0.59e12)
    (problem,) = compare_nodes([slow, rank("b")])
    assert (problem.host, problem.text) == ("a", "590 GFLOP/s, elsewhere 1,000 GFLOP/s")
    assert compare_nodes([rank("a", flops=0.6e12), rank("b")]) == []
    assert compare_nodes([slow, slow | {"local_rank": 1, "flops": 1e12}]) == []


@pytest.mark.parametrize("count", range(2, 12))
def test_partners_are_mutual_and_new_in_every_round(count: int) -> None:
    rounds = pairings(count)
    assert len(rounds) == min(3, count - 1 + count % 2)
    for partners in rounds:
        assert [partners[partners[i]] for i in range(count)] == list(range(count))
        assert sum(partners[i] == i for i in range(count)) == count % 2  # one of an odd number pauses
    for one, other in itertools.combinations(rounds, 2):
        assert all(one[i] != other[i] for i in range(count))


def test_what_nvidia_smi_says() -> None:
    assert health("0, Not Active, 41, 4\n") == {"celsius": 41, "used_mib": 4}
    assert health("[N/A], Not Active, 41, 4") == {"celsius": 41, "used_mib": 4}
    assert health("2, Active, 88, 4")["fault"] == "2 uncorrected memory errors"
    assert health("0, Active, 88, 4")["fault"] == "hardware slowdown of its clock at 88 C"


def test_reading_the_disk(tmp_path: Path) -> None:
    assert read_rate(tmp_path) == 0
    (tmp_path / "train.beton").write_bytes(bytes(6 << 20))
    assert read_rate(tmp_path) > 0
    (tmp_path / "val.beton").write_bytes(b"")
    (tmp_path / "train.beton").write_bytes(b"")
    assert read_rate(tmp_path) == 0


def test_a_disk_that_nodes_share_on_one_machine_is_read_by_one_of_them(tmp_path: Path) -> None:
    store = dist.HashStore()
    nodes = [Topology(rank, 3, 0, 1, torch.device("cpu")) for rank in range(3)]
    assert [_reads_disk(store, node, tmp_path) for node in nodes] == [True, False, False]
    assert _reads_disk(store, nodes[1], Path("/dev"))  # another disk
    assert all(_reads_disk(store, node, tmp_path / "none") for node in nodes)  # each reports it


def test_nccl_may_fail_without_killing_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"  # read here
        raise dist.DistBackendError("NCCL error: remote process exited\nmore")

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", fail)
    store = dist.HashStore()
    _measure_network(Topology(1, 2, 1, 2, torch.device("cuda", 1)), store, {}, 60)
    assert store.get("failed/1") == b"NCCL error: remote process exited"


def test_an_all_reduce_that_nccl_does_not_finish_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging:
        def wait(self) -> None:
            raise dist.DistBackendError("timed out in blocking wait")

    # Without async_op NCCL returns nothing to wait for, and waiting for the GPU has no timeout.
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, async_op=False: Hanging() if async_op else None)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    with pytest.raises(dist.DistBackendError, match="timed out"):
        measure_links(Topology(0, 2, 0, 2, torch.device("cpu")))
