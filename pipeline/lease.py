"""Leases: which process trains a run of a study, or writes to a folder.

The leases of a run are files `leases/RUN.N` with N = 1, 2, ...; that with the greatest N counts. A process takes a
run by creating the next file, which fails if another was faster (a link or `O_EXCL`, atomic on local disks, NFS,
Lustre), and keeps it by renewing its modification time. It may create the next one only once the last has expired,
that is was not renewed for `expiry_s`, or its process has ended on this machine. The holder of an expired lease
notices at its next renewal that there is a greater N, and ends its run. Ages are differences of the file system's
own times, so that the clocks of the machines do not matter.
"""

import json
import os
import platform
import re
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from widemix.files import atomic_write, parse_json, read_regular

EXPIRY_S = 120.0  # without renewal
RENEWAL_S = 15.0


@dataclass(frozen=True)
class Holder:
    """A process that holds, or held, a run."""

    generation: int
    id: str
    host: str
    pid: int
    alive: bool  # whether the lease counts
    machine: str = ""


class Leases:
    """The leases that this process holds in a folder, in the folder `name` of it.

    patience_s: after how long without an answer of the file system they count as lost (default: `expiry_s`).
    """

    def __init__(
        self, folder: Path, expiry_s: float = EXPIRY_S, name: str = "leases", patience_s: float | None = None
    ):
        self.folder = folder / name
        self.expiry_s = expiry_s
        self._patience_s = expiry_s if patience_s is None else patience_s
        self._id = uuid.uuid4().hex
        self._held: dict[str, int] = {}  # generation by run
        self._renewed: dict[str, float] = {}  # monotonic time by run

    def take(self, run: str) -> bool:
        """Try to take a run; returns whether this process has it now."""
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                return self._take(run)
            except FileNotFoundError:
                if self.folder.exists():
                    raise  # else another process has released its last lease meanwhile

    def _take(self, run: str) -> bool:
        last = self.holder(run)
        if last is not None and last.alive:
            return False
        generation = last.generation + 1 if last else 1
        path = self._path(run, generation)
        if not self._create(path):
            return False
        if last is not None:  # unless it has been released and taken anew since it was looked at
            before = self._path(run, last.generation)
            if not before.exists() or read_record(before).get("id", "") != last.id:
                path.unlink()
                return False
        self._held[run], self._renewed[run] = generation, time.monotonic()
        return True

    def _create(self, path: Path) -> bool:
        """Write a lease that is not there yet; False if another process was faster.

        It appears whole, so that a process which is killed meanwhile holds nothing, except where there are no links.
        """
        own = self.folder / f"own-{self._id}"
        atomic_write(own, json.dumps(self._record()))
        try:
            os.link(own, path)
        except FileExistsError:
            return False
        except OSError:
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return False
            os.close(descriptor)
            atomic_write(path, own.read_bytes())
        finally:
            own.unlink()
        return True

    def add_process(self, run: str, pid: int) -> None:
        """Note a process that works on a run: the lease also counts while that lives, though this one has died."""
        atomic_write(self._path(run, self._held[run]), json.dumps(self._record(pid)))

    def renew(self, run: str) -> bool:
        """Renew a lease; False if another process has taken the run because it was renewed too late.

        Also where the file system has not answered for so long that one may have.
        """
        try:
            is_own = self._is_own(run, self._held[run])
            if is_own:
                os.utime(self._path(run, self._held[run]))
        except FileNotFoundError:  # taken over and released in this moment
            is_own = False
        except OSError:
            return time.monotonic() - self._renewed[run] < self._patience_s
        self._renewed[run] = time.monotonic()
        return is_own

    def _is_own(self, run: str, generation: int) -> bool:
        """Whether the lease that counts is ours: another may have its number since all were released."""
        if max(self._generations(run), default=0) != generation:
            return False
        return _parse_record(read_regular(self._path(run, generation))).get("id") == self._id

    def release(self, run: str) -> None:
        """Give a run back; a lease that another process has taken over is left to it.

        Where the file system does not let it, the lease ends with this process.
        """
        generation = self._held.pop(run)
        with suppress(OSError):
            if self._is_own(run, generation):
                for number in sorted(self._generations(run)):  # own lease last: until then the run is held
                    self._path(run, number).unlink(missing_ok=True)
            self.folder.rmdir()  # if it was the last

    def holder(self, run: str) -> Holder | None:
        """Return who holds, or last held, a run; None if nobody does."""
        generation = max(self._generations(run), default=0)
        if not generation:
            return None
        path = self._path(run, generation)
        record = read_record(path)
        try:
            age = self._now() - path.stat().st_mtime
        except FileNotFoundError:  # released in this moment
            return None
        alive = age < self.expiry_s and not _has_ended(record)
        known = {"id": "", "host": "unknown", "pid": 0, "machine": ""} | record
        return Holder(generation, known["id"], known["host"], known["pid"], alive, known["machine"])

    def _record(self, *others: int) -> dict:
        return {
            "id": self._id,
            "host": platform.node(),
            "pid": os.getpid(),
            "machine": machine_name(),
            "processes": [(pid, started) for pid in (os.getpid(), *others) if (started := _start_time(pid))],
            "taken": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

    def _generations(self, run: str) -> list[int]:
        if not self.folder.is_dir():
            return []
        pattern = re.compile(re.escape(run) + r"\.(\d+)")
        matches = (pattern.fullmatch(name) for name in os.listdir(self.folder))
        return [int(match[1]) for match in matches if match]

    def _path(self, run: str, generation: int) -> Path:
        return self.folder / f"{run}.{generation}"

    def _now(self) -> float:
        """Return the time of the file system, s: that of a file written now."""
        clock = self.folder / f"clock-{self._id}"
        atomic_write(clock, "")
        now = clock.stat().st_mtime
        clock.unlink(missing_ok=True)
        return now


def read_record(path: Path) -> dict:
    """Return the record of a lease; empty if it is gone, or its holder has not written it yet."""
    try:
        return _parse_record(read_regular(path))
    except OSError:
        return {}


def _parse_record(data: bytes) -> dict:
    try:
        record = parse_json(data)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _has_ended(record: dict) -> bool:
    """Whether the record's processes were on this machine, and all have ended."""
    if record.get("machine") != machine_name():
        return False
    return all(_start_time(pid) != started for pid, started in record["processes"])


def _start_time(pid: int) -> float | None:
    """Return when a process of this machine started, unlike a later one of its number; None if it has ended."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def machine_name() -> str:
    """Return a name of this boot of this machine and of its space of process numbers, which each container has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():  # not Linux
        return f"{platform.node()} {psutil.boot_time():.0f}"
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
