"""The errors that are no bugs of ours: what the user can correct, and what ends a run; exit codes."""

import enum
import shlex


class Exit(enum.IntEnum):
    """The exit code of a command."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2
    REQUEUE = 75  # stopped by a signal, after saving a checkpoint: the same command continues the run


class InputError(ValueError):
    """The user's input is wrong. Printed as one line without a traceback; exit code 2."""


class LauncherError(InputError):
    """What the launcher's variables say of this rank is wrong. Printed by every rank that finds it, not by rank 0."""


class RunError(RuntimeError):
    """A run can't go on, for a reason that its message explains whole: a diverged loss, a full disk, another rank.

    Printed as one line without a traceback; exit code 1. Any other exception is a bug and shows its traceback.
    """


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
