"""The one kind of error that is the user's to mend: a line that says what, where and what would be right."""


class InputError(ValueError):
    """Something the user gave us is wrong. Ends a command with exit code 2 and no traceback."""
