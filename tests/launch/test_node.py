"""What each node of a Slurm job does before, and how, it starts torchrun, which here only notes its arguments."""

import json
import os
import socket
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_args

from tests.conftest import ROOT
from tests.forks import free_port
from widemix.cli.commands import split_overrides
from widemix.distributed.startup_timing import VARIABLE
from widemix.errors import InputError, RunError
from widemix.launch import local
from widemix.launch.local import free_ports, is_free, job_port
from widemix.launch.relay import Relay
from widemix.launch.slurm import node as module
from widemix.launch.slurm.node import can_exclude, make_relay, torchrun_command, wait_for_all_nodes
from widemix.launch.torchrun import train_program
from widemix.recipe import load_recipe

RECIPE = str(ROOT / "recipes/digits/mixer.yaml")
ALONE = {"SLURM_NODEID": "0", "SLURM_JOB_ID": "12005", "SLURM_STEP_NUM_NODES": "1", "SLURMD_NODENAME": "n0"}


@pytest.fixture
def node(tmp_path, digits, monkeypatch, system, run_main):
    """Run the program of a job's only node: node(options...) -> exit code; node.started has torchrun's arguments."""
    (tmp_path / "logs").mkdir()
    started: list[list[str]] = []
    system({"torch.distributed.run.main": started.append})
    for name, value in (ALONE | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "", VARIABLE: ""}).items():
        monkeypatch.setenv(name, value)
    for name in (module.LOCAL_VARIABLE, "WIDEMIX_RANK_STATUS_DIR", "WIDEMIX_STAGE_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def run(**changes: str) -> int:
        own = {"stage": "", "preflight": "no", "environment": "", "ranks": "2", "restarts": "1", "sizes": ""}
        own |= {"ports": f"{free_port()},{free_port()},{free_port()}", "addresses": "127.0.0.1"}
        words = [word for name, value in (own | {"logs": f"{tmp_path}/logs"} | changes).items()
                 for word in (f"--{name}", value)]  # fmt: skip
        return run_main(module, *words, "--", RECIPE, f"--data.path={digits}")

    run.started = started
    return run


def parts() -> list[str]:
    """The parts of the start that were timed."""
    return [part.partition("=")[0] for part in os.environ[VARIABLE].split(";") if part]


def test_a_node_stages_waits_for_all_and_trains(node, tmp_path, digits):
    """On its own data; it notes how long each part took."""
    assert node(stage=f"{tmp_path}/disk") == 0
    [command] = node.started
    (copy,) = (tmp_path / "disk").glob("[!.]*")
    assert command[-4:] == ["train", RECIPE, f"--data.path={digits}", f"--data.path={copy}"]
    assert json.loads((tmp_path / "logs/node-0.json").read_text()) == command
    assert (tmp_path / "logs/node-0.started").exists()
    assert parts() == ["batch script", "staging", "waiting for nodes"]


def test_an_elastic_node_trains_again_after_a_rank_failed(node, tmp_path, system, digits):
    def fail_once(command: list[str]) -> None:
        node.started.append(command)
        if len(node.started) == 1:
            raise ChildFailedError("train", {0: ProcessFailure(0, 1, 1, "none")})

    system({"torch.distributed.run.main": fail_once})
    assert node(sizes="1") == 0
    assert [parse_args(command).rdzv_id for command in node.started] == [f"train-12005-0-{n}" for n in (0, 1)]
    assert all(command[-3:] == [RECIPE, *[f"--data.path={digits}"] * 2] for command in node.started)
    assert json.loads((tmp_path / "logs/node-0.json").read_text()) == node.started[1]
    assert parts() == ["batch script", "staging", "waiting for nodes"]


def test_a_node_changes_to_its_environment_once(node, tmp_path, system, monkeypatch):
    began: list[tuple] = []

    def execv(*words: object) -> None:
        began.append(words)
        raise SystemExit(0)  # this process is gone

    system({"os.execv": execv})
    place = tmp_path / "local/environment-0123"
    (place / "bin").mkdir(parents=True)
    monkeypatch.setenv("DISK", str(tmp_path / "local"))
    assert node(stage="$DISK", environment="/shared/environment-0123.tar") == 0
    python = str(place / "bin/python")
    assert began == [(python, [python, "-m", "widemix.launch.slurm.node", *sys.argv[1:]])]
    assert os.environ[module.LOCAL_VARIABLE] == "environment-0123"
    assert parts() == ["batch script", "environment"]
    assert node(stage="", environment="/shared/environment-0123.tar") == 0
    assert len(began) == len(node.started) == 1


@pytest.mark.parametrize(
    ("preflight", "found", "nodes", "code"),
    [("report", "", "n1", 0), ("exclude", "", "n1", 0), ("exclude", "n3", "n1", 1), ("exclude", "n3", "n3", 0)],
)
def test_a_preflight_runs_the_doctor_on_all_ranks(
    node, tmp_path, programs, monkeypatch, system, digits, preflight, found, nodes, code
):
    """Training follows unless it named nodes that the job can do without."""
    write = f'[ -z "{found}" ] || echo {found} >{tmp_path}/logs/faulty-nodes; exit 1'
    programs(python=f'printf "%s\\n" "$WIDEMIX_RANK_STATUS_DIR" "$@" >{tmp_path}/asked; {write}',
             sinfo=f"echo {nodes}", scontrol="echo JobId=12005")  # fmt: skip
    system({"sys.executable": str(tmp_path / "bin/python")})
    monkeypatch.setenv("SLURM_JOB_PARTITION", "gpu")
    monkeypatch.setenv("WIDEMIX_RANK_STATUS_DIR", str(tmp_path / "status"))
    assert node(preflight=preflight) == code
    status, *words = (tmp_path / "asked").read_text().splitlines()
    assert (status, words[:2]) == ("", ["-m", "torch.distributed.run"])  # the doctor's ranks write no status
    parsed = parse_args(words[2:])
    assert (parsed.rdzv_id, parsed.max_restarts, parsed.nproc_per_node) == ("preflight-12005-0", 0, "2")
    doctor = ["doctor", "--cluster", "--data", str(digits)]
    doctor += ["--exclude", f"{tmp_path}/logs/faulty-nodes"] if preflight == "exclude" else []
    assert (parsed.training_script, parsed.training_script_args) == ("widemix", doctor)
    assert len(node.started) == (code == 0)
    assert ("preflight" in parts()) is (code == 0)


@pytest.mark.parametrize(
    ("options", "said", "kept"),
    [
        ({"stage": "$NONE/x"}, "--stage-to $NONE/x: is $NONE/x on this node; is the variable set there?", True),
        ({"logs": "/none"}, "n0: /none: does not exist on this node: all nodes must share --run-dir", False),
    ],
)
def test_why_a_node_cannot_train_is_kept(node, tmp_path, capsys, options, said, kept):
    assert node(**options) == 2
    assert capsys.readouterr().err == f"error: {said}\n"
    assert (tmp_path / "logs/node-0.started").exists() is kept
    assert [path.read_text() for path in (tmp_path / "logs").glob("*.error")] == [f"n0: {said}\n"] * kept
    assert not node.started


def test_a_path_of_data_is_no_yaml():
    """Of /data/set #2 ranks were told /data/set, the rest being a comment to YAML, and trained on that."""
    _, overrides = split_overrides(train_program(["recipe.yaml"], Path("/data/set #2: 'a'")))
    assert load_recipe(RECIPE, overrides).data.path == "/data/set #2: 'a'"


# torchrun's arguments, and how nodes meet.

PORTS = {"train": 20015, "preflight": 20016, "rendezvous": 20017}


@pytest.mark.parametrize(
    ("place", "addresses", "use", "attempt", "endpoint", "meeting", "host", "restarts", "local"),
    [
        ("0 of 3", ["127.0.0.1", "::1", "n3"], "train", None, "127.0.0.1:20015", "train-9-4", "1", 2, "::1"),
        ("2 of 3", ["127.0.0.1", "::1", "n3"], "train", None, "127.0.0.1:20015", "train-9-4", "0", 2, "127.0.0.1"),
        ("1 of 3", ["::1", "127.0.0.1", "n3"], "preflight", None, "[::1]:20016", "preflight-9-4", "0", 0, "::1"),
        ("0 of 1", ["127.0.0.1"], "train", None, "127.0.0.1:20015", "train-9-4", "1", 2, "127.0.0.1"),
        # Nodes of an elastic job meet in its store, and torchrun starts no rank again.
        ("0 of 3", ["127.0.0.1", "::1"], "train", (1, 2), "127.0.0.1:20017", "train-9-4-1", "0,join_timeout=120", 0,
         "::1"),
    ],
)  # fmt: skip
def test_torchrun_is_given_numbers_not_names(
    place, addresses, use, attempt, endpoint, meeting, host, restarts, local, tmp_path
):
    """The first node hosts the meeting; each use has its port and name, in each start of the job."""
    number, _, nodes = place.split()
    arguments = Namespace(addresses=addresses, ranks=4, restarts=2, logs=tmp_path, ports=PORTS)
    environ = {"SLURM_NODEID": number, "SLURM_JOB_ID": "9", "SLURM_STEP_NUM_NODES": nodes, "SLURM_RESTART_COUNT": "4"}
    parsed = parse_args(torchrun_command(arguments, ["widemix", "train", "r.yaml"], environ, use, attempt))
    assert (parsed.rdzv_endpoint, parsed.rdzv_id, parsed.rdzv_conf) == (endpoint, meeting, f"is_host={host}")
    assert parse_rendezvous_endpoint(endpoint, 1) == (addresses[0], int(endpoint.rpartition(":")[2]))
    assert (parsed.max_restarts, parsed.local_addr, parsed.nnodes) == (restarts, local, "2" if attempt else nodes)
    assert (parsed.nproc_per_node, parsed.rdzv_backend) == ("4", "c10d")
    assert (parsed.log_dir, parsed.tee, parsed.local_ranks_filter) == (str(tmp_path / f"node-{number}"), "3", "0")
    assert (parsed.training_script, parsed.training_script_args) == ("widemix", ["train", "r.yaml"])


def test_a_name_that_does_not_resolve_yet_is_asked_again(system, tmp_path):
    waits, answers, ask = [], [OSError(2, "not known")] * 3, socket.getaddrinfo

    def getaddrinfo(host: str, *words, **options):
        if host == "n1" and answers:
            raise answers.pop(0)
        return ask("127.0.0.1" if host == "n1" else host, *words, **options)

    system({"socket.getaddrinfo": getaddrinfo, "time.sleep": waits.append})
    arguments = Namespace(addresses=["n1", "127.0.0.1"], ranks=4, restarts=2, logs=tmp_path, ports=PORTS)
    assert parse_args(torchrun_command(arguments, ["x"], ALONE)).rdzv_endpoint == "127.0.0.1:20015"
    assert waits == [1, 3, 9]
    answers += [OSError(2, "not known")] * 4
    with pytest.raises(InputError, match=r"^n1: this node cannot resolve the first node's address \(not known\)$"):
        torchrun_command(arguments, ["x"], ALONE)
    arguments.addresses = ["127.0.0.1", "255.255.255.255"]  # to which no socket is allowed
    with pytest.raises(InputError, match=r"^node 0: no route to 255\.255\.255\.255$"):
        torchrun_command(arguments, ["x"], ALONE)


def test_nodes_wait_for_the_last_however_long_it_stages():
    arguments = Namespace(addresses=["127.0.0.1", "10.0.0.2"], ports=free_ports(40_000 + os.getpid()))
    places = [ALONE | {"SLURM_NODEID": str(node), "SLURM_STEP_NUM_NODES": "2"} for node in range(2)]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(wait_for_all_nodes, arguments, places[0])
        with pytest.raises(TimeoutError):
            first.result(0.5)
        last = pool.submit(wait_for_all_nodes, arguments, places[1])
        assert [future.result(300).get("all") for future in (first, last)] == [b"here"] * 2


@pytest.mark.parametrize("node", ["0", "1"])
def test_the_first_node_names_whom_all_wait_for(node, system, capsys):
    """Ever more rarely: after 60, 120, 240 and 480 s."""
    now, kept, arrivals = [0.0], {}, {"here 0": 0, "here 1": 100, "here 2": 500}
    store = Namespace(set=kept.__setitem__, wait=lambda keys: kept.update(waited=keys))
    store.check = lambda keys: node == "0" and now[0] >= arrivals[keys[0]]
    system({"time.monotonic": lambda: now[0], "time.sleep": lambda seconds: now.__setitem__(0, now[0] + seconds),
            "torch.distributed.TCPStore": lambda *_, **__: store})  # fmt: skip
    place = ALONE | {"SLURM_NODEID": node, "SLURM_STEP_NUM_NODES": "3"}
    arguments = Namespace(addresses=["127.0.0.1", "n1", "n2"], ports=PORTS)
    assert wait_for_all_nodes(arguments, place) is store
    assert kept == {f"here {node}": "", "waited": ["all"]} | ({"all": "here"} if node == "0" else {})
    told = [line.partition("wait for ")[2].partition(", which")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == (["n1, n2", "n2", "n2", "n2"] if node == "0" else [])


@pytest.mark.parametrize(
    ("node", "addresses", "stage", "token", "neighbour"),
    [
        (0, ["127.0.0.2", "127.0.0.3", "127.0.0.4"], "/disk", "secret", None),
        (1, ["127.0.0.2", "127.0.0.3", "127.0.0.4"], "/disk", "secret", "127.0.0.2"),
        (2, ["127.0.0.2", "127.0.0.3", "127.0.0.4"], "/disk", "secret", "127.0.0.3"),
        (1, ["127.0.0.1", "127.0.0.1"], "/disk", "secret", "no relay"),  # of one machine: it would ask itself
        (0, ["127.0.0.2", "127.0.0.3"], "/disk", "", "no relay"),
        (0, ["127.0.0.2", "127.0.0.3"], "", "secret", "no relay"),
        (0, ["127.0.0.2"], "/disk", "secret", "no relay"),
    ],
)
def test_blocks_are_handed_on_between_machines(node, addresses, stage, token, neighbour):
    arguments = Namespace(stage=stage, addresses=addresses, ports=PORTS)
    relay = make_relay(arguments, {"WIDEMIX_STAGE_TOKEN": token, "SLURM_NODEID": str(node)})
    found = (relay.neighbour and relay.neighbour.address) if isinstance(relay, Relay) else "no relay"
    assert found == neighbour


def test_blocks_are_handed_on_by_the_jobs_token(tmp_path):
    """At the port that torchrun does not need yet."""
    arguments = Namespace(stage="/disk", addresses=["127.0.0.2", "127.0.0.3"], ports=PORTS | {"train": free_port()})
    first, second = (
        make_relay(arguments, {"WIDEMIX_STAGE_TOKEN": "secret", "SLURM_NODEID": node}) for node in ("0", "1")
    )
    (tmp_path / "a").write_bytes(b"012")
    with first, (tmp_path / "a").open("rb") as file:
        first.add_file("a", file.fileno())
        first.add_blocks("a", range(1))
        assert second.neighbour.read("a", 0, 3) == b"012"
        second.neighbour.close()


@pytest.mark.parametrize(
    ("node", "nodes", "excluded", "array", "without"),
    [
        ("0", "2", "n[0-1]", {}, True),  # n2 and n4 are left
        ("0", "3", "n[0-1]", {}, False),
        ("1", "3", "n[0-1]", {}, False),
        ("0", "4", "(null)", {}, True),
        ("0", "5", "(null)", {}, False),
        ("0", "4", "(null)", {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2"}, False),
        ("0", "3", "(null)", {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2"}, True),
    ],
)
def test_a_faulty_node_is_kept_without_enough_others(node, nodes, excluded, array, without, programs, capsys):
    """Of n0 to n4 n3 is faulty; a run of an array is asked for by the array's number and its own."""
    states = "idle,mixed,allocated,completing"  # as this job's own nodes
    programs(
        sinfo=rf"""[ "$*" = "--noheader --Node --format=%N --states={states} --partition=gpu" ] &&
            printf 'n%s\n' 0 0 1 1 2 3 3 4""",
        scontrol=rf"""case "$*" in
            "show job --oneliner 7") echo "JobId=7 NodeList=n[2-4] ExcNodeList={excluded} Comment=ExcNodeList=n4" ;;
            "show job --oneliner 6_2") echo "JobId=7 ExcNodeList=n4" ;;
            "show hostnames n[0-1]") printf 'n0\nn1\n' ;;
            "show hostnames n4") echo n4 ;;
            *) exit 1 ;;
        esac""",
    )
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "gpu", "SLURM_NODEID": node, "SLURM_STEP_NUM_NODES": nodes}
    assert can_exclude(["n3"], job | array) is without
    kept = "n3: faulty, but kept: the partition has too few other nodes\n"
    assert capsys.readouterr().out == (kept if node == "0" and not without else "")


def test_a_faulty_node_is_excluded_where_slurm_does_not_answer(programs, monkeypatch, tmp_path):
    job = ALONE | {"SLURM_JOB_PARTITION": "gpu"}
    assert not can_exclude([], {})
    programs(sinfo="exit 1", scontrol="exit 1")
    assert can_exclude(["n3"], job)
    monkeypatch.setenv("PATH", str(tmp_path / "container"))  # without Slurm's commands
    assert can_exclude(["n3"], job)


# Ports of a job.


def test_a_port_in_use_is_passed_over(run_main, capsys):
    job = 50_000 + os.getpid()
    own = free_ports(job)
    assert run_main(local, job) == 0
    assert capsys.readouterr().out == "{train},{preflight},{rendezvous}\n".format(**own)
    with socket.create_server(("127.0.0.1", own["train"])):
        others = free_ports(job)
    assert others.pop("train") not in own.values()
    assert own == others | {"train": own["train"]} == free_ports(job)


def test_a_port_is_free_once_its_server_has_ended():
    """Though the kernel still waits for what may come on its connections, as after a job that was requeued."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)) as client:
        assert not is_free(port)
        connection, _ = server.accept()
        connection.close()  # the one that closes first waits
        assert client.recv(1) == b""
    assert is_free(port)
    try:
        server = socket.create_server(("::1", port), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        assert not is_free(port)
    assert is_free(port)


def test_uses_of_a_job_never_share_a_port(system):
    """Each goes on in steps of its own; after the last port comes the first."""
    busy = {31_999, 31_998, 31_997, 20_000, 20_002}

    class Probe(socket.socket):
        def bind(self, place: tuple) -> None:
            if place[1] in busy:
                raise OSError(98, "Address already in use")

    system({"socket.socket": Probe})
    job = next(job for job in range(12_000) if job_port(job, "rendezvous") == 31_999)
    assert free_ports(job) == {"train": 20_003, "preflight": 20_001, "rendezvous": 20_005}
    busy.update(range(20_000, 32_000))
    with pytest.raises(RunError, match=r"^this node has no free port from 20000 to 31999$"):
        free_ports(1)
