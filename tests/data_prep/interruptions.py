"""Preparations of every kind, and what may happen to one until the same call ends it."""

import os
import random
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from tests import layouts
from tests.data_prep.conftest import contents
from tests.shims import disk_of
from widemix.data_prep.join import join
from widemix.data_prep.original_jpeg import restore
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError

RAW = PrepSettings(raw=True)
DONE, FAILED = 0, 1
LINES = ("number", "empty", "third", "twice")  # what may be wrong with a line of a journal
# Source, layout, settings: of each kind of samples, since what is the same for all of a kind is in one place.
PREPARED = {
    "markers": ("imagenet", layouts.imagenet, PrepSettings()),
    "own bytes": ("imagenet", layouts.imagenet21k, PrepSettings(restart_markers=False)),
    "coefficients": ("imagenet", layouts.imagenet, PrepSettings(encoding="coefficients")),
    "pixels": ("image-folder", lambda folder: bmps(folder, 30), RAW),
    "arrays": ("mnist", layouts.mnist, PrepSettings()),
    "text": ("mnli", layouts.mnli, PrepSettings(length=128)),
    "targets": ("csv", layouts.table, PrepSettings(targets="one,other")),
}


class Job(NamedTuple):
    """What writes a folder, `act(to=FOLDER)`, and what it ends in."""

    act: Callable[..., Any]
    before: Path | None  # what is in the folder at first
    whole: dict[str, bytes]  # when nothing happens to it
    lines: int  # of data_prep that it runs


def make_job(name: str, root: Path) -> Job:
    """One of `PREPARED` by name, or `join`, `extend` or `restore`."""
    if name in PREPARED:
        source, make, settings = PREPARED[name]
        (root / "in").mkdir()
        make(root / "in")
        act, before = partial(prepare, source, root / "in", settings=settings, processes=1), None
    else:
        act, before = {"join": join_parts, "extend": extend_images, "restore": restore_images}[name](root)
    whole = root / "whole"
    if before:
        shutil.copytree(before, whole)
    act(to=whole)
    if before:
        shutil.copytree(before, root / "counted")
    status, lines = run_in_child(act, root / "counted")
    assert status == DONE
    return Job(act, before, contents(whole), lines)


def join_parts(root: Path) -> tuple[Callable[..., Any], None]:
    """Of images of which one cannot be decoded."""
    bmps(root / "in", 30)
    (root / "in/train/a/x.bmp").write_bytes(b"no image")
    for number in ("1", "2"):
        settings = PrepSettings(raw=True, part=f"{number}/2")
        prepare("image-folder", root / "in", root / number, settings, processes=1, max_bad=0.5)
    return partial(join, [root / "1", root / "2"], max_bad=0.5), None


def extend_images(root: Path) -> tuple[Callable[..., Any], Path]:
    """By half of them, and by a class that comes before the others."""
    bmps(root / "in", 20)
    prepare("image-folder", root / "in", root / "before", RAW, processes=1)
    bmps(root / "in", 30)
    bmps(root / "in", 4, classes=("_", "b"))
    return partial(prepare, "image-folder", root / "in", settings=RAW, processes=1, extend=True), root / "before"


def restore_images(root: Path) -> tuple[Callable[..., Any], None]:
    """Of coefficients and, since it is progressive, of a JPEG."""
    (root / "in").mkdir()
    layouts.imagenet(root / "in")
    Image.effect_noise((30, 20), 50).convert("RGB").save(root / "in/val/n00000001/p.JPEG", progressive=True)
    prepare("imagenet", root / "in", root / "out", PrepSettings(encoding="coefficients"), processes=1)
    return partial(restore, root / "out"), None


def bmps(folder: Path, count: int, classes: tuple[str, ...] = ("a", "b")) -> None:
    """Images of 3,600 bytes when raw: `count` to train on, an eighth to validate."""
    for split, number in (("train", count), ("val", count // 8)):
        for i in range(number):
            path = folder / split / classes[i % 2] / f"{i:02}.bmp"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.exists() or Image.frombytes("RGB", (40, 30), random.Random(i).randbytes(3600)).save(path)


def run_in_child(act: Callable[..., Any], to: Path, last: int = 0, most: int = -1) -> tuple[int, int]:
    """Act in a child process, killed before line number `last`, on a disk for files of `most` bytes.

    Returns its exit code, or minus a signal, and the lines of data_prep that all its threads ran.
    """
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = FAILED
        try:
            os.close(receive)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            count = trace_lines(last)
            with disk_of(most):
                act(to=to)
            status = DONE
        except (InputError, OSError):
            pass
        except BaseException:
            os.write(send, traceback.format_exc().encode())
        finally:
            os.write(send, f"\n{count[0]}".encode())
            os._exit(status)
    os.close(send)
    with os.fdopen(receive) as pipe:
        said, _, lines = pipe.read().rpartition("\n")
    assert not said, said
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), int(lines or 0)


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


def change(data: bytes, how: str, at: int, other: bytes = b"") -> bytes:
    """A file's bytes: cut or zero from `at` on, another bit there, a line less, more at the end, another file's.

    Of a journal, line `at` may also say another number, be empty, that of another place, or be there twice.
    """
    lines = data.splitlines(keepends=True)
    if how in LINES:
        said = {"number": lines[at].replace(b'"taken": ', b'"taken": 1', 1), "empty": b"{}\n", "third": lines[2]}
        lines[at] = said.get(how, lines[at] * 2)
        return b"".join(lines)
    return {
        "cut": data[:at],
        "zeros": data[:at] + bytes(len(data) - at),
        "bit": data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
        "line": b"".join(lines[: at % len(lines)] + lines[at % len(lines) + 1 :]),
        "longer": data + b"x" * 300_000,
        "other": other,
    }[how]
