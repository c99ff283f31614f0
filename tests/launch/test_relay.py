"""Staging from node to node: one reader, blocks handed on as they come, and what happens when a node fails."""

import os
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.forks import free_port
from tests.launch.test_stage import contents, folder
from widemix.launch import relay as module
from widemix.launch import stage as staging
from widemix.launch.relay import Neighbour, Relay
from widemix.launch.stage import Folder, stage

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
    blocks = blocks_of(folder, tmp_path, sources)
    with ExitStack() as stack:
        neighbours = [None, *(Neighbour(HOME, port, TOKEN) for port in ports[:3])]
        relays = [stack.enter_context(Relay(*each, TOKEN)) for each in zip(neighbours, ports, strict=True)]
        pool = stack.enter_context(ThreadPoolExecutor())
        copies = list(pool.map(lambda n: stage(folder, tmp_path / f"n{n}", relays[n]), range(4)))
    assert all(contents(copy) == contents(folder) for copy in copies)
    kinds = [kind for kind, _ in sources]
    assert kinds.count(Folder) == blocks
    assert kinds.count(Neighbour) == 3 * blocks


def test_a_block_is_handed_on_before_the_next_one_is_read(tmp_path, folder, ports, monkeypatch):
    """A chain costs a block per node, not a copy per node."""
    received, read = threading.Event(), Folder.read

    def waits(source, name, begin=0, end=None):
        if name == "train.beton" and begin >= 20 * 4096:
            assert received.wait(300)
        return read(source, name, begin, end)

    handed, request = [], Neighbour.read

    def notes(neighbour, name, begin, end):
        data = request(neighbour, name, begin, end)
        handed.append((name, begin))
        if ("train.beton", 10 * 4096) in handed:
            received.set()
        return data

    monkeypatch.setattr(Folder, "read", waits)
    monkeypatch.setattr(Neighbour, "read", notes)
    with Relay(None, ports[0], TOKEN) as first, ThreadPoolExecutor() as pool:
        copies = [pool.submit(stage, folder, tmp_path / "n0", first)]
        with Relay(Neighbour(HOME, ports[0], TOKEN), ports[1], TOKEN) as second:
            copies.append(pool.submit(stage, folder, tmp_path / "n1", second))
            assert [contents(copy.result(300)) for copy in copies] == [contents(folder)] * 2


def test_a_copy_that_was_there_is_served(tmp_path, folder, ports, sources):
    stage(folder, tmp_path / "n0")
    sources.clear()
    with Relay(None, ports[0], TOKEN) as first:
        stage(folder, tmp_path / "n0", first)
        with Relay(Neighbour(HOME, ports[0], TOKEN), ports[1], TOKEN) as second:
            copy = stage(folder, tmp_path / "n1", second)
    assert contents(copy) == contents(folder)
    assert {kind for kind, _ in sources} == {Neighbour}
    assert not any(Path(file.path).is_relative_to(tmp_path) for file in psutil.Process().open_files())


def test_what_a_neighbour_that_fails_has_not_sent_is_read_from_the_source(tmp_path, folder, ports, sources, capsys):
    blocks = blocks_of(folder, tmp_path, sources)
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
    assert [kind for kind, _ in sources].count(Folder) >= blocks - 50
    assert f"{HOME}: Connection reset by peer; what is missing is read from {folder}\n" in capsys.readouterr().err


def test_damaged_blocks_of_a_neighbour_are_not_taken(tmp_path, folder, ports, capsys):
    copy = stage(folder, tmp_path / "n0")
    with Relay(None, ports[0], TOKEN) as first:
        stage(folder, tmp_path / "n0", first)
        with (copy / "test.beton").open("r+b") as file:  # its disk fails after the check
            os.pwrite(file.fileno(), b"x", 7 * 4096)
        with Relay(Neighbour(HOME, ports[0], TOKEN), ports[1], TOKEN) as second:
            assert contents(stage(folder, tmp_path / "n1", second)) == contents(folder)
    assert f"{HOME}: its block 7 of test.beton is damaged; what is missing" in capsys.readouterr().err


def test_only_those_who_know_the_token_are_served(tmp_path, folder, ports, capsys):
    with Relay(None, ports[0], TOKEN) as first:
        stage(folder, tmp_path / "n0", first)
        with Relay(Neighbour(HOME, ports[0], "guess"), ports[1], TOKEN) as second:
            assert contents(stage(folder, tmp_path / "n1", second)) == contents(folder)
    assert f"{HOME}: answers with 404" in capsys.readouterr().err


def test_a_neighbour_without_a_server_costs_a_moment(tmp_path, folder, ports, monkeypatch, capsys):
    monkeypatch.setattr(module, "BEGIN_S", 0.5)
    with socket.create_server(("", ports[0])), Relay(None, ports[0], TOKEN):
        assert f"port {ports[0]}: no blocks are handed on (Address already in use)" in capsys.readouterr().err
    with Relay(Neighbour(HOME, ports[0], TOKEN), ports[1], TOKEN) as second:
        assert contents(stage(folder, tmp_path / "n1", second)) == contents(folder)
    assert "Connection refused; what is missing is read from" in capsys.readouterr().err


def test_a_block_that_comes_late_is_asked_for_again(ports, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_ANSWER_S", 0.1)
    (tmp_path / "file").write_bytes(b"0123456789")
    with Relay(None, ports[0], TOKEN) as first, (tmp_path / "file").open("rb") as file, ThreadPoolExecutor() as pool:
        first.add_file("a file", file.fileno())
        neighbour = Neighbour(HOME, ports[0], TOKEN)
        late = pool.submit(neighbour.read, "a file", 2, 5)
        with pytest.raises(TimeoutError):
            late.result(0.5)
        first.add_blocks("a file", range(1))
        assert late.result(300) == b"234"
        neighbour.close()


def test_a_node_that_dies_while_it_reads_is_no_error_of_the_one_before(ports, monkeypatch, tmp_path, capsys):
    """Its broken pipe once filled the log with a traceback, above the reason why the job ended."""
    ended, shutdown = threading.Event(), module._Server.shutdown_request
    monkeypatch.setattr(module._Server, "shutdown_request", lambda *each: (shutdown(*each), ended.set()))
    (tmp_path / "file").write_bytes(bytes(16 << 20))
    with Relay(None, ports[0], TOKEN) as first, (tmp_path / "file").open("rb") as file:
        first.add_file("a", file.fileno())
        first.add_blocks("a", range(1))
        with socket.create_connection((HOME, ports[0])) as dies:
            dies.sendall(f"GET /{TOKEN}/a HTTP/1.1\r\nRange: bytes=0-{(16 << 20) - 1}\r\n\r\n".encode())
            assert dies.recv(100)
            dies.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert ended.wait(300)
    assert capsys.readouterr().err == ""
