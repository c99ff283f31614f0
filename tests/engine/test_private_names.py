"""The README's table of private names is complete and up to date, and the packages' versions are bounded."""

import ast
import re
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT

README = (ROOT / "pipeline/engine/README.md").read_text()
ROWS = re.findall(r"^\| (torch|numba|DeepSpeed) \| (.+?) \| `(.+?)` \|", README, re.MULTILINE)
NAMES = [(name, room) for _, names, room in ROWS for name in re.findall(r"`(\w+)`", names)]
# Packages whose modules are private though their names have no underscore.
PRIVATE = re.compile(r"(torch|numba|deepspeed)\b.*\._|numba\.core|deepspeed\.runtime")


@pytest.mark.parametrize(("name", "room"), NAMES)
def test_a_listed_name_is_used_in_its_room(name, room):
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in (ROOT / room).rglob("*.py"))


def test_every_private_import_is_listed():
    imported = set()
    for path in (path for room in ("pipeline", "data_prep", "launch") for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported |= {alias.name for alias in node.names if PRIVATE.match(f"{node.module}.{alias.name}")}
    assert len(imported) > 5
    assert imported <= {name for name, _ in NAMES}


@pytest.mark.parametrize("package", ["torch", "numba", "deepspeed"])
def test_versions_end_at_the_next_minor(package):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = [r for r in map(Requirement, project["dependencies"]) if r.name == package]
    bounds = {s.operator: s.version.split(".") for s in requirement.specifier}
    newest = re.search(rf"\(.*?{package} (?:[\d.]+ to )?(\d+)\.(\d+)", README, re.IGNORECASE)
    assert newest
    assert bounds["<"] == [newest[1], str(int(newest[2]) + 1)]
