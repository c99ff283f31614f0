"""Kills preparations of every source at random moments, damages what they leave, and lets them resume.

    python -m tests.data_prep.kills --count 100

Each time a child process prepares a source and is killed before a random line of data_prep, in any of its threads.
Then, more often than not, one of its unfinished files is damaged: as by a crash (a lost or zeroed end), or changed.
The same call goes on. Each time is one of:

    identical   the folder has the bytes of an undisturbed preparation
    refused     with one line, and with `force` the bytes are the same
    WRONG       other bytes, or a folder that `verify` finds damage in
    CRASH       anything but a line of ours

The exit code is 1 if anything was wrong or crashed.
"""

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests import layouts
from widemix.data_prep import write
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError

BAD = ("WRONG", "CRASH")
SHARD = 4_000  # bytes of data between two journal entries: of few small samples
KILLED, DONE, REFUSED, CRASHED = range(4)
SETTINGS = {
    "imagenet21k": PrepSettings(raw=True),
    "mnli": PrepSettings(length=16),
    "table": PrepSettings(targets="one,other"),
    "coefficients": PrepSettings(encoding="coefficients", max_size=0),
}
OTHERS = {"table": ("csv", layouts.table), "coefficients": ("imagenet", layouts.imagenet)}
LAYOUTS = layouts.LAYOUTS | OTHERS


class Job:
    """A source in its official layout, and the bytes of its undisturbed preparation."""

    def __init__(self, name: str, root: Path):
        self.source, make = LAYOUTS[name]
        self.settings = SETTINGS.get(name, PrepSettings())
        self.origin = root / name if make else None
        if make and self.origin:
            self.origin.mkdir()
            make(self.origin)
            self.origin = self.origin / "table.csv" if name == "table" else self.origin
        self.root, self.name = root, name
        whole = root / f"{name}.whole"
        status, self.lines = self.child(whole)
        assert status == DONE
        self.whole = contents(whole)

    def child(self, out: Path, last: int = 0, force: bool = False) -> tuple[int, int]:
        """Prepare in a child process, which is killed before line number `last`; its status, and the lines it ran."""
        receive, send = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(receive)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 2)
            write.SHARD = SHARD
            count = trace_lines(last)
            status = DONE
            try:
                prepare(self.source, self.origin, out, self.settings, processes=1, force=force)
            except InputError:
                status = REFUSED
            except BaseException:
                status = CRASHED
                os.write(send, traceback.format_exc().encode())
            os.write(send, f"\n{count[0]}".encode())
            os._exit(status)
        os.close(send)
        with os.fdopen(receive) as pipe:
            text = pipe.read()
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            return KILLED, 0
        if os.WEXITSTATUS(status) == CRASHED:
            print(text)
        return os.WEXITSTATUS(status), int(text.rpartition("\n")[2])


def trace_lines(last: int) -> list[int]:
    """Count the lines of data_prep that all threads of this process run, and kill it before number `last`."""
    count = [0]

    def trace(frame, event, argument):
        if "data_prep" not in frame.f_code.co_filename:
            return None
        count[0] += 1
        if count[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    return count


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(folder: Path, rng: random.Random) -> str:
    """Damage one of the unfinished files; returns what was done."""
    files = sorted(path for path in folder.glob("*.unfinished") if path.stat().st_size)
    journals = [path for path in files if ".journal" in path.name]
    if not files:
        return "nothing"
    path = rng.choice(journals if journals and rng.random() < 0.5 else files)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    if ".beton" in path.name:  # the first page holds nothing yet
        at = rng.randrange(min(8 << 20, len(data) - 1), len(data))
    what = rng.choice(("cut", "zeros", "character", "line", "other"))
    if what == "cut":
        del data[at:]
    elif what == "zeros":
        data[at:] = bytes(len(data) - at)
    elif what == "character":
        data[at] = (data[at] + rng.randrange(1, 256)) % 256
    elif what == "line":
        lines = bytes(data).splitlines(keepends=True)
        del lines[rng.randrange(len(lines))]
        data = bytearray(b"".join(lines))
    elif journals:
        data = bytearray(rng.choice((b"{}\n", b"", rng.choice(journals).read_bytes())))
    path.write_bytes(data)
    return f"{what} at {at} of {path.name}"


def disturb(job: Job, number: int) -> tuple[str, str]:
    """Kill, damage and resume one preparation; what came of it, and what was done."""
    rng = random.Random(f"{job.name} {number}")
    out = job.root / f"{job.name}.{number}"
    done = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        status, _ = job.child(out, rng.randint(1, job.lines))
        done.append(("killed", "done", "refused", "crashed")[status])
        if out.exists() and status == KILLED and rng.random() < 0.6:
            done.append(damage(out, rng))
    status, _ = job.child(out)
    result = "identical"
    if status == REFUSED:
        result = "refused"
        status, _ = job.child(out, force=True)
    if status != DONE:
        result = "CRASH"
    elif contents(out) != job.whole:
        result = "WRONG"
    for path in out.iterdir() if result not in BAD else ():
        path.unlink()
    return result, ", ".join(done)


def run(names: list[str], count: int, seed: int, root: Path) -> Iterator[tuple[str, str, str]]:
    """`count` disturbed preparations, of one source after the other: source, what came of it, what was done."""
    jobs = {}
    for number in range(seed, seed + count):
        name = names[number % len(names)]
        if name not in jobs:
            jobs[name] = Job(name, root)
        yield name, *disturb(jobs[name], number)


def main() -> int:
    """Print what came of them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="preparations (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first (default: 0)")
    arguments = parser.parse_args()
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        for source, result, what in run(list(LAYOUTS), arguments.count, arguments.seed, Path(name)):
            found[result] += 1
            if result != "identical":
                print(f"{source}: {result} after {what}", flush=True)
    print(", ".join(f"{number} {result}" for result, number in sorted(found.items())))
    return 1 if set(found) & set(BAD) else 0


if __name__ == "__main__":
    sys.exit(main())
