"""The errors that are no bugs of ours: what the user can correct, and what ends a run."""


class InputError(ValueError):
    """The user's input is wrong. Printed as one line without a traceback; exit code 2."""


class RunError(RuntimeError):
    """A run can't go on, for a reason that its message explains whole: a diverged loss, a full disk, another rank.

    Printed as one line without a traceback; exit code 1. Any other exception is a bug and shows its traceback.
    """
