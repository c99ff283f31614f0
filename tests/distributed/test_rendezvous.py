"""How ranks meet: who is missing is said, signals end the waiting, and an attempt sees no key of those before."""

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.faults.faulty import train_with
from tests.forks import Forks, free_port, group_of
from widemix.distributed import rendezvous
from widemix.distributed.rendezvous import Rendezvous
from widemix.distributed.topology import Topology, process_group
from widemix.errors import LauncherError, RunError

WORLD = 3


def train_impatiently(tell_after_s: float, data: Path) -> None:
    """Be a rank of a run that says early whom it waits for."""
    rendezvous.TELL_AFTER_S = tell_after_s
    train_with("none", "recipes/digits/rp_mixer.yaml", "--data.path", f"{data}", "--run-dir", "/no/such/run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("here", "awaited"),
    [([0], "rank 0 of 4 on {}: waits for ranks 1, 2, 3 at"), ([2], "rank 2 of 4 on {}: waits for rank 0 at")],
    ids=["rank 0 alone", "rank 2 alone"],
)
def test_a_waiting_rank_says_for_whom(digits, tmp_path, here, awaited, number):
    environs = [group_of(4)[rank] for rank in here]
    group = Forks(train_impatiently, 0.1, digits, log=tmp_path / "log", environs=environs)
    while awaited.format(os.uname().nodename) not in group.said():
        group.reap()
        assert group.running, group.said()
        time.sleep(0.02)
    group.signal(number)
    codes, said = group.wait(300)  # far below engine.timeout_s
    assert codes == [75], said
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    assert said.splitlines()[-1].startswith(f"rank {here[0]}: stopped by {name} before all ranks had met"), said
    assert "to train in one process alone, unset RANK and WORLD_SIZE" in said
    assert "Traceback" not in said


@pytest.fixture
def fast(system) -> None:
    """A clock that goes a hundred times as fast."""
    clock = time.monotonic
    system({"time.monotonic": lambda: 100 * clock()})


@pytest.fixture
def places(monkeypatch) -> int:
    """MASTER_ADDR, and the MASTER_PORT that it returns, in this process."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return port


def join(rank: int, world: int = 2, timeout_s: float = 60) -> None:
    with process_group(Topology(rank, world, rank, world, torch.device("cpu")), timeout_s):
        pass


def listen() -> None:
    """Join the group, and print where this process listens."""
    rank = int(os.environ["RANK"])
    with process_group(Topology(rank, 2, rank, 2, torch.device("cpu")), 200):
        for one in psutil.Process().net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                print(f"rank {rank} listens on {one.laddr.ip}, {one.laddr.port}")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_ranks_of_one_machine_listen_for_that_machine_alone(host, tmp_path):
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    port = str(free_port())
    environ = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    group = Forks(listen, log=tmp_path / "log", environs=[environ | {"RANK": str(rank)} for rank in range(2)])
    codes, said = group.wait(300)
    assert codes == [0, 0], said
    found = re.findall(r"rank (\d) listens on (\S+), (\d+)", said)
    assert [(rank, number) for rank, _, number in found].count(("0", port)) == 1  # the store
    assert {address for _, address, _ in found} <= {"127.0.0.1", "::1"}
    assert {rank for rank, *_ in found} == {"0", "1"}  # gloo


def test_a_taken_port_is_one_line(places):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", places))
        other.listen()
        with pytest.raises(
            LauncherError, match=rf"^MASTER_PORT {places}: another process on \S+ has it; set another"
        ):
            join(0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MASTER_PORT", "http", "^MASTER_PORT='http' in the environment is not a whole number"),
        ("MASTER_PORT", "70000", "^MASTER_PORT=70000: a port is 1 to 65535"),
        (
            "MASTER_PORT",
            "",
            "MASTER_PORT is not set; set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port",
        ),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set; set MASTER_ADDR to rank 0's host"),
        ("MASTER_ADDR", "no.such.host.invalid", "^MASTER_ADDR no.such.host.invalid: .* does not know this host"),
        ("MASTER_ADDR", "n..0", "^MASTER_ADDR n..0: .* does not know this host"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("places", "fast")
def test_what_is_no_place_is_one_line(monkeypatch, name, value, message, rank):
    monkeypatch.setenv(name, value)
    with pytest.raises(LauncherError, match=message):
        join(rank)


@pytest.mark.parametrize(
    ("rank", "world", "awaited"),
    [
        (0, 2, "rank 1"),
        (1, 2, "rank 0"),
        (0, 3, "ranks 1, 2"),
        (0, 17, f"ranks {', '.join(map(str, range(1, 17)))}"),
        (0, 21, f"ranks {', '.join(map(str, range(1, 17)))} and 4 more"),
    ],
)
@pytest.mark.usefixtures("places")
def test_the_time_limit_ends_the_waiting_and_names_the_missing(rank, world, awaited):
    refused = r" \(Connection refused\)" * (rank == 1)
    said = rf"has waited 1 s for {awaited} at MASTER_ADDR 127.0.0.1, MASTER_PORT \d+{refused}; to train"
    with pytest.raises(RunError, match=said):
        join(rank, world, timeout_s=1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("places", "fast")
def test_a_rank_whose_torchrun_was_killed_before_they_met_ends(monkeypatch, rank):
    """The kernel's signal comes only to those that have asked for it: some seconds after their start."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RunError, match=rf"^rank {rank} of 2 on \S+: torchrun has ended: its store at MASTER_ADDR"):
        join(rank)


