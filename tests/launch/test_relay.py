"""Staging from node to node: one reader, blocks handed on as they come, and what happens when a node fails."""

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from tests.forks import free_port
from tests.launch.test_stage import contents, folder, prepared
from widemix.formats import chunks
from widemix.launch import stage as staging
from widemix.launch.relay import Neighbour, Relay, Waits
from widemix.launch.stage import Folder, stage

assert prepared
assert folder  # the digits in blocks of 4 KiB
TOKEN = "secret"
HOME = "127.0.0.1"


@pytest.fixture
def ports():
    """Four free ports."""
    return [free_port() for _ in range(4)]


@pytest.fixture
def sources(monkeypatch):
    """(kind of source, block) of each block that is transferred."""
    transferred, transfer = [], staging._transfer

    def counted(source, descriptor, block, split):
        transferred.append((type(source), block))
        return transfer(source, descriptor, block, split)

    monkeypatch.setattr(staging, "_transfer", counted)
    return transferred


def blocks_of(folder, tmp_path, sources) -> int:
    """How many blocks a copy transfers: all but those of zeros."""
    stage(folder, tmp_path / "plain")
    count = len(sources)
    sources.clear()
    return count


def test_a_chain_of_nodes_reads_the_source_once(tmp_path, folder, ports, sources):
    count = blocks_of(folder, tmp_path, sources)
    with ExitStack() as stack:
        neighbours = [None, *(Neighbour(HOME, port, TOKEN) for port in ports[:3])]
        relays = [stack.enter_context(Relay(*each, TOKEN)) for each in zip(neighbours, ports, strict=True)]
        pool = stack.enter_context(ThreadPoolExecutor())
        copies = list(pool.map(lambda n: stage(folder, tmp_path / f"n{n}", relays[n]), range(4)))
    assert all(contents(copy) == contents(folder) for copy in copies)
    kinds = [kind for kind, _ in sources]
    assert kinds.count(Folder) == count
    assert kinds.count(Neighbour) == 3 * count


def test_a_block_is_handed_on_before_the_next_is_read(tmp_path, folder, ports, monkeypatch):
    """A chain costs a block per node, not a copy per node."""
    received, read = threading.Event(), Folder.read

    def waits(source, name, begin=0, end=None):
        if name == "train.beton" and begin >= 20 * 4096:
            assert received.wait(300)
        return read(source, name, begin, end)

    class Noting(Neighbour):
        def read(self, name, begin, end):
            data = super().read(name, begin, end)
            if (name, begin) == ("train.beton", 10 * 4096):
                received.set()
            return data

    monkeypatch.setattr(Folder, "read", waits)
    with Relay(None, ports[0], TOKEN) as first, ThreadPoolExecutor() as pool:
        copies = [pool.submit(stage, folder, tmp_path / "n0", first)]
        with Relay(Noting(HOME, ports[0], TOKEN), ports[1], TOKEN) as second:
            copies.append(pool.submit(stage, folder, tmp_path / "n1", second))
            assert [contents(copy.result(300)) for copy in copies] == [contents(folder)] * 2


def test_what_a_lost_neighbour_has_not_sent_the_source_has(tmp_path, folder, ports, sources, capsys):
    total = blocks_of(folder, tmp_path, sources)
    stage(folder, tmp_path / "n0")
    sources.clear()
    with ExitStack() as lost:
        first = lost.enter_context(Relay(None, ports[0], TOKEN))
        stage(folder, tmp_path / "n0", first)
        neighbour, count = Neighbour(HOME, ports[0], TOKEN), 0

        def dies(name, begin, end):
            nonlocal count
            count += 1
            if count == 50:
                lost.close()
            if count >= 50:
                raise ConnectionResetError(104, "Connection reset by peer")
            return Neighbour.read(neighbour, name, begin, end)

        neighbour.read = dies
        with Relay(neighbour, ports[1], TOKEN) as second:
            copy = stage(folder, tmp_path / "n1", second)
    assert contents(copy) == contents(folder)
    assert [kind for kind, _ in sources].count(Folder) >= total - 50
    said = capsys.readouterr().err
    assert f"{HOME}: Connection reset by peer; what is missing is read from {folder}\n" in said
    assert said.count("what is missing") <= staging.RELAY_THREADS  # it is not asked again
    assert count < 50 + staging.RELAY_THREADS


