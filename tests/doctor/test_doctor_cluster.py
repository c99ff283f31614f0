"""`widemix doctor --cluster` on real ranks over gloo, one faulty or missing, and comparisons of made-up surveys."""

import datetime
import importlib.metadata
import io
import itertools
import json
import os
import platform
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.conftest import Command
from tests.forks import free_port
from widemix.distributed.topology import Topology
from widemix.doctor import cluster, links, survey
from widemix.doctor.cluster import _measure_network, _reads_disk
from widemix.doctor.compare import compare_nodes
from widemix.doctor.links import measure_links, pairings
from widemix.doctor.survey import health, read_rate
from widemix.errors import InputError


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
    for order in (surveys, surveys[::-1]):
        found = {(c.host, c.what) for c in compare_nodes(order)}
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
    def fail(backend: str, **options: object) -> None:
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"  # read here
        assert (backend, options["store"], options["rank"], options["world_size"]) == (
            "cpu:gloo,cuda:nccl",
            store,
            1,
            2,
        )
        assert options["timeout"] == datetime.timedelta(seconds=60)
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


@pytest.mark.parametrize(
    ("key", "fine", "wrong", "text"),
    [
        ("celsius", 89, 90, "90 C"),
        ("used_mib", 4096, 4097, "4097 MiB already in use"),
        ("clock", 1001.0, 1001.06, "+1.1 s from the others'"),
        ("clock", 999.0, 998.94, "-1.1 s from the others'"),
        ("open_files", 1024, 1023, "at most 1023: ulimit -n 4096"),
        ("open_files", -1, 0, "at most 0: ulimit -n 4096"),  # -1: unlimited
        ("shared_memory", 1 << 30, (1 << 30) - (1 << 24), "0.98 GiB free in /dev/shm: too little for NCCL"),
        ("locked_memory", 1 << 30, (1 << 30) - 1, "limited: InfiniBand needs ulimit -l unlimited"),
        ("cpu", 0.6, 0.594, "59% of one CPU for a busy thread, elsewhere 100% of one CPU for a busy thread"),
        ("flops", 0.6e12, 0.594e12, "594 GFLOP/s, elsewhere 1,000 GFLOP/s"),
        ("disk", 0.4e9, 0.396e9, "396 MB/s, elsewhere 1,000 MB/s"),
        ("disk", 1e9, 0, "the folder of --data has no .beton here"),
        ("pairs", [0.1e9, 0.8e9], [0.1e9, 0.792e9],
         "6.34 Gbit/s with its fastest partner, elsewhere 16.00 Gbit/s with its fastest partner"),
        ("versions", {"torch": "3.0"}, {}, "absent, elsewhere 3.0"),
        ("gpu", {"name": "H200"}, None, "none, elsewhere H200"),
    ],
)  # fmt: skip
def test_a_node_is_named_from_its_limit_on_and_with_what_it_has(
    key: str, fine: object, wrong: object, text: str
) -> None:
    def of_four(value: object) -> list[str]:
        changes = {"gpu": rank("")["gpu"] | {key: value}} if key in ("celsius", "used_mib") else {key: value}
        surveys = [rank(f"n{i}", **(changes if i == 2 else {})) for i in range(4)]
        return [problem.text for problem in compare_nodes(surveys)]

    assert of_four(fine) == []
    assert of_four(wrong) == [text]


