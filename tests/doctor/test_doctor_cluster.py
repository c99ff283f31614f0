"""`widemix doctor --cluster`: on real ranks over gloo, and what it makes of what ranks measure."""

import datetime
import itertools
import os
import platform
import resource
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.conftest import System
from tests.forks import Forks, be_widemix, free_port
from widemix.distributed.topology import Topology
from widemix.doctor.cluster import measure_network, print_report
from widemix.doctor.compare import compare_nodes
from widemix.doctor.survey import health, measure_links, pairings, read_rate, survey

CPU = torch.device("cpu")


# Real ranks, two on each node.


def be_rank(faults: dict[int, str], *words: str) -> None:
    """A rank with a fault of its machine: few open files, no folder of --data, or it hangs."""
    fault = faults.get(int(os.environ["SLURM_PROCID"]))
    if fault == "few files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    if fault == "no data":
        words = (*words, "--data", "/none")
    if fault == "hangs":
        resource.getrlimit = lambda _: time.sleep(600)  # type: ignore[assignment]
    be_widemix("doctor", "--cluster", *words)


def check_nodes(world: int, faults: dict, log: Path, *words: object, absent: tuple = (), **environ: str) -> tuple:
    """Exit codes of the ranks that start, and the lines that they print, without the width of columns."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": f"2(x{world // 2})", "SLURM_STEP_NODELIST": "n[0-9]"}
    step |= {"SLURM_STEP_NUM_TASKS": str(world), "SLURM_JOB_ID": "1", "COLUMNS": "200"} | environ
    step |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    places = [
        {"SLURM_PROCID": str(i), "SLURM_NODEID": str(i // 2), "SLURM_LOCALID": str(i % 2)}
        | {"SLURMD_NODENAME": f"n{i // 2}"}
        for i in range(world) if i not in absent
    ]  # fmt: skip
    forks = Forks(be_rank, faults, *map(str, words), log=log, environs=[step | place for place in places])
    while forks.running.keys() - {number for number, fault in faults.items() if fault == "hangs"}:
        forks.reap()
        time.sleep(0.02)
    forks.kill()
    codes, said = forks.wait()
    return [code for code in codes if code >= 0], [" ".join(line.split()) for line in said.splitlines()]


def test_faults_of_real_nodes_are_named_and_excluded(tmp_path: Path) -> None:
    faulty = tmp_path / "faulty"
    codes, lines = check_nodes(
        6, {2: "no data", 5: "few files"}, tmp_path / "log", "--exclude", faulty, "--network", "1e9"
    )
    assert codes == [1] * 6, lines
    assert lines[0] == "ranks that answered: 6, on nodes: 3"
    assert lines[1].startswith("all-reduce: latency ")
    assert " Gbit/s, 0% of the 1e+09 Gbit/s of --network" in lines[1]
    assert "faulty n1 disk the folder of --data has no .beton here" in lines
    assert "note n2 open files at most 256: ulimit -n 4096" in lines
    assert not any("clock" in line for line in lines)
    names = faulty.read_text().split()
    assert "n1" in names  # a busy machine may find another slow
    assert lines[-1] == f"To exclude the faulty nodes: sbatch --exclude={','.join(names)}"


def test_a_disk_that_nodes_share_is_read_once(tmp_path: Path) -> None:
    _, lines = check_nodes(4, {}, tmp_path / "log", "--data", tmp_path)
    assert sum(line.endswith("has no .beton here") for line in lines) == 1


def test_ranks_that_hang_or_do_not_start_are_named(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames n[0-9]" ] && echo n0 n1 n2\n')
    (tmp_path / "scontrol").chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[0-9]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    faulty, words = tmp_path / "faulty", ("--timeout", "4", "--exclude", tmp_path / "faulty")
    codes, lines = check_nodes(4, {1: "hangs"}, tmp_path / "log", *words, absent=(2, 3), **slurm)
    assert codes == [1], lines
    assert lines[0] == "ranks that answered: 1, on nodes: 1"
    hangs = "faulty n0 answer rank 1 hangs: its GPU, or the disk of --data"
    assert [line for line in lines if "faulty" in line][:-1] == [
        hangs, "faulty n1 start rank 2 has not started", "faulty n1 start rank 3 has not started"
    ]  # fmt: skip
    assert faulty.read_text().split() == ["n0", "n1"]
    # Without Slurm nobody knows the node.
    codes, lines = check_nodes(2, {}, tmp_path / "log", *words, absent=(1,), SLURM_JOB_NODELIST="")
    assert codes == [1]
    assert "faulty node 0 of the launcher's list start rank 1 has not started" in lines
    assert (faulty.read_text(), lines[-1]) == (
        "",
        "faulty node 0 of the launcher's list start rank 1 has not started",
    )


def test_a_list_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    nowhere = tmp_path / "none" / "faulty"
    codes, lines = check_nodes(2, {}, tmp_path / "log", "--timeout", "1", "--exclude", nowhere, absent=(1,))
    assert (codes, lines) == ([2], [f"error: --exclude {nowhere}: there is no folder {nowhere.parent}"])


# What rank 0 makes of what all have measured.


def rank(host: str, **changes) -> dict:
    healthy = {"host": host, "rank": 0, "local_rank": 0, "clock": 1000.0, "versions": {"torch": "3.0"}}
    healthy |= {"open_files": 4096, "locked_memory": -1, "shared_memory": 8 << 30, "cpu": 1.0, "flops": 1e12}
    healthy |= {"gpu": {"name": "H200", "celsius": 40, "used_mib": 0}, "disk": 1e9, "pairs": [1e9, 2e9]}
    return healthy | changes


@pytest.mark.parametrize(
    ("key", "fine", "wrong", "problem"),
    [
        ("fault", None, "3 uncorrected memory errors", ("GPU 0", "3 uncorrected memory errors", "faulty")),
        ("celsius", 89, 90, ("GPU 0", "90 C", "note")),
        ("used_mib", 4096, 4097, ("GPU 0", "4097 MiB already in use", "note")),
        ("name", "H200", "V100", ("GPU", "V100, elsewhere H200", "faulty")),
        ("gpu", None, None, ("GPU", "none, elsewhere H200", "faulty")),
        ("versions", {"torch": "3.0"}, {"torch": "2.9"}, ("torch", "2.9, elsewhere 3.0", "faulty")),
        ("versions", {"torch": "3.0"}, {}, ("torch", "absent, elsewhere 3.0", "faulty")),
        ("clock", 1001.0, 1001.06, ("clock", "+1.1 s from the others'", "note")),
        ("clock", 999.0, 998.94, ("clock", "-1.1 s from the others'", "note")),
        ("open_files", 1024, 1023, ("open files", "at most 1023: ulimit -n 4096", "note")),
        ("open_files", -1, 0, ("open files", "at most 0: ulimit -n 4096", "note")),  # -1: unlimited
        ("shared_memory", 1 << 30, (1 << 30) - (1 << 24),
         ("shared memory", "0.98 GiB free in /dev/shm: too little for NCCL", "note")),
        ("locked_memory", 1 << 30, (1 << 30) - 1,
         ("locked memory", "limited: InfiniBand needs ulimit -l unlimited", "note")),
        ("cpu", 0.6, 0.594, ("CPU", "59% of one CPU for a busy thread, elsewhere 100% of one CPU for a busy thread",
                             "note")),
        ("flops", 0.6e12, 0.594e12, ("computing", "594 GFLOP/s, elsewhere 1,000 GFLOP/s", "faulty")),
        ("disk", 0.4e9, 0.396e9, ("disk", "396 MB/s, elsewhere 1,000 MB/s", "faulty")),
        ("disk", 1e9, 0, ("disk", "the folder of --data has no .beton here", "faulty")),
        ("pairs", [0.1e9, 0.8e9], [0.1e9, 0.792e9],
         ("network", "6.34 Gbit/s with its fastest partner, elsewhere 16.00 Gbit/s with its fastest partner",
          "faulty")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("node", [0, 2])  # the first is no better than others
def test_a_node_is_named_beyond_a_limit(key: str, fine: object, wrong: object, problem: tuple, node: int) -> None:
    def of_four(value: object) -> list[tuple]:
        of_gpu = {"gpu": {"name": "H200", "celsius": 40, "used_mib": 0} | {key: value}}
        changes = of_gpu if key in ("fault", "celsius", "used_mib", "name") else {key: value}
        if key in ("fault", "gpu") and value is None and value is fine and value is not wrong:
            changes = {}
        return [(p.host, p.what, p.text, p.state) for p in compare_nodes(
            [rank(f"n{i}", **(changes if i == node else {})) for i in range(4)])]  # fmt: skip

    assert of_four(wrong) == [(f"n{node}", *problem)]
    if fine is not wrong:
        assert of_four(fine) == []


@pytest.mark.parametrize(
    ("surveys", "found"),
    [
        ([rank("a"), rank("b"), rank("c")], []),
        # A link is rated by its fastest partner, a node by its slowest rank.
        ([rank("a", pairs=[1e8, 2e9]), rank("b", pairs=[1e8, 1e8]), rank("c"), rank("c", flops=1e11)],
         [("b", "network"), ("c", "ranks"), ("c", "computing")]),
        # Of two nodes the slower is compared with the faster, one node with none.
        ([rank("a", flops=0.59e12), rank("b")], [("a", "computing")]),
        ([rank("a", flops=0.6e12), rank("b")], []),
        ([rank("a", flops=0.59e12), rank("a", local_rank=1)], []),
        # Each problem once, those of faulty nodes first.
        ([rank("a", gpu={"name": "H200", "celsius": 95})] * 2 + [rank("b", versions={"torch": "2.9"})] * 2
         + [rank("c")] * 2, [("b", "torch"), ("a", "GPU 0")]),
        # Without a GPU nothing has to be locked, and a rank may have measured less.
        ([rank(host, gpu=None, locked_memory=65536) for host in "abc"], []),
        ([{key: own for key, own in rank(host).items() if key not in ("clock", "pairs", "disk")} for host in "abc"],
         []),
    ],
)  # fmt: skip
def test_nodes_are_compared_with_each_other(surveys: list[dict], found: list[tuple]) -> None:
    assert [(problem.host, problem.what) for problem in compare_nodes(surveys)] == found
    assert {(problem.host, problem.what) for problem in compare_nodes(surveys[::-1])} == set(found)


def test_the_network_is_that_of_the_slowest_rank(capsys: pytest.CaptureFixture) -> None:
    surveys = [rank(f"n{i // 2}", rank=i, latency=1e-6 * (20 + i), bus=1e9 * (8 - i)) for i in range(4)]
    speed = "all-reduce: latency 23 us, bus bandwidth 40.00 Gbit/s"
    slow = "The network is slow. If no node is named below, the interface may be wrong: see NCCL_DEBUG=INFO"
    for rated, lines in (
        (None, [speed]),
        (10e9, [f"{speed}, 50% of the 80 Gbit/s of --network"]),
        (10.1e9, [f"{speed}, 50% of the 80.8 Gbit/s of --network", slow]),
    ):
        print_report(surveys, [], rated)
        assert capsys.readouterr().out.splitlines() == ["ranks that answered: 4, on nodes: 2", *lines]
    print_report(surveys[:1], [], 1.0)  # which sends nothing
    assert capsys.readouterr().out == "ranks that answered: 1, on nodes: 1\n"


# What a rank measures.


@pytest.mark.parametrize("count", range(2, 12))
def test_partners_are_mutual_and_new_in_every_round(count: int) -> None:
    rounds = pairings(count)
    assert len(rounds) == min(3, count - 1 + count % 2)
    for partners in rounds:
        assert [partners[partners[i]] for i in range(count)] == list(range(count))
        assert sum(partners[i] == i for i in range(count)) == count % 2  # one of an odd number pauses
    for one, other in itertools.combinations(rounds, 2):
        assert all(one[i] != other[i] for i in range(count))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("0, Not Active, 41, 4\n", {"celsius": 41, "used_mib": 4}),
        ("[N/A], Not Active, 41, 4", {"celsius": 41, "used_mib": 4}),
        ("12, Active, 0, 70000", {"fault": "12 uncorrected memory errors", "celsius": 0, "used_mib": 70000}),
        ("0, Active, 88, [N/A]", {"fault": "hardware slowdown of its clock at 88 C", "celsius": 88}),
        ("[N/A], [Not Supported], [N/A], 5", {"used_mib": 5}),
        ("[N/A], [N/A], [N/A], [N/A]", {}),
    ],
)
def test_health_of_a_gpu_is_read_from_a_line(line: str, found: dict) -> None:
    assert health(line) == found


class Device:
    """Tensors that this machine's GPU or CPU would have; time goes on by what is done with them."""

    def __init__(self, kind: str):
        self.kind, self.now, self.calls, self.synchronised = kind, 0.0, [], 0
        self.slower = itertools.cycle([5.0, 0.0, 2.0])  # than the shortest

    def look(self) -> float:
        """The time, a microsecond later: what waits for it to pass does not wait for ever."""
        self.now += 1e-6
        return self.now

    def tensor(self, *shape: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
        tensor = SimpleNamespace(device=torch.device(device), numbers=torch.Size(shape).numel(), dtype=dtype)
        tensor.nbytes, device_of = tensor.numbers * dtype.itemsize, self

        class Matrix(SimpleNamespace):
            def __matmul__(self, other: object) -> None:
                device_of.calls.append(("product", (shape, device_of.kind, dtype)))
                device_of.now += 2 if len(device_of.calls) == 4 else 3

        return Matrix(**vars(tensor))

    def transfer(self, what: str, tensor: SimpleNamespace) -> None:
        self.calls.append((what, tensor.nbytes))
        self.now += (1 if tensor.numbers == 1 else 4) + next(self.slower)

    def all_reduce(self, tensor: SimpleNamespace, async_op: bool = False) -> SimpleNamespace | None:
        self.transfer("sum", tensor)
        # Without async_op NCCL returns nothing to wait for, and waiting for the GPU has no timeout.
        return SimpleNamespace(wait=lambda: self.calls.append(("waited", 0))) if async_op else None

    def synchronize(self, device: torch.device) -> None:
        assert device.type == self.kind == "cuda"
        self.now += 0.5


@pytest.fixture(params=["cpu", "cuda"])
def device(request, system: System) -> Device:
    found = Device(request.param)
    clocks = itertools.chain([3.0, 900.0, 1.0, 2.0, 900.0], itertools.repeat(0.0))
    system({
        "time.time": lambda: next(clocks), "time.perf_counter": found.look,
        "torch.zeros": found.tensor, "torch.ones": found.tensor, "torch.cuda.synchronize": found.synchronize,
        "torch.distributed.all_reduce": found.all_reduce,
        "torch.distributed.barrier": lambda: found.calls.append(("barrier", 0)),
        "torch.distributed.send": lambda tensor, other: found.transfer(f"to {other}", tensor),
        "torch.distributed.recv": lambda tensor, other: found.transfer(f"from {other}", tensor),
    })  # fmt: skip
    return found


def test_the_shortest_of_some_transfers_counts(device: Device) -> None:
    """Rank 2 of four on two nodes; 1 s for a number and 4 s for much, and half a second for a GPU to finish."""
    large, waits = (64 << 20, 0.5) if device.kind == "cuda" else (16 << 20, 0.0)
    found = measure_links(Topology(2, 4, 0, 2, torch.device(device.kind)))
    assert found["clock"] == 3  # the median
    assert found["latency"] == pytest.approx(1 + waits, rel=1e-4)
    assert found["bus"] == pytest.approx(2 * 3 / 4 * large / (4 + waits), rel=1e-4)
    assert found["pairs"] == pytest.approx(
        [2 * large / (8 + 2 + waits)], rel=1e-4
    )  # of 5 + 0, 2 + 5 and 0 + 2 s more
    exchanged = [call for call in device.calls if call[0] in ("to 0", "from 0")]
    assert exchanged == [("from 0", large), ("to 0", large)] * 3  # the lower node sends first
    assert device.calls[-1] == ("barrier", 0)
    assert device.calls.count(("barrier", 0)) == 2


@pytest.mark.parametrize(
    ("world", "number", "local", "partners"),
    [
        (6, 2, 0, [("to 4", "from 4"), ("from 0", "to 0")]),  # of three nodes one pauses in each round
        (6, 0, 0, [("to 2", "from 2"), ("to 4", "from 4")]),
        (6, 3, 1, []),
        (2, 0, 0, []),
    ],
)
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_the_first_rank_of_each_node_exchanges_with_others(world, number, local, partners, device: Device) -> None:
    measure_links(Topology(number, world, local, 2, CPU))
    said = [what for what, _ in device.calls if what.startswith(("to", "from"))]
    assert set(zip(said[::6], said[1::6], strict=True)) == set(partners)
    assert len(said) == 6 * len(partners)
    assert device.calls.count(("barrier", 0)) == (4 if world > 2 else 1)


def test_a_network_that_fails_or_hangs_leaves_the_rank_alive(system: System) -> None:
    store, given = dist.HashStore(), []

    def fail(backend: str, **options: object) -> None:
        given.append((backend, options["store"], options["rank"], options["world_size"], options["timeout"]))
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"  # read here
        raise dist.DistBackendError("NCCL error: remote process exited\nmore")

    system({"os.environ": {}, "torch.cuda.set_device": given.append, "torch.distributed.init_process_group": fail})
    device = torch.device("cuda", 1)
    measure_network(Topology(1, 2, 1, 2, device), store, {}, 60)
    assert given == [device, ("cpu:gloo,cuda:nccl", store, 1, 2, datetime.timedelta(seconds=60))]
    assert store.get("failed/1") == b"NCCL error: remote process exited"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ('echo "0, Not Active, 41, 4"', {"celsius": 41, "used_mib": 4}),
        ("echo No devices were found; echo more; exit 9", {"fault": "nvidia-smi: No devices were found"}),
        ("echo ' driver' >&2; exit 9", {"fault": "nvidia-smi: driver"}),
        ("exec sleep 60", {"fault": "nvidia-smi does not answer"}),
        (None, {}),  # it is not installed
    ],
)
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_survey_of_a_gpu(script, found: dict, device: Device, system: System, tmp_path: Path, monkeypatch) -> None:
    if script:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{script}\n')
        smi.chmod(0o755)
    if script == "exec sleep 60":  # which is ten seconds in the command
        run = subprocess.run
        system({"subprocess.run": lambda *words, timeout, **rest: run(*words, timeout=timeout / 50, **rest)})
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else str(tmp_path))
    system({
        "torch.cuda.get_device_name": lambda device: f"H200 {device.index}", "torch.cuda.is_available": lambda: True,
        "torch.cuda.get_device_properties": lambda device: SimpleNamespace(uuid=f"u{device.index}"),
        "torch.cuda.nccl.version": lambda: (2, 27, 3),
    })  # fmt: skip
    facts = survey(Topology(5, 8, 3, 4, torch.device("cuda", 3)))
    assert facts["gpu"] == {"name": "H200 3"} | found
    assert facts["versions"]["NCCL"] == "2.27.3"
    assert facts["flops"] == pytest.approx(2 * 8192**3 / 2.5, rel=1e-4)  # the fastest of 20 products
    assert device.calls == [("product", ((8192, 8192), "cuda", torch.bfloat16))] * 20
    if script:
        gpu, query, form = (tmp_path / "asked").read_text().split()
        assert (gpu, form) == ("--id=GPU-u3", "--format=csv,noheader,nounits")
        asked = query.removeprefix("--query-gpu=").split(",")  # in the order in which `health` reads them
        for name, part in zip(asked, ("uncorrected", "slowdown", "temperature", "memory.used"), strict=True):
            assert part in name


