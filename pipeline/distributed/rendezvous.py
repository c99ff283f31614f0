"""How the ranks of a run meet: in the job's key-value store, in which rank 0 gives each attempt its number.

torchrun keeps its store while it starts killed ranks again, with all keys of the attempts before, and its own count
of restarts differs between nodes. So each rank puts a random ticket into the store, which replaces that of an attempt
before, and rank 0 answers each ticket with the number of the attempt; all other keys begin with that number.
"""

import os
import platform
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from widemix.distributed.launchers import how_to_train_alone, master_address
from widemix.errors import LauncherError, RunError
from widemix.terminal import print

Value = TypeVar("Value")

TELL_AFTER_S = 30.0  # until a rank that waits says for what; then again after twice as long
RESOLVE_S = 30.0  # for a host name that has just been made to be known everywhere
REFUSED_S = 5.0  # that torchrun's store, which is open before it starts ranks, may refuse a connection
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SHOWN = 16  # ranks that are named one by one


class Rendezvous:
    """One rank's way to the others of its world. `timeout_s` bounds all of it."""

    def __init__(self, rank: int, world: int, timeout_s: float):
        self._rank, self._world, self._timeout_s = rank, world, timeout_s
        self._host, self._port = master_address(os.environ)
        self._place = f"MASTER_ADDR {self._host}, MASTER_PORT {self._port}"
        self._name = f"rank {rank} of {world} on {platform.node()}"
        self._awaited = ""
        self._ended = threading.Event()

    def waits_for(self, awaited: str) -> None:
        """Set what the rank waits for, as its lines say it."""
        self._awaited = awaited

    def run(self, meet: Callable[[], Value]) -> Value:
        """Call `meet` in a thread and return its value; so this one handles signals while that waits in C++ code.

        Prints what the rank waits for after 30 s, then ever more rarely; `RunError` after the time limit.
        """
        values: list[Value] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def call() -> None:
            try:
                values.append(meet())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        threading.Thread(target=call, name="rendezvous", daemon=True).start()
        began, tell_after = time.monotonic(), TELL_AFTER_S
        try:
            while not done.wait(0.2):
                waited = time.monotonic() - began
                if waited > self._timeout_s:
                    raise RunError(f"{self._name}: has waited {self._timeout_s:g} s for {self._awaited}")
                if waited > tell_after:
                    tell_after *= 2
                    if self._awaited:
                        print(f"{self._name}: waits for {self._awaited}", file=sys.stderr, flush=True)
        finally:
            self._ended.set()
        if errors:
            raise errors[0]
        return values[0]

    def join(self) -> dist.Store:
        """Wait for all ranks; return the store with the keys of this attempt. To be called in `run`."""
        try:
            store = self.connect()
            return self._lead(store) if self._rank == 0 else self._follow(store)
        except dist.DistNetworkError as error:
            raise RunError(f"{self._name}: rank 0 has ended, at {self._place}: {_reason(error)}") from None

    def connect(self) -> dist.Store:
        """Return torchrun's own store, or that which rank 0 opens, as soon as it is open. To be called in `run`."""
        own = self._rank == 0 and not _has_agent_store()
        if own and not self._is_local():
            self.waits_for(f"an answer from itself at {self._place}, which is not this machine: is it left over?")
        elif not own:
            self._reach()
        limit = timedelta(seconds=self._timeout_s)
        later = 2 * limit + timedelta(minutes=1)  # so that `run` ends the waiting, in one line
        listener = self._listen_on_loopback() if own and self._host in LOOPBACK else None
        try:
            store = dist.TCPStore(
                self._host, self._port, None, own, later, False, multi_tenant=own, master_listen_fd=listener
            )
        except dist.DistNetworkError as error:
            if "EADDRINUSE" in str(error):
                raise LauncherError(
                    f"MASTER_PORT {self._port}: another process on {platform.node()} has it; set another "
                    "(torchrun: --master-port), or end what an earlier run has left there"
                ) from None
            raise RunError(f"{self._name}: {self._place}: {_reason(error)}") from None
        store.set_timeout(limit)
        return store

    def _listen_on_loopback(self) -> int | None:
        """Return a descriptor that listens for this machine alone; without one the store listens on all addresses.

        None where the port is in use: by a store of this process, which it then shares, or by another process.
        """
        family, *_, address = self._resolve()[0]
        try:
            return socket.create_server(address, family=family).detach()
        except OSError:
            return None

    def _lead(self, store: dist.Store) -> dist.Store:
        """On rank 0: answer the tickets of this attempt's ranks until all have read their answer."""
        number = store.add("attempts", 1)
        attempt = dist.PrefixStore(f"attempt {number}", store)
        answered: dict[int, bytes] = {}
        missing = list(range(1, self._world))
        while missing:
            for rank in missing:
                ticket = store.get(f"ticket {rank}") if store.check([f"ticket {rank}"]) else b""
                if ticket != answered.get(rank, b""):  # the first may be of an attempt before
                    answered[rank] = ticket
                    store.set(f"answer {ticket.decode()}", f"{number} {self._world}")
            missing = [rank for rank in missing if not attempt.check([f"joined {rank}"])]
            self.waits_for(f"{_list(missing)} at {self._place}; {how_to_train_alone(os.environ)}")
            self._pause(bool(missing))
        attempt.set("all", "here")
        return attempt

    def _follow(self, store: dist.Store) -> dist.Store:
        """On the others: take the number of the attempt from rank 0, and wait for the ranks that it waits for."""
        ticket = uuid.uuid4().hex
        store.set(f"ticket {self._rank}", ticket)
        self.waits_for(f"rank 0 at {self._place}; {how_to_train_alone(os.environ)}")
        while not store.check([f"answer {ticket}"]):
            self._pause()
        number, world = store.get(f"answer {ticket}").decode().split()
        if int(world) != self._world:
            raise LauncherError(f"{self._name}: rank 0 at {self._place} has WORLD_SIZE={world}; set the same on all")
        attempt = dist.PrefixStore(f"attempt {number}", store)
        if attempt.compare_set(f"joined {self._rank}", "", ticket).decode() != ticket:
            raise LauncherError(
                f"{self._name}: another process has joined as this rank at {self._place}; set a RANK of its own, or "
                "another MASTER_PORT for each run"
            )
        self.waits_for("")  # rank 0 says for which
        while not attempt.check(["all"]):
            self._pause()
        return attempt

    def _is_local(self) -> bool:
        """Whether MASTER_ADDR is an address of this machine. `LauncherError` if it is none at all."""
        for family, kind, _, _, address in self._resolve():
            with socket.socket(family, kind) as probe:
                try:
                    probe.bind((address[0], 0))
                except OSError:
                    continue
                return True
        return False

    def _resolve(self) -> Sequence[tuple]:
        began = time.monotonic()
        while True:
            try:
                return socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                if time.monotonic() - began > RESOLVE_S:
                    reason = getattr(error, "strerror", None) or error
                    raise LauncherError(
                        f"MASTER_ADDR {self._host}: {platform.node()} does not know this host ({reason}); set it to "
                        "the host name or address of rank 0"
                    ) from None
            self._pause()

    def _reach(self) -> None:
        """Wait until something answers at MASTER_ADDR and MASTER_PORT.

        Raises `RunError` where torchrun has been killed: before this rank asked to end with it.
        """
        self._resolve()
        began = time.monotonic()
        while True:
            try:
                socket.create_connection((self._host, self._port), timeout=10).close()
                return
            except OSError as error:
                is_refused = isinstance(error, ConnectionRefusedError) and _has_agent_store()
                if is_refused and time.monotonic() - began > REFUSED_S:
                    raise RunError(
                        f"{self._name}: torchrun has ended: its store at {self._place} is closed"
                    ) from None
                self.waits_for(
                    f"rank 0 at {self._place} ({error.strerror or error}); {how_to_train_alone(os.environ)}"
                )
            self._pause()

    def _pause(self, wait: bool = True) -> None:
        """Wait between two looks; ends the thread where the main one waits no more."""
        if wait and self._ended.wait(0.05):
            raise RunError("the rendezvous was ended")


def _has_agent_store() -> bool:
    """Whether torchrun started this rank, and shares its store with it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _list(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:_SHOWN]))}{more}"


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0]