def test_problems_are_named_once_the_faulty_first_and_without_a_gpu_nothing_is_locked() -> None:
    hot = rank("a", gpu={"name": "H200", "celsius": 95})
    surveys = [hot, dict(hot), rank("b", versions={"torch": "2.9"}), rank("b"), rank("c"), rank("c")]
    surveys[3]["versions"] = {"torch": "2.9"}
    assert [(each.host, each.state) for each in compare_nodes(surveys)] == [("b", "faulty"), ("a", "note")]
    assert compare_nodes([rank(host, gpu=None, locked_memory=65536) for host in "abc"]) == []
    silent = {"clock", "pairs", "disk"}
    surveys = [{key: value for key, value in rank(host).items() if key not in silent} for host in "abc"]
    assert compare_nodes(surveys) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_network_is_measured_by_the_shortest_of_some_transfers(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 of four on two nodes; times go on by what is transferred, 1 s for a number and 4 s for much."""
    now, calls, zeros, large = [0.0], [], torch.zeros, 1 << 16
    slower = itertools.cycle([5.0, 0.0, 2.0])  # than the shortest

    def transfer(what: str, tensor: torch.Tensor) -> None:
        calls.append((what, tensor.nbytes))
        now[0] += (1 if tensor.numel() == 1 else 4) + next(slower)

    class Sum:
        def wait(self) -> None:
            calls.append(("waited", 0))

    def all_reduce(tensor: torch.Tensor, async_op: bool = False) -> Sum | None:
        transfer("sum", tensor)
        return Sum() if async_op else None

    def synchronize(where: torch.device) -> None:
        now[0] += 0.5

    clocks = iter([3.0, 900.0, 1.0, 2.0, 900.0])
    monkeypatch.setattr(links, "time", SimpleNamespace(time=lambda: next(clocks), perf_counter=lambda: now[0]))
    monkeypatch.setattr(links.torch, "zeros", lambda count, device=None: zeros(count))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(links, "_size", lambda given: large if given.type == device else 0)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "barrier", lambda: calls.append(("barrier", 0)))
    monkeypatch.setattr(dist, "send", lambda tensor, other: transfer(f"to {other}", tensor))
    monkeypatch.setattr(dist, "recv", lambda tensor, other: transfer(f"from {other}", tensor))
    monkeypatch.setattr(links, "_shortest", partial(_on, device, links._shortest))
    found = measure_links(Topology(2, 4, 0, 2, torch.device(device)))
    waits = 0.5 if device == "cuda" else 0
    assert found["clock"] == 3
    assert found["latency"] == 1 + waits
    assert found["bus"] == 2 * 3 / 4 * large / (4 + waits)
    exchanged = [seconds for what, seconds in calls if what in ("to 0", "from 0")]
    assert exchanged == [large] * 6
    assert [what for what, _ in calls if " 0" in what] == ["from 0", "to 0"] * 3  # the other node sends first
    assert found["pairs"] == [2 * large / (8 + 2 + waits)]  # of 5 + 0, 2 + 5 and 0 + 2 s more
    assert calls[-1] == ("barrier", 0)
    assert [what for what, _ in calls].count("barrier") == 2


def _on(device: str, shortest, action, where: torch.device, times: int) -> float:
    """`links._shortest` as if tensors were on the device."""
    return shortest(action, torch.device(device), times)


def test_much_is_transferred_between_gpus_and_some_between_cpus() -> None:
    assert [links._size(torch.device(kind)) for kind in ("cpu", "cuda")] == [16 << 20, 64 << 20]


@pytest.mark.parametrize(("device", "side", "times"), [("cpu", 256, 200), ("cuda", 8192, 20)])
def test_the_fastest_of_some_products_counts(
    device: str, side: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock: a product takes 3 s, the fourth 2 s, and a GPU finishes it half a second later."""
    now, products, made = [0.0], [], []

    class Matrix:
        def __matmul__(self, other: "Matrix") -> None:
            products.append(other)
            now[0] += 2 if len(products) == 4 else 3

    def ones(*shape: int, device: torch.device, dtype: torch.dtype) -> Matrix:
        made.append((shape, device.type, dtype))
        return Matrix()

    def synchronize(where: torch.device) -> None:
        now[0] += 0.5

    monkeypatch.setattr(survey, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(survey.torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert survey._flops(torch.device(device)) == 2 * side**3 / (2 if device == "cpu" else 2.5)
    assert made == [((side, side), device, torch.float32 if device == "cpu" else torch.bfloat16)] * 2
    assert len(products) == times


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (SimpleNamespace(returncode=0, stdout="0, Not Active, 41, 4\n", stderr=""), {"celsius": 41, "used_mib": 4}),
        (SimpleNamespace(returncode=9, stdout="No devices were found\nmore", stderr="x"),
         {"fault": "nvidia-smi: No devices were found"}),
        (SimpleNamespace(returncode=9, stdout="", stderr=" driver\n"), {"fault": "nvidia-smi: driver"}),
        (subprocess.TimeoutExpired("nvidia-smi", 10), {"fault": "nvidia-smi does not answer"}),
        (None, {}),  # it is not installed
    ],
)  # fmt: skip
def test_nvidia_smi_is_asked_for_the_gpu_of_the_rank(answer, found: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], **options: object) -> object:
        commands.append(command)
        assert options["timeout"] == 10
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H200 {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"u{device.index}"))
    monkeypatch.setattr(survey.shutil, "which", lambda name: f"/bin/{name}" if answer else None)
    monkeypatch.setattr(survey.subprocess, "run", run)
    assert survey._gpu(torch.device("cuda", 3)) == {"name": "H200 3"} | found
    assert survey._gpu(torch.device("cpu")) is None
    if answer:
        [(program, gpu, query, form)] = commands
        assert (program, gpu, form) == ("/bin/nvidia-smi", "--id=GPU-u3", "--format=csv,noheader,nounits")
        asked = query.removeprefix("--query-gpu=").split(",")  # in the order in which `health` reads them
        for name, part in zip(asked, ("uncorrected", "slowdown", "temperature", "memory.used"), strict=True):
            assert part in name


