"""Arrows go one way: a file imports only from lines of CONTRIBUTING.md above its own; C files call one way."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text().partition("\n    pipeline/")[2].partition("\n    data_prep/")[0]
LINES = [
    re.match(r"((?:(?:\w+/)*\w+(?:/|\.py)\s+)*)", line.strip() + " ")[1].split() for line in PAGE.splitlines()[1:]
]
ROOMS = [[name.removesuffix("/").removesuffix(".py").replace("/", ".") for name in line] for line in LINES]
LAYERS = [[f"widemix.{name}" for name in line] for line in ROOMS]
LAYERS += [["widemix.__main__"]]
FOLDERS = {"pipeline": "widemix", "data_prep": "widemix.data_prep", "launch": "widemix.launch"}
# What the writer of prepared data may use.
FOR_DATA_PREP = {
    "widemix.errors",
    "widemix.arguments",
    "widemix.files",
    "widemix.lock",
    "widemix.cgroups",
    "widemix.native",
    "widemix.versions",
    "widemix.progress_line",
    "widemix.formats",
}
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    folder, *parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((FOLDERS[folder], *parts)).removesuffix(".__init__")


def layer_of(module: str) -> tuple[int, str] | None:
    """The number of a module's layer and the room in it, the longest that fits; None for packages of others."""
    rooms = [(number, room) for number, rooms in enumerate(LAYERS) for room in rooms]
    fitting = [(number, room) for number, room in rooms if module == room or module.startswith(f"{room}.")]
    return max(fitting, key=lambda found: len(found[1]), default=None)


@functools.cache
def imports(path: Path, types: bool = True) -> list[str]:
    """types: with what is imported for annotations alone."""
    names: list[str] = []
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if types or "if TYPE_CHECKING:" not in ast.unparse(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_up_the_page(path):
    here = layer_of(name_of(path))
    if here is None:
        assert name_of(path) == "widemix", "a room without a layer"
        return
    for module in imports(path):
        there = layer_of(module)
        if there is not None:
            assert there[0] < here[0] or there[1] == here[1], f"{path.name} imports {module}"


def test_no_files_import_each_other_in_a_circle():
    """Nor where one does so only once it is called."""
    names = {name_of(path) for path in FILES} - {"widemix"}
    arrows = {
        name_of(path): {
            there
            for module in imports(path, types=False)
            for there in ({module} & names or {module.rpartition(".")[0]} & names)
            if there != name_of(path)
        }
        for path in FILES
    }
    assert sum(map(len, arrows.values())) > 1000, "the imports were not found"
    list(TopologicalSorter(arrows).static_order())


@pytest.mark.parametrize("path", [path for path in FILES if "data_prep" in path.parts], ids=name_of)
def test_the_writer_of_prepared_data_knows_nothing_of_training(path):
    for module in imports(path):
        if module.startswith("widemix.") and not module.startswith("widemix.data_prep"):
            assert any(module.startswith(room) for room in FOR_DATA_PREP), f"{path.name} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_prints_shows_control_characters(path):
    """But for the first lines of a start, which have no names and come before any import."""
    uses = any(isinstance(node, ast.Name) and node.id == "print" for node in ast.walk(ast.parse(path.read_text())))
    own = name_of(path) in ("widemix.terminal", "widemix.cli")
    assert own or uses == ("widemix.terminal.print" in imports(path)), "import print from widemix.terminal"
    assert own or "rich.console.Console" not in imports(path), "import Console from widemix.progress_line"


def test_c_files_call_each_other_in_one_direction():
    sources = {path.name: re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S) for path in _c_files()}
    defined = {  # a function of a file that others may call, and that file
        name: file
        for file, text in sources.items()
        for name in re.findall(r"^(?!static\b)\w[\w *]*?\b(\w+)\([^;{]*\)\s*\{", text, flags=re.M)
    }
    calls = {
        file: {
            there
            for name, there in defined.items()
            if there != file and not re.search(rf"^static\b[^;{{]*\b{name}\(", text, flags=re.M)
            if re.search(rf"\b{name}\(", text)
        }
        for file, text in sources.items()
    }
    assert {"crop.c", "resize.c", "scratch.c"} <= calls["images.c"], "the calls were not found"
    list(TopologicalSorter(calls).static_order())


def _c_files() -> list[Path]:
    return sorted((ROOT / "pipeline/native").glob("*.c"))
