"""Staging from node to node: each node reads from the one before it, and only the first from the shared file system.

A node serves a block over HTTP as soon as it has checked it, so that all nodes of the chain receive at the same time:
one copy takes as long as one reader, plus a block per node. A node whose neighbour fails reads from the shared
file system, as it does without a neighbour.

Others may reach the port, or have taken it first. At the begin of a connection each side proves to the other that it
knows the job's token, by an HMAC of both sides' challenges and the server's address; the token itself is not sent.
What is sent is not encrypted.
"""

import hmac
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

from widemix.formats import chunks
from widemix.progress_line import print_status

_MOST_UNPROVEN = 32  # connections of such clients; the oldest is closed
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")


@dataclass(frozen=True)
class Waits:
    """How long nodes wait for each other, in seconds."""

    begin: float = 60.0  # for the neighbour to begin
    answer: float = 10.0  # in which a server says that it does not have a block yet
    timeout: float = 60.0  # for an answer to be there whole
    proof: float = 10.0  # for a client to prove that it knows the token


def _proof(token: str, side: str, challenges: tuple[str, str], server: tuple) -> str:
    """Return what proves that one side, `client` or `server`, knows the token; `server` is the server's address."""
    address = str(server[0]).partition("%")[0].removeprefix("::ffff:")
    text = "\n".join((side, *challenges, address, str(server[1])))
    return hmac.digest(token.encode(), text.encode(), "sha256").hex()


def _is(given: str | None, expected: str) -> bool:
    return hmac.compare_digest((given or "").encode(), expected.encode())