def test_a_file_is_read_from_the_disk_for_some_seconds_and_a_small_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on with each read: 1 s for 4 MiB, and the pages of the cache are dropped before."""
    now, advised = [0.0], []

    class File(io.BytesIO):
        def fileno(self) -> int:
            return 5

        def read(self, size: int | None = -1) -> bytes:
            now[0] += 1
            return super().read(size)

    monkeypatch.setattr(survey, "advise", lambda *given: advised.append(given))
    monkeypatch.setattr(survey, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    large, small = File(bytes(40 << 20)), File(bytes(6 << 20))
    large.seek(7)
    assert survey._read(large) == 3 * (4 << 20) / 4  # the fourth read ends the four seconds
    assert survey._read(small) == (6 << 20) / 3  # two reads, and one that finds the end
    assert advised == [(5, 0, 0, "DONTNEED")] * 2
    rates = iter([5.0, 9.0, 7.0, 1.0])

    def read(file: io.FileIO) -> float:
        assert file.name == str(tmp_path / "large.beton")
        now[0] += 0.15
        return next(rates)

    monkeypatch.setattr(survey, "_read", read)
    (tmp_path / "large.beton").write_bytes(bytes(2))
    (tmp_path / "small.beton").write_bytes(bytes(1))
    assert read_rate(tmp_path) == 9
    assert next(rates, None) is None  # four readings in half a second


def judged(surveys: list[dict | None], rated: float | None = None, started: int = 0) -> tuple[list[str], str]:
    """What rank 0 makes of the ranks' surveys, of which None is silent; and the exit code. Two ranks a node."""
    store = dist.HashStore()
    for number, own in enumerate(surveys):
        if own is not None:
            store.set(f"links/{number}", json.dumps(own))
            store.set(f"survey/{number}", json.dumps(own))
        if own is not None or number < started:
            store.set(f"host/{number}", f"n{number // 2}")
    silent = [number for number, own in enumerate(surveys) if own is None]
    names = cluster._judge(store, Topology(0, len(surveys), 0, 2, torch.device("cpu")), silent, rated)
    return names, store.get("exit_code").decode()


def test_the_network_is_that_of_the_slowest_rank_beside_what_it_is_rated(capsys: pytest.CaptureFixture) -> None:
    surveys = [rank(f"n{i // 2}", rank=i, latency=1e-6 * (20 + i), bus=1e9 * (8 - i)) for i in range(4)]
    heading = ["ranks that answered: 4, on nodes: 2"]
    speed = "all-reduce: latency 23 us, bus bandwidth 40.00 Gbit/s"
    slow = "The network is slow. If no node is named below, the interface may be wrong: see NCCL_DEBUG=INFO"
    for rated, lines in (
        (None, [speed]),
        (10e9, [f"{speed}, 50% of the 80 Gbit/s of --network"]),
        (10.1e9, [f"{speed}, 50% of the 80.8 Gbit/s of --network", slow]),
    ):
        assert judged(surveys, rated) == ([], "0")
        assert capsys.readouterr().out.splitlines() == [*heading, *lines, "All nodes are healthy."]
    assert judged([surveys[0]]) == ([], "0")  # which sends nothing
    assert capsys.readouterr().out.splitlines() == ["ranks that answered: 1, on nodes: 1", "All nodes are healthy."]