def test_damaged_blocks_of_a_neighbour_are_not_taken(tmp_path, folder, ports, capsys):
    """Of a copy that was there, which it serves too."""
    copy = stage(folder, tmp_path / "n0")
    with Relay(None, ports[0], TOKEN) as first:
        stage(folder, tmp_path / "n0", first)
        with (copy / "test.beton").open("r+b") as file:  # its disk fails after the check
            os.pwrite(file.fileno(), b"x", 7 * 4096)
        with Relay(Neighbour(HOME, ports[0], TOKEN), ports[1], TOKEN) as second:
            assert contents(stage(folder, tmp_path / "n1", second)) == contents(folder)
    assert not any(Path(file.path).is_relative_to(tmp_path) for file in psutil.Process().open_files())
    said = capsys.readouterr().err
    assert f"copying from {HOME}, and from {folder}\n" in said
    assert f"{HOME}: its block 7 of test.beton is damaged; what is missing" in said


def prove(port: int, token: str = TOKEN, host: str = HOME) -> tuple[HTTPConnection, str]:
    """A connection to a relay, and what proves to it that this side knows the token: written once more."""
    connection = HTTPConnection(host, port, timeout=60)
    connection.request("GET", "/", headers={"Challenge": "mine"})
    answer = connection.getresponse()
    answer.read()
    texts = [f"{side}\nmine\n{answer.headers['Challenge']}\n{host}\n{port}" for side in ("server", "client")]
    server, client = (hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest() for text in texts)
    assert (answer.headers["Proof"] == server) is (token == TOKEN)
    return connection, client


@contextmanager
def served(port: int, path: Path, size: int, **waits: float):
    """A relay that serves a block of a file as `a`."""
    path.write_bytes(bytes(size))
    with Relay(None, port, TOKEN, Waits(**waits)) as relay, path.open("rb") as file:
        relay.add_file("a", file.fileno())
        relay.add_blocks("a", range(1))
        yield relay


def test_only_those_who_know_the_token_are_served(tmp_path, folder, ports, capsys):
    with Relay(None, ports[0], TOKEN) as first:
        stage(folder, tmp_path / "n0", first)
        with Relay(Neighbour(HOME, ports[0], "guess"), ports[1], TOKEN) as second:
            assert contents(stage(folder, tmp_path / "n1", second)) == contents(folder)
    said = f"{HOME}: port {ports[0]} is another program's, which does not know this job's token; what is missing"
    assert said in capsys.readouterr().err


ENDLESS = {
    "a body": [b"HTTP/1.1 206 Partial\r\nChallenge: x\r\n\r\n", bytes(1 << 20)],
    "headers": [b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"],
    "a header": [b"HTTP/1.1 200 OK\r\nA: ", b"b" * 1000],
    "answers before the answer": [b"", b"HTTP/1.1 100 Continue\r\n\r\n"],
    "a byte now and then": [b"HTTP/1.1 200 ", b"O"],
    "not yet": [b"", b"HTTP/1.1 503 Wait\r\nContent-Length: 0\r\n\r\n"],
    "what is no HTTP": [b"", b"\n" * 1000],
}


@pytest.mark.parametrize(("begin", "again"), ENDLESS.values(), ids=ENDLESS)
def test_who_has_the_port_first_learns_no_token(tmp_path, folder, ports, capsys, begin, again):
    """Its endless answer once filled the memory."""
    heard: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            heard.append(connection.recv(1 << 16))
            connection.sendall(begin)
            while True:
                connection.sendall(again)
                time.sleep(0.05 if len(again) == 1 else 0)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=[server.accept()[0]], daemon=True).start()

    with socket.create_server((HOME, ports[0])) as server:
        threading.Thread(target=accept, daemon=True).start()
        with Relay(Neighbour(HOME, ports[0], TOKEN, Waits(timeout=2.0)), ports[1], TOKEN) as relay:
            assert contents(stage(folder, tmp_path / "n1", relay)) == contents(folder)
        server.shutdown(socket.SHUT_RDWR)
    assert f"{HOME}: " in (said := capsys.readouterr().err)
    assert f"what is missing is read from {folder}\n" in said
    assert heard
    assert TOKEN.encode() not in b"".join(heard)


