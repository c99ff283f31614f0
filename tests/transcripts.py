"""Transcripts: files that say, as a terminal does, what each command answers. `pytest --regenerate` writes them anew.

Cases are separated by an empty line. Each begins with `# what it shows`, and has lines `$ command` with what that
answers below; what commands there are, and what they are run on, the test says.
"""

from collections.abc import Callable
from pathlib import Path

import pytest


def transcript(path: Path):
    """Parametrise a test by the cases of a file, each of which it gives to `check_transcript`."""
    cases = path.read_text().strip().split("\n\n")
    ids = [case.partition("\n")[0].removeprefix("# ") for case in cases]
    return pytest.mark.parametrize("case", [(path, case) for case in cases], ids=ids)


def check_transcript(case: tuple[Path, str], answer: Callable[[str], str], config: pytest.Config) -> None:
    """Assert that each command of a case answers what the file says; or write there what it answers."""
    path, expected = case
    title, *lines = expected.splitlines()
    found = [title]
    for line in lines:
        if line.startswith("$ "):
            found += [line, *filter(None, answer(line.removeprefix("$ ")).splitlines())]
    if config.option.regenerate:
        path.write_text(path.read_text().replace(expected, "\n".join(found)))
    assert "\n".join(found) == expected
