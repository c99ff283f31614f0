"""The errors that are no bugs of ours: what the user can correct, and what ends a run."""

import shlex


class InputError(ValueError):
    """The user's input is wrong. Printed as one line without a traceback; exit code 2."""


class LauncherError(InputError):
    """What the launcher's variables say of this rank is wrong. Printed by every rank that finds it, not by rank 0."""


class RunError(RuntimeError):
    """A run can't go on, for a reason that its message explains whole: a diverged loss, a full disk, another rank.

    Printed as one line without a traceback; exit code 1. Any other exception is a bug and shows its traceback.
    """


def command(*words: object) -> str:
    """Return a command of ours to suggest, in backticks: `widemix WORDS`, quoted for a shell."""
    return f"`{shlex.join(['widemix', *map(str, words)])}`"