@pytest.mark.usefixtures("places")
def test_a_host_that_becomes_known_is_no_error(system):
    elsewhere = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 1))
    look_up, answers = socket.getaddrinfo, [OSError("not known yet"), UnicodeError("nor now"), [elsewhere]]

    def look_up_later(*words, **options):
        answer = answers.pop(0) if answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer + look_up(*words, **options)

    system({"socket.getaddrinfo": look_up_later})
    for is_here in (True, False):
        heard: list[str] = []
        note = {"waits_for": lambda self, awaited, heard=heard: heard.append(awaited)}
        type("Meeting", (Rendezvous,), note)(0, 2, 60).connect().set("a", "key")
        assert ["which is not this machine: is it left" in each for each in heard] == ([] if is_here else [True])
        assert not answers
        system({"socket.getaddrinfo": lambda *_, **__: [elsewhere]})


@pytest.mark.parametrize(
    ("agent", "error", "soon"),
    [(True, ConnectionRefusedError, True), (False, ConnectionRefusedError, False), (True, TimeoutError, False)],
)
def test_a_store_that_does_not_answer_yet_is_waited_for(places, monkeypatch, system, agent, error, soon):
    """Only torchrun's is open before its ranks start, and only a refusal says that it is not."""
    tried: list[int] = []
    clock, connect = time.monotonic, socket.create_connection

    def connect_later(*words, **options):
        tried.append(0)
        if len(tried) < 4:
            raise error(1, "not now")
        return connect(*words, **options)

    system({"socket.create_connection": connect_later, "time.monotonic": lambda: (1 if soon else 1000) * clock()})
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agent))
    agents = dist.TCPStore("127.0.0.1", places, None, True, wait_for_workers=False)
    agents.set("a", "key")
    assert Rendezvous(1, 2, 60).connect().get("a") == b"key"
    assert len(tried) == 4


def attempt(store: dist.Store, ranks: Sequence[int], world: int = WORLD) -> list[dist.Store]:
    """The stores that these ranks, each with its own thread, get from one another."""
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: meeting_in(store)(rank, world, 60).join(), ranks))


def meeting_in(store: dist.Store) -> type[Rendezvous]:
    """As where this is the job's store."""
    return type("Meeting", (Rendezvous,), {"connect": lambda self: store})


@pytest.mark.usefixtures("places")
def test_an_attempt_sees_no_key_of_those_before():
    store = dist.HashStore()
    for number in range(1, 4):
        stores = attempt(store, range(WORLD))
        assert not stores[0].check(["failure"])
        stores[1].set("failure", f"of attempt {number}")
        assert stores[2].get("failure").decode() == f"of attempt {number}"


@pytest.mark.usefixtures("places")
def test_tickets_of_killed_ranks_do_not_count():
    store = dist.HashStore()
    for rank in range(1, WORLD):
        store.set(f"ticket {rank}", f"of a killed rank {rank}")
    stores = attempt(store, range(WORLD))
    stores[0].set("a", "key")
    assert stores[2].get("a") == b"key"


@pytest.mark.usefixtures("places")
def test_a_rank_is_told_that_another_has_its_number(system):
    for answer, message in (
        ("1 2", "another process has joined as this rank"),
        ("1 5", "rank 0 .* has WORLD_SIZE=5"),
    ):
        store = dist.HashStore()
        dist.PrefixStore("attempt 1", store).set("joined 1", "another's ticket")
        system({"uuid.uuid4": lambda: SimpleNamespace(hex="own")})
        store.set("answer own", answer)
        with pytest.raises(LauncherError, match=message):
            meeting_in(store)(1, 2, 60).join()


def test_ranks_of_two_attempts_by_real_stores(places, tmp_path):
    """As torchrun's: its agent keeps the store, and all ranks are its clients."""
    agent = dist.TCPStore("127.0.0.1", places, None, True, wait_for_workers=False)
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(agent.port)}
    for number in (1, 2):
        environs = [environ | elastic for environ in group_of(2)]
        codes, said = Forks(meet, tmp_path / "seen", log=tmp_path / "log", environs=environs).wait()
        assert codes == [0, 0], said
        assert (tmp_path / "seen").read_text() == "0" * number


def meet(seen: Path) -> None:
    """One rank of two, which notes how many keys of a name there were before it set it."""
    rank = int(os.environ["RANK"])
    with process_group(Topology(rank, 2, rank, 2, torch.device("cpu")), 600) as store:
        if rank == 0:
            with seen.open("a") as file:
                file.write(str(store.add("failure", 1) - 1))
        dist.barrier()