class Neighbour:
    """The node that this one reads blocks from."""

    def __init__(self, address: str, port: int, token: str, waits: Waits = Waits()):
        self.address, self.lost = address, False
        self._port, self._token, self._timeout = port, token, waits.timeout
        self._deadline = time.monotonic() + waits.begin
        self._own = threading.local()  # a connection of each thread
        self._connections: list[HTTPConnection] = []

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end` of a file, once the neighbour has their block. Raises OSError."""
        while True:
            try:
                data = self._request(name, begin, end)
            except ConnectionRefusedError:
                if time.monotonic() > self._deadline:
                    raise
                time.sleep(0.2)
                continue
            except HTTPException as error:
                raise OSError(f"no answer in HTTP ({error!r})") from None
            self._deadline = 0.0
            if data is not None:
                return data

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()

    def _request(self, name: str, begin: int, end: int) -> bytes | None:
        """Return the bytes; None if the neighbour does not have them yet."""
        if not hasattr(self._own, "connection") or self._own.connection.sock is None:
            self._own.connection, self._own.proof = self._connect()
            self._connections.append(self._own.connection)
        connection = self._own.connection
        try:
            with _in_time(connection, self._timeout):
                headers = {"Range": f"bytes={begin}-{end - 1}", "Proof": self._own.proof}
                connection.request("GET", f"/{quote(name)}", headers=headers)
                response = connection.getresponse()
                if response.status == 503:
                    connection.close()
                    return None
                data = response.read(end - begin)
        except (OSError, HTTPException):
            connection.close()
            raise
        if response.status != 206 or len(data) != end - begin or not response.isclosed():
            connection.close()
            raise OSError(f"answers with {response.status}")
        return data

    def _connect(self) -> tuple[HTTPConnection, str]:
        """Return a connection to a server that knows the token, and the proof that this node does. Raises OSError."""
        connection, challenge = HTTPConnection(self.address, self._port, timeout=self._timeout), secrets.token_hex(16)
        connection.connect()
        server = connection.sock.getpeername()
        connection.auto_open = 0  # a new connection begins with new challenges
        try:
            with _in_time(connection, self._timeout):
                connection.request("GET", "/", headers={"Challenge": challenge})
                response = connection.getresponse()
                response.read(1)
            challenges = (challenge, response.getheader("Challenge", ""))
            if not _is(response.getheader("Proof"), _proof(self._token, "server", challenges, server)):
                raise OSError(f"port {self._port} is another program's, which does not know this job's token")
        except BaseException:
            connection.close()
            raise
        return connection, _proof(self._token, "client", challenges, server)


@contextmanager
def _in_time(connection: HTTPConnection, seconds: float) -> Iterator[None]:
    """Cut a connection off unless the block ends in time: one that sends a byte now and then never times out."""

    def cut_off(sock: socket.socket = connection.sock) -> None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut_off)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Relay:
    """Serves the blocks of the copy that this node makes; use it in a `with` block.

    neighbour: the node to read from, None on the first one. port: of the server, on all addresses; if it is in use,
    the next node reads from the shared file system. token: what nodes of the job alone know.
    """

    def __init__(self, neighbour: Neighbour | None, port: int, token: str, waits: Waits = Waits()):
        self.neighbour, self.token, self.waits = neighbour, token, waits
        self._port = port
        self._files: dict[str, tuple[int, set[int]]] = {}  # descriptor, numbers of the blocks that are checked
        self._arrived = threading.Condition()
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> "Relay":
        try:
            self._server = _Server(self, self._port)
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        except OSError as error:
            print_status(f"port {self._port}: no blocks are handed on ({error.strerror})")
        return self

    def __exit__(self, *_) -> None:
        if self.neighbour:
            self.neighbour.close()
        if self._server:
            self._server.shutdown()
            self._server.server_close()
        for descriptor, _blocks in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def add_file(self, name: str, descriptor: int) -> None:
        """Serve a file of the copy, of which no block is there yet; keeps a duplicate of the descriptor."""
        with self._arrived:
            if name not in self._files:
                self._files[name] = (os.dup(descriptor), set())

    def add_blocks(self, name: str, numbers: range) -> None:
        """Serve these blocks of a file, which have been checked."""
        with self._arrived:
            self._files[name][1].update(numbers)
            self._arrived.notify_all()

    def wait_for(self, name: str, block: int) -> int | None:
        """Return a descriptor of the file when its block is there; None if it does not come soon."""

        def there() -> bool:
            return name in self._files and block in self._files[name][1]

        with self._arrived:
            return self._files[name][0] if self._arrived.wait_for(there, self.waits.answer) else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # the default of 5 is soon full, and a client then waits for seconds

    def __init__(self, relay: Relay, port: int):
        self.relay = relay
        self.unproven: OrderedDict[socket.socket, None] = OrderedDict()  # connections, the oldest first
        self.address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        super().__init__(("", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own; of too many that nobody proves anything on, close the oldest connection."""
        self.unproven[request] = None
        if len(self.unproven) > _MOST_UNPROVEN:
            with suppress(OSError, KeyError):  # it has ended since
                self.unproven.popitem(last=False)[0].shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that ends."""
        self.unproven.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of a node that has died, or was cut off, while it read; what it was is in its own log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a small piece waits for the receipt of its header, up to 40 ms
    server: _Server
    _expected = ""  # what proves that the client knows the token; nothing before the challenges

    def setup(self) -> None:
        """As its base does, with a time limit until the client has proven that it knows the token."""
        super().setup()
        self.connection.settimeout(self.server.relay.waits.proof)

    def do_GET(self) -> None:
        """Answer a challenge; or send a range of a file that lies in one block, to a client that knows the token."""
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if self.path == "/" and "Challenge" in self.headers and not self._expected:
            self._prove()
        elif match and self._expected and _is(self.headers.get("Proof"), self._expected):
            self.server.unproven.pop(self.connection, None)
            self.connection.settimeout(None)
            self._send(unquote(self.path.removeprefix("/")), int(match[1]), int(match[2]) + 1)
        else:
            self.send_error(404)

    def _prove(self) -> None:
        token, server = self.server.relay.token, self.connection.getsockname()
        challenges = (self.headers["Challenge"], secrets.token_hex(16))
        self._expected = _proof(token, "client", challenges, server)
        self.send_response(200)
        self.send_header("Challenge", challenges[1])
        self.send_header("Proof", _proof(token, "server", challenges, server))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, name: str, begin: int, end: int) -> None:
        descriptor = self.server.relay.wait_for(name, begin // chunks.CHUNK)
        if descriptor is None:
            self.send_error(503)
            return
        self.send_response(206)
        self.send_header("Content-Length", str(max(end - begin, 0)))
        self.end_headers()
        self.wfile.flush()
        while begin < end:
            sent = os.sendfile(self.connection.fileno(), descriptor, begin, end - begin)
            if not sent:  # beyond the end of the file
                self.close_connection = True
                return
            begin += sent

    def log_message(self, *_) -> None:
        """Print nothing."""
