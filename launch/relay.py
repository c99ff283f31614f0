"""Staging from node to node: each node reads from the one before it, and only the first from the shared file system.

A node serves a block over HTTP as soon as it has checked it, so that all nodes of the chain receive at the same time:
one copy takes as long as one reader, plus a block per node. A node whose neighbour fails reads from the shared
file system, as it does without a neighbour.
"""

import hmac
import os
import re
import socket
import sys
import threading
import time
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

from widemix.formats import blocks
from widemix.tally import print_status

BEGIN_S = 60.0  # for the neighbour to begin
_ANSWER_S = 10.0  # in which a server says that it does not have a block yet
_TIMEOUT_S = 60.0  # of a connection on which nothing comes


class Neighbour:
    """The node that this one reads blocks from."""

    def __init__(self, address: str, port: int, token: str):
        self.address, self.lost = address, False
        self._port, self._token = port, token
        self._deadline = time.monotonic() + BEGIN_S
        self._own = threading.local()  # a connection of each thread
        self._connections: list[HTTPConnection] = []

    def read(self, name: str, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end` of a file, once the neighbour has their block. Raises OSError."""
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
        """The bytes; None if the neighbour does not have them yet."""
        if not hasattr(self._own, "connection"):
            self._own.connection = HTTPConnection(self.address, self._port, timeout=_TIMEOUT_S)
            self._connections.append(self._own.connection)
        connection = self._own.connection
        try:
            headers = {"Range": f"bytes={begin}-{end - 1}"}
            connection.request("GET", f"/{self._token}/{quote(name)}", headers=headers)
            response = connection.getresponse()
            data = response.read()
        except (OSError, HTTPException):
            connection.close()
            raise
        if response.status == 503:
            return None
        if response.status != 206 or len(data) != end - begin:
            raise OSError(f"answers with {response.status}")
        return data


class Relay:
    """Serves the blocks of the copy that this node makes; use it in a `with` block.

    neighbour: the node to read from, None on the first one. port: of the server, on all addresses; if it is in use,
    the next node reads from the shared file system. token: what a request must know.
    """

    def __init__(self, neighbour: Neighbour | None, port: int, token: str):
        self.neighbour, self.token = neighbour, token
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
            return self._files[name][0] if self._arrived.wait_for(there, _ANSWER_S) else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, relay: Relay, port: int):
        self.relay = relay
        self.address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        super().__init__(("", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of a node that has died, or was cut off, while it read; what it was is in its own log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a small piece waits for the receipt of its header, up to 40 ms
    server: _Server

    def do_GET(self) -> None:
        """Send a range of a file that lies in one block."""
        token, _, name = self.path.removeprefix("/").partition("/")
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None or not hmac.compare_digest(token.encode(), self.server.relay.token.encode()):
            self.send_error(404)
            return
        begin, end = int(match[1]), int(match[2]) + 1
        descriptor = self.server.relay.wait_for(unquote(name), begin // blocks.BLOCK)
        if descriptor is None:
            self.send_error(503)
            return
        self.send_response(206)
        self.send_header("Content-Length", str(end - begin))
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