def test_a_survey_says_what_a_rank_has(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_MEMLOCK: (-1, 65536)}
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    system({
        "resource.getrlimit": limits.__getitem__,
        "shutil.disk_usage": lambda folder: SimpleNamespace(free=len(folder), total=99),
    })  # fmt: skip
    for has_memory in (True, False):
        system({"os.path.isdir": lambda folder, has=has_memory: has})
        found = survey(Topology(5, 8, 1, 4, CPU))
        versions, speeds = found.pop("versions"), (found.pop("cpu"), found.pop("flops"))
        assert found == {
            "host": "n7", "rank": 5, "local_rank": 1, "open_files": 256, "locked_memory": -1, "gpu": None,
            "shared_memory": len("/dev/shm") * has_memory,
        }  # fmt: skip
        assert 0 < speeds[0] < 1.1
        assert speeds[1] > 1e6
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == version("torch")
    names = {"torch", "torchvision", "timm", "deepspeed", "numba", "numpy", "pillow", "ffcv"}
    assert versions.keys() - {"NCCL"} == names | {"python"}


def test_a_disk_is_read_for_some_seconds_past_the_cache(system: System, tmp_path: Path) -> None:
    """By a clock that goes on at each look: by a second in a large file, in a small one less."""
    assert read_rate(tmp_path) == 0
    steps, now, dropped = iter([0.0, 0.0] + [1.0] * 9), [0.0], []

    def clock() -> float:
        now[0] += next(steps)
        return now[0]

    system({"time.perf_counter": clock, "os.posix_fadvise": lambda *words: dropped.append(words[3])})
    (tmp_path / "other.beton").write_bytes(b"less")
    with (tmp_path / "train.beton").open("wb") as file:
        file.truncate(40 << 20)
    # The fourth read ends the four seconds, and another look the time that counts; half a second is over.
    assert read_rate(tmp_path) == 3 * (4 << 20) / 5
    assert dropped == [os.POSIX_FADV_DONTNEED]
    with (tmp_path / "train.beton").open("wb") as file:
        file.truncate(6 << 20)
    steps = iter(
        [0.0, *[0.0, *[0.08] * 4], *[0.0, *[0.03] * 4], *[0.0, *[0.02] * 4], 0.0]
    )  # of three readings the last is the fastest
    assert read_rate(tmp_path) == pytest.approx((6 << 20) / 0.06)
    assert len(dropped) == 4