def test_a_proof_passed_on_to_another_node_is_none(ports, tmp_path):
    """Else who has the port of one node could read the data from the next one's."""

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    with served(ports[0], tmp_path / "a", 3), socket.create_server((HOME, ports[1])) as between:
        neighbour = Neighbour(HOME, ports[1], TOKEN)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(neighbour.read, "a", 0, 3)
            with between.accept()[0] as client, socket.create_connection((HOME, ports[0])) as server:
                pool.submit(pass_on, client, server)
                pool.submit(pass_on, server, client)
                with pytest.raises(OSError, match="is another program's"):
                    asked.result(300)
                for one in (client, server):
                    one.shutdown(socket.SHUT_RDWR)


def test_connections_on_which_nothing_is_proven_are_few(ports, tmp_path):
    with served(ports[0], tmp_path / "a", 3), ExitStack() as stack:
        before = threading.active_count()
        idle = [stack.enter_context(socket.create_connection((HOME, ports[0]), timeout=300)) for _ in range(100)]
        assert [one.recv(1) for one in idle[:68]] == [b""] * 68
        assert threading.active_count() - before <= 40
        neighbour = Neighbour(HOME, ports[0], TOKEN)
        assert neighbour.read("a", 0, 3) == bytes(3)
        more = [stack.enter_context(socket.create_connection((HOME, ports[0]), timeout=300)) for _ in range(100)]
        assert more[0].recv(1) == b""
        assert neighbour.read("a", 1, 3) == bytes(2)  # on the connection that it has
        neighbour.close()


def test_a_connection_on_which_nothing_comes_is_closed(ports, tmp_path):
    with (
        served(ports[0], tmp_path / "a", 3, proof=0.2),
        socket.create_connection((HOME, ports[0]), timeout=300) as idle,
    ):
        assert idle.recv(1) == b""
        connection, proof = prove(ports[0])
        connection.request("GET", "/a", headers={"Proof": proof, "Range": "bytes=0-2"})
        assert connection.getresponse().read() == bytes(3)
        time.sleep(0.5)
        connection.request("GET", "/a", headers={"Proof": proof, "Range": "bytes=0-1"})
        assert connection.getresponse().read() == bytes(2)
        connection.close()


def test_a_neighbour_without_a_server_costs_a_moment(tmp_path, folder, ports, capsys):
    with socket.create_server(("", ports[0])), Relay(None, ports[0], TOKEN):
        assert f"port {ports[0]}: no blocks are handed on (Address already in use)" in capsys.readouterr().err
    with Relay(Neighbour(HOME, ports[0], TOKEN, Waits(begin=0.5)), ports[1], TOKEN) as second:
        assert contents(stage(folder, tmp_path / "n1", second)) == contents(folder)
    assert "Connection refused; what is missing is read from" in capsys.readouterr().err


