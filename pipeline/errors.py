"""The errors that are no bugs of ours: what the user can correct, and what ends a run; exit codes."""

import enum
import errno
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager


class Exit(enum.IntEnum):
    """The exit code of a command."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2
    REQUEUE = 75  # stopped by a signal, after saving a checkpoint: the same command continues the run


class InputError(ValueError):
    """The user's input is wrong. Printed as one line without a traceback; exit code 2."""


class LauncherError(InputError):
    """The launcher's variables are wrong for this rank. Printed by every rank that finds it, not by rank 0."""


class RunError(RuntimeError):
    """A run can't go on, for a reason that its message explains whole: a diverged loss, a full disk, another rank.

    Printed as one line without a traceback; exit code 1. Any other exception is a bug and shows its traceback.
    """


def install_extra(name: str) -> str:
    """Return the command that installs what one of our extras needs, from the clone that this package came from."""
    from importlib.metadata import distributions  # takes 20 ms

    # What builds a package leaves metadata in the clone too, without this file.
    origins = [json.loads(each.read_text("direct_url.json") or "{}") for each in distributions(name="widemix")]
    clone = next((origin["url"].removeprefix("file://") for origin in origins if "dir_info" in origin), "")
    return "pip install " + shlex.quote((clone or "widemix") + f"[{name}]")


_CURES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit of files' sizes, `ulimit -f`",
    errno.EROFS: "mount its disk again so that it takes writes (`dmesg` may say why it does not)",
    errno.EIO: "see what is wrong with its disk (`dmesg` may say)",
    errno.ESTALE: "mount its disk again",
    errno.EPERM: "let this user write there (`ls -ld` and `lsattr -d` say why not)",
    errno.EACCES: "let this user write there (`ls -ld` says why not)",
}


def cure_of(reason: OSError | str) -> str:
    """Return what to do about a file that could not be written, by the error or by the system's words for it."""
    if isinstance(reason, OSError) and reason.errno in _CURES:
        return _CURES[reason.errno]
    return next((cure for number, cure in _CURES.items() if os.strerror(number) in str(reason)), "see to its disk")


def is_of_disk(error: OSError) -> bool:
    """Whether the reason is a disk, or a right there, to which the user has to see."""
    return error.errno in _CURES


@contextmanager
def explaining_disk_errors() -> Iterator[None]:
    """Raise `RunError` for what a disk did not take, or give, while a run was trained: which file, and what to do."""
    try:
        yield
    except OSError as error:
        if not is_of_disk(error):
            raise
        where = error.filename or "a file of the run or of its data"
        again = "start the same command again: it goes on from the newest checkpoint"
        raise RunError(f"{where}: {error.strerror}; {cure_of(error)}, and {again}") from error


def shown(value: object, most: int = 80) -> str:
    """Return a value as an error names it: its `repr` in one line, cut to `most` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an integer of more digits than Python prints, or an error of the value's own class
        text = f"of the type {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def command(*words: object) -> str:
    """Return a command of ours to suggest, in backticks: `widemix WORDS`, quoted for a shell."""
    return f"`{shlex.join(['widemix', *map(str, words)])}`"
