"""Arrows go one way: a file imports only from the lines above its own."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [
    ["pipeline.errors", "pipeline.files", "pipeline.limits"],
    ["pipeline.launchers", "pipeline.outcome"],
    ["pipeline.native"],
    ["data_prep"],
    ["pipeline.recipe"],
    ["pipeline.commands"],
    ["pipeline.topology"],
    ["pipeline.data"],
    ["pipeline.models"],
    ["pipeline.optim", "pipeline.schedule"],
    ["pipeline.engine"],
    ["pipeline.checkpoint", "pipeline.evaluate", "pipeline.metrics", "pipeline.progress", "pipeline.signals"],
    ["pipeline.saving", "pipeline.watch", "pipeline.health", "pipeline.runfolder", "pipeline.finetune"],
    ["pipeline.rollback"],
    ["pipeline.loop"],
    ["pipeline.train", "pipeline.measure", "pipeline.estimate", "pipeline.doctor"],
    ["pipeline.bench", "pipeline.analysis", "pipeline.studies", "pipeline.catalogue"],
    ["launch"],
    ["pipeline.cli"],
]
FILES = sorted(path for room in ("pipeline", "data_prep", "launch") for path in (ROOT / room).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer_of(module: str) -> tuple[int, str] | None:
    """The number of a module's layer and the room in it, or None for packages of others."""
    for number, rooms in enumerate(LAYERS):
        for room in rooms:
            if module == room or module.startswith(f"{room}."):
                return number, room
    return None


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_up_the_page(path):
    here = layer_of(name_of(path))
    if here is None:
        assert name_of(path) == "pipeline", "a room without a layer"
        return
    for module in imports(path):
        there = layer_of(module)
        if there is not None:
            assert there[0] < here[0] or there[1] == here[1], f"{path.name} imports {module}"
