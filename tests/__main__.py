"""`python -m tests WORDS` is `pytest WORDS`, but ends at once: to take down all that was imported takes 5 s."""

import pytest

from widemix.command_line.commands import exit_process

if __name__ == "__main__":
    exit_process(pytest.main())