def test_a_block_that_comes_late_is_asked_for_again(ports, tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    first = Relay(None, ports[0], TOKEN, Waits(answer=0.1))
    with first, (tmp_path / "file").open("rb") as file, ThreadPoolExecutor() as pool:
        first.add_file("a file", file.fileno())
        neighbour = Neighbour(HOME, ports[0], TOKEN)
        late = pool.submit(neighbour.read, "a file", 2, 5)
        with pytest.raises(TimeoutError):
            late.result(0.5)
        first.add_blocks("a file", range(1))
        assert late.result(300) == b"234"
        neighbour.close()
        if socket.has_dualstack_ipv6():
            neighbour = Neighbour("::1", ports[0], TOKEN)
            assert neighbour.read("a file", 0, 2) == b"01"
            neighbour.close()


def test_a_reader_that_dies_is_no_error_of_the_server(ports, tmp_path, capsys):
    """Its broken pipe once filled the log with a traceback, above the reason why the job ended."""
    with served(ports[0], tmp_path / "a", 16 << 20):
        before = threading.active_count()
        connection, proof = prove(ports[0])
        connection.request("GET", "/a", headers={"Proof": proof, "Range": f"bytes=0-{(16 << 20) - 1}"})
        with connection.sock as dies:
            assert dies.recv(100)
            dies.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        deadline = time.monotonic() + 300
        while threading.active_count() > before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert capsys.readouterr().err == ""


def test_a_neighbour_is_waited_for_until_it_listens(ports, system, tmp_path):
    """For a minute; once it has answered it is not waited for again."""
    now = [100.0]

    def sleep(seconds):
        now[0] += seconds

    system({"time.monotonic": lambda: now[0], "time.sleep": sleep})
    never = Neighbour(HOME, ports[1], TOKEN)
    with pytest.raises(ConnectionRefusedError):
        never.read("a", 0, 3)
    assert 60 < now[0] - 100 < 61
    (tmp_path / "file").write_bytes(b"0123456789")
    neighbour, began = Neighbour(HOME, ports[0], TOKEN), now[0]
    with Relay(None, ports[0], TOKEN) as relay, (tmp_path / "file").open("rb") as file:
        relay.add_file("a", file.fileno())
        relay.add_blocks("a", range(1))
        assert neighbour.read("a", 0, 3) == b"012"
        neighbour.close()
    with pytest.raises(ConnectionRefusedError):
        neighbour.read("a", 3, 5)
    assert now[0] == began


def test_only_checked_blocks_are_served_by_their_files_name(ports, tmp_path):
    names, size = ("a b.beton", "c%20d.beton"), chunks.CHUNK
    with Relay(None, ports[0], TOKEN, Waits(answer=0.05)) as relay:
        for number, name in enumerate(names):
            (tmp_path / name).write_bytes(bytes([65 + number]) * (2 * size))
            with (tmp_path / name).open("rb") as file:
                relay.add_file(name, file.fileno())
        relay.add_blocks(names[0], range(1, 2))
        relay.add_blocks(names[1], range(1))
        with (tmp_path / names[1]).open("rb") as file:
            relay.add_file(names[0], file.fileno())  # which it has, with blocks
        neighbour = Neighbour(HOME, ports[0], TOKEN, Waits(timeout=5))
        assert neighbour.read(names[0], size, 2 * size) == b"A" * size  # its first and last byte too
        assert neighbour.read(names[1], 0, size) == b"B" * size
        for name, begin, end in (
            *((names[0], size - 1, size), (names[1], size, size + 1)),
            ("e.beton", 0, 1),
        ):
            connection, proof = prove(ports[0])
            headers = {"Proof": proof, "Range": f"bytes={begin}-{end - 1}"}
            connection.request("GET", f"/{quote(name)}", headers=headers)
            assert connection.getresponse().status == 503
            connection.close()
        relay.add_blocks(names[0], range(2, 3))
        with pytest.raises(OSError, match="answers with 206"):  # beyond the end of the file
            neighbour.read(names[0], 2 * size, 2 * size + 5)
        neighbour.close()


@pytest.mark.parametrize(
    ("token", "path", "headers", "status"),
    [
        (TOKEN, "/a", {"Range": "bytes=0-2"}, 206),
        (TOKEN, "/b", {"Range": "bytes=0-2"}, 503),
        *(
            (TOKEN, "/a", {"Range": text}, 404)
            for text in (
                "",
                "bytes=0-2,4-6",
                "bytes=0-",
                "bytes=-3",
                "=0-2",
                "bytes=0-\u0663",
                f"bytes=0-{'9' * 5000}",
            )
        ),
        (TOKEN, "/a", {}, 404),
        (TOKEN, "/", {"Challenge": "another"}, 404),
        (TOKEN, "/a", {"Range": "bytes=0-2", "Proof": ""}, 404),
        (TOKEN, "/a", {"Range": "bytes=0-2", "Proof": "\u00e9"}, 404),
        ("secrets", "/a", {"Range": "bytes=0-2"}, 404),
        ("", f"/{TOKEN}/a", {"Range": "bytes=0-2"}, 404),
    ],
)
def test_what_is_no_request_of_a_neighbour_is_not_found(ports, tmp_path, capsys, token, path, headers, status):
    with served(ports[0], tmp_path / "a", 3, answer=0.05):
        connection, proof = prove(ports[0], token)
        sent = {name: value.encode() for name, value in ({"Proof": proof} | headers).items()}
        connection.request("GET", path, headers=sent)
        assert connection.getresponse().status == status
        connection.close()
    assert capsys.readouterr().err == ""
