"""The commands on Markdown pages, whether they are valid, and how a fork, which imports this file, runs one."""

import ast
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from widemix.errors import Exit
from widemix.recipe import load_recipe
from widemix.recipe.files import find_study
from widemix.studies.study import is_study, read_study, study_runs_of
from widemix.studies.study_run import cross

BLOCK = re.compile(r"(?:^<!-- not run: (.+?) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

NAME = re.compile(r"(?<![\w./-])widemix(?:\.\w+)+")
FILES = ("md", "yaml", "jsonl", "json", "def", "sqsh", "sif", "git", "plugins")  # and an entry point


@dataclass(frozen=True)
class Block:
    """A block of code of a page: its language, its text, and why it is not run, empty if it is."""

    language: str
    text: str
    reason: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each line, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    return [Block(language, text, reason or "") for reason, language, text in BLOCK.findall(page.read_text())]


def names_in(code: str) -> Iterator[str]:
    """What a program imports of widemix and timm, and the names that it takes from them."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("widemix", "timm"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in ("widemix", "timm"))


def look_up(name: str) -> None:
    """A module, or what a module has: `widemix.models`, `widemix.analysis.cka.cka`."""
    if name.startswith("widemix.ffcv"):
        return  # which needs FFCV
    module, *rest = name.split(".")
    value = import_module(module)
    for part in rest:
        module += f".{part}"
        value = getattr(value, part) if hasattr(value, part) else import_module(module)


def names_on(page: Path) -> set[str]:
    """The names of the package and of timm on a page, in its programs and in its text."""
    signatures = page.name == "python.md"  # the reference, which is no program
    programs = [block.text for block in blocks(page) if block.language == "python" and not signatures]
    said = {name for name in NAME.findall(page.read_text()) if name.rpartition(".")[2] not in FILES}
    return said.union(*map(names_in, programs))


def check(arguments: Namespace) -> Exit:
    """Its recipe or study is there, and has the keys that the command changes, with values that they take."""
    if not getattr(arguments, "recipe", None):
        return Exit.DONE
    path = find_study(arguments.recipe)
    if path.is_file() and is_study(path):
        assert study_runs_of(path, read_study(path), arguments.overrides)
    elif getattr(arguments, "vary", None):
        assert cross(path, arguments.vary, arguments.overrides)
    else:
        load_recipe(arguments.recipe, arguments.overrides)
    return Exit.DONE


def in_folder(folder: str, *words: str) -> None:
    """In a fork: `widemix WORDS` from a folder, with modules from where PYTHONPATH says."""
    from tests.forks import be_widemix  # tests/installed.py has the rest without a checkout's tests

    os.chdir(folder)
    sys.path += os.environ.get("PYTHONPATH", "").split(os.pathsep)
    be_widemix(*words)