def test_faulty_nodes_are_excluded_once_and_silent_ranks_as_far_as_they_came(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    fault = {"name": "H200", "fault": "2 uncorrected memory errors"}
    surveys = [rank(f"n{i // 2}", rank=i, local_rank=i % 2) for i in range(6)]
    for number in (2, 3):
        surveys[number]["gpu"] = fault
    surveys[0]["open_files"] = 256
    assert judged(surveys) == (["n1"], "1")
    head, *lines, last = (line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines())
    assert " ".join(head) == "ranks that answered: 6, on nodes: 3"
    assert " ".join(lines[0]).split() == ["state", "node", "what", "found"]
    assert [" ".join(" ".join(line).split()) for line in lines[1:]] == [
        *(f"faulty n1 GPU {number} 2 uncorrected memory errors" for number in (0, 1)),
        "note n0 open files at most 256: ulimit -n 4096",
    ]
    assert " ".join(last) == "To exclude the faulty nodes: sbatch --exclude=n1"

    names, code = judged([surveys[0], surveys[1], None, None], started=3)
    assert (names, code) == (["n1"], "1")
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "ranks that answered: 2, on nodes: 1" in said
    assert "faulty n1 answer rank 2 hangs: its GPU, or the disk of --data" in said
    assert "faulty node 1 of the launcher's list start rank 3 has not started" in said
    assert judged([surveys[0] | {"open_files": 4096}, None]) == ([], "1")  # of no known name
    assert "exclude" not in capsys.readouterr().out


def test_a_rank_that_measured_no_network_is_named_with_the_reason() -> None:
    store, topology = dist.HashStore(), Topology(0, 4, 0, 2, torch.device("cpu"))
    for key in ("host/3", "survey/3"):
        store.set(key, "n1")
    assert cluster._silence(store, topology, 3) == ("n1", "network", "rank 3: hangs", "faulty")
    store.set("failed/3", "NCCL error")
    assert cluster._silence(store, topology, 3) == ("n1", "network", "rank 3: NCCL error", "faulty")


def test_ranks_are_waited_for_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now, store = [0.0], dist.HashStore()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 0.55:
            store.set("survey/2", "")

    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    store.set("survey/0", "")
    assert cluster._silent_ranks(store, "survey", 3, 0.5) == [1, 2]
    assert cluster._silent_ranks(store, "survey", 3, 0.5) == [1]
    store.set("survey/1", "")
    ended = now[0]
    assert cluster._silent_ranks(store, "survey", 3, 0.5) == []
    assert now[0] == ended


@pytest.mark.parametrize("faulty", [False, True])
def test_the_faulty_nodes_are_written_to_the_file(faulty: bool, tmp_path: Path, monkeypatch, capsys) -> None:
    """By a job of one rank, which measures its disk and no network."""
    facts = rank("n0", gpu={"name": "H200"} | ({"fault": "2 uncorrected memory errors"} if faulty else {}))
    del facts["disk"]
    measured = []

    def links_of(topology: Topology, store: dist.Store, found: dict, timeout_s: float) -> None:
        measured.append((found["disk"], timeout_s))
        store.set("links/0", json.dumps(found))

    monkeypatch.setattr(cluster, "read_topology", lambda: Topology(0, 1, 0, 1, torch.device("cpu")))
    monkeypatch.setattr(cluster, "survey", lambda topology: dict(facts))
    monkeypatch.setattr(cluster, "read_rate", lambda folder: 7e9 if folder == tmp_path else 0)
    monkeypatch.setattr(cluster, "_measure_network", links_of)
    monkeypatch.setattr(torch, "set_num_threads", measured.append)
    file = tmp_path / "faulty"
    assert cluster.run_cluster_doctor(tmp_path, None, file, 60) == faulty
    assert file.read_text() == "n0\n" * faulty
    assert measured == [1, (7e9, 60)]
    with pytest.raises(InputError, match=r"--exclude .*/none/faulty: cannot be written \(No such file"):
        cluster.run_cluster_doctor(tmp_path, None, tmp_path / "none/faulty", 60)


@pytest.mark.parametrize(("rank", "local_rank"), [(0, 0), (2, 0), (3, 1)])
@pytest.mark.parametrize("silent", [(), (1,)])
def test_each_rank_ends_with_what_the_first_makes_of_all(
    rank: int, local_rank: int, silent: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks a node, the first reads its disk; links are measured once all have answered."""
    store, done = dist.HashStore(), []

    def judged_by(given: dist.Store, topology: Topology, found: object, rated: float | None) -> list[str]:
        done.append(("judged", found, rated))
        return ["n1"]

    def silent_ranks(given: dist.Store, key: str, world: int, timeout_s: float) -> list[int]:
        done.append((key, world, timeout_s))
        return [*silent] if key == "survey" else [3]

    monkeypatch.setenv("SLURMD_NODENAME", "n5")
    monkeypatch.setattr(cluster, "read_topology", lambda: Topology(rank, 4, local_rank, 2, torch.device("cpu")))
    monkeypatch.setattr(cluster, "survey", lambda topology: {"rank": topology.rank})
    monkeypatch.setattr(cluster, "read_rate", lambda folder: 5.0)
    monkeypatch.setattr(cluster, "_connect_store", lambda topology, timeout_s: store)
    monkeypatch.setattr(cluster, "_silent_ranks", silent_ranks)
    monkeypatch.setattr(cluster, "_measure_network", lambda *given: done.append(("links", given[2], given[3])))
    monkeypatch.setattr(cluster, "_judge", judged_by)
    monkeypatch.setattr(cluster, "_disconnect", lambda topology, given, expected: done.append(("left", expected)))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    store.set("exit_code", "1")
    file = tmp_path / "faulty"
    assert cluster.run_cluster_doctor(tmp_path, 3.0, file, 7) == 1
    facts = {"rank": rank} | ({"disk": 5.0} if local_rank == 0 else {})
    assert store.check([f"survey/{rank}", f"host/{rank}"])
    assert json.loads(store.get(f"survey/{rank}")) == facts
    assert store.get(f"host/{rank}") == b"n5"
    found = [*silent] or [3]
    steps = [] if silent else [("links", facts, 7), ("links", 4, 7)]
    judge = [("judged", found, 3.0)] if rank == 0 else []
    assert done == [("survey", 4, 7), *steps, *judge, ("left", 3)]
    assert file.exists() == (rank == 0)


def test_a_node_that_has_not_connected_is_named_as_slurm_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames n[3-4]" ] && echo n3 n4 || echo a b\n')
    (tmp_path / "scontrol").chmod(0o755)
    for nodes, path, name in (
        ("n[3-4]", str(tmp_path), "n4"),
        ("n[3-4]", str(tmp_path / "none"), "node 1 of the launcher's list"),  # in a container
        ("", str(tmp_path), "node 1 of the launcher's list"),
    ):
        monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
        monkeypatch.setenv("PATH", path)
        silence = cluster._silence(dist.HashStore(), Topology(0, 6, 0, 2, torch.device("cpu")), 3)
        assert silence == (name, "start", "rank 3 has not started", "faulty")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[3-4]")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cluster._name_of(2) == "node 2 of the launcher's list"


@pytest.mark.parametrize(("rank", "left", "seconds"), [(0, [0.5, 0.2], 0.5), (0, [], 5), (1, [], 0)])
def test_the_first_rank_leaves_last_but_waits_for_no_dead_one(
    rank: int, left: list[float], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three; the others leave after so many seconds, if they do."""
    now, store, ended = [100.0], dist.HashStore(), []

    def sleep(pause: float) -> None:
        now[0] += pause
        if left and now[0] > 100 + left[-1]:
            left.pop()
            store.add("left", 1)

    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(dist, "is_initialized", lambda: rank == 0)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(rank))
    left = [*left]
    cluster._disconnect(Topology(rank, 3, 0, 1, torch.device("cpu")), store, 3)
    assert now[0] - 100 == pytest.approx(seconds, abs=0.1)
    assert ended == [0] * (rank == 0)


def test_a_rank_alone_needs_no_store_of_others_and_a_restarted_job_none_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, other = [], dist.HashStore()

    class Meeting:
        def __init__(self, *given: object) -> None:
            asked.append(given)

        def connect(self) -> dist.Store:
            return other

        def run(self, action) -> dist.Store:
            return action()

    monkeypatch.setattr(cluster, "Rendezvous", Meeting)
    cluster._connect_store(Topology(0, 1, 0, 1, torch.device("cpu")), 7)
    assert asked == []
    for restart, key in ((None, "doctor/0/a"), ("2", "doctor/2/a")):
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
        if restart:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        store = cluster._connect_store(Topology(1, 4, 1, 2, torch.device("cpu")), 7)
        assert asked.pop() == (1, 4, 21)
        store.set("a", "x")
        assert other.check([key])


@pytest.mark.parametrize(("world", "chosen"), [(2, 0), (4, 1)])
def test_ranks_measure_by_gloo_on_cpus_and_choose_an_interface_among_several_nodes(
    world: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interfaces, groups = [], []
    monkeypatch.setattr(cluster, "set_gloo_interface", interfaces.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: groups.append((backend, options)))
    monkeypatch.setattr(cluster, "measure_links", lambda topology: {"bus": float(topology.rank)})
    store = dist.HashStore()
    _measure_network(Topology(1, world, 1, 2, torch.device("cpu")), store, {"host": "n0"}, 60)
    [(backend, options)] = groups
    assert (backend, options["rank"], options["world_size"]) == ("gloo", 1, world)
    assert interfaces == [os.environ] * chosen
    assert not store.check(["failed/1"])
    assert json.loads(store.get("links/1")) == {"host": "n0", "bus": 1.0}


def test_a_survey_says_where_the_rank_is_and_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_MEMLOCK: (-1, 65536)}
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(survey.shutil, "disk_usage", lambda folder: SimpleNamespace(free=len(folder), total=99))
    monkeypatch.setattr(survey.os.path, "isdir", lambda folder: True)
    monkeypatch.setattr(survey, "cpu_fraction", lambda: 0.75)
    monkeypatch.setattr(survey, "_gpu", lambda device: {"name": device.type})
    monkeypatch.setattr(survey, "_flops", lambda device: 5e9 if device.type == "cpu" else 0)
    found = survey.survey(Topology(5, 8, 1, 4, torch.device("cpu")))
    versions = found.pop("versions")
    assert found == {
        "host": "n7", "rank": 5, "local_rank": 1, "open_files": 256, "locked_memory": -1,
        "shared_memory": len("/dev/shm"), "cpu": 0.75, "gpu": {"name": "cpu"}, "flops": 5e9,
    }  # fmt: skip
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == importlib.metadata.version("torch")
    names = {"torch", "torchvision", "timm", "deepspeed", "numba", "numpy", "pillow", "ffcv"}
    assert versions.keys() - {"NCCL"} == names | {"python"}
    monkeypatch.setattr(survey.os.path, "isdir", lambda folder: False)
    assert survey.survey(Topology(5, 8, 1, 4, torch.device("cpu")))["shared_memory"] == 0
    monkeypatch.setattr(survey, "PACKAGES", ("no-such-package",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert survey._versions() == {"python": versions["python"], "no-such-package": "absent", "NCCL": "2.27.3"}


def test_a_disk_has_a_name_of_its_machine_and_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine, device = survey.disk_name(tmp_path).split("/")
    assert device == str(tmp_path.stat().st_dev)
    if boot.exists():  # the same in containers of one machine, whose host names differ
        assert machine == boot.read_text().strip()
    assert survey.disk_name(Path("/proc")) != survey.disk_name(tmp_path)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("[N/A], [N/A], [N/A], [N/A]", {}),
        ("12, Not Active, 0, 70000", {"fault": "12 uncorrected memory errors", "celsius": 0, "used_mib": 70000}),
        ("0, Active, 88, [N/A]", {"fault": "hardware slowdown of its clock at 88 C", "celsius": 88}),
        ("[N/A], [Not Supported], [N/A], 5", {"used_mib": 5}),
    ],
)
def test_what_nvidia_smi_does_not_know_is_no_fault(line: str, found: dict) -> None:
    assert health(line) == found


def test_pairs_of_nodes_pause_where_their_number_is_odd_and_one_node_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first rank of each node transfers with the first of another; the lower one sends first."""
    partners, barriers = [], []
    monkeypatch.setattr(dist, "barrier", lambda: barriers.append(1))
    monkeypatch.setattr(links, "_shortest", lambda action, device, times: action() or 2.0)
    monkeypatch.setattr(links, "_exchange", lambda payload, other, first: partners.append((other, first)))
    payload = torch.zeros(6)
    for world, rank, local_rank, expected in (
        (6, 2, 0, [(4, True), (0, False)]),  # it pauses once
        (6, 0, 0, [(2, True), (4, True)]),
        (6, 3, 1, []),
        (2, 0, 0, []),
    ):
        partners.clear()
        barriers.clear()
        rates = links._pairs(Topology(rank, world, local_rank, 2, torch.device("cpu")), payload)
        assert sorted(partners) == sorted(expected)
        assert rates == [2 * 24 / 2.0] * len(expected)
        assert len(barriers) == (4 if world > 2 else 1)
