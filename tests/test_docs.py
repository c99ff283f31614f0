"""Pages say what is so: every command of README and docs/ runs, or is marked with why not and is valid."""

import re

import pytest
import yaml

from tests.conftest import ROOT
from tests.forks import Forks
from tests.pages import blocks, check, in_folder, look_up, names_on
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.data_prep.sources import SOURCES
from widemix.estimate.tables import named_table
from widemix.recipe.files import find_recipe

LONG = ("plug_in", "plug_in_training", "watch", "cifar_comparison", "fine_tuning", "study")
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "reference"]
WIDTH = 100  # of a line of code: what the site shows without scrolling
TINY = ("train.max_steps=1", "model.depth=1", "log.tensorboard=false", "data.workers=1", "eval.batch_size=256")


def run(folder, words, environ: dict[str, str]) -> None:
    program, *arguments = words
    if program == "export":
        environ |= {name: value.replace("$PWD", str(folder)) for name, _, value in [arguments[0].partition("=")]}
        return
    assert program == "widemix", f"{program}: mark the block with why it is not run"
    if arguments[0] == "train":
        arguments += [f"--{key}" for key in TINY]
        arguments += ["--train.max_steps=24"] if "--train.profile" in arguments else []
    codes, output = Forks(in_folder, str(folder), *arguments, log=folder / "log", environs=[environ]).wait()
    assert codes == [0], f"{' '.join(words)}\n{output}"


def follow(page, folder, monkeypatch, capsys) -> None:
    """Do what the page says, from its beginning, in a folder that has the recipes."""
    monkeypatch.chdir(folder)
    environ: dict[str, str] = {}
    for block in blocks(page):
        first = block.text.partition("\n")[0]
        if block.language == "python":
            code = compile(block.text, str(page), "exec")
            if first == "# images to try":
                exec(code, {})
        if re.fullmatch(r"# \w+\.(py|yaml)", first):
            (folder / first.removeprefix("# ")).write_text(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        for words in block.commands if block.language == "sh" else ():
            if not block.reason:
                run(folder, words, environ)
            elif words[0] == "widemix":
                assert run_command(make_parser(), check, words[1:]) == 0, capsys.readouterr().err


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The folder of the tutorial about own images, in which the README is followed too."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    return folder


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long) if page.stem in LONG else page for page in PAGES],
    ids=lambda page: page.stem,
)
def test_a_page_can_be_followed(page, own, tmp_path, monkeypatch, capsys):
    if page.stem == "own_images":
        follow(page, own, monkeypatch, capsys)
        follow(ROOT / "README.md", own, monkeypatch, capsys)
    else:
        (tmp_path / "recipes").symlink_to(ROOT / "recipes")
        follow(page, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_code_fits_its_line(page):
    lines = [line for block in blocks(page) for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > WIDTH] == []


LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
ROOMS = ("docs", "pipeline", "data_prep", "launch", "recipes")
LINKING = [*sorted(ROOT.glob("*.md")), *sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.md"))]


@pytest.mark.parametrize("page", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_those_of_the_site_within_it(page):
    """The site is docs/, and what `make site` adds for the page of results."""
    added = "../recipes/studies/results/"
    assert added.removesuffix("/results/").removeprefix("../") in (ROOT / "Makefile").read_text()
    for link in LINK.findall(page.read_text()):
        target = (page.parent / link).resolve()
        assert target.exists(), link
        if page.is_relative_to(ROOT / "docs"):
            assert target.is_file(), link
            if not target.is_relative_to(ROOT / "docs"):
                assert page.name == "results.md", f"{link}: write the path as code"
                assert link.startswith(added), link


NAMED = re.compile(r"`((?:data_prep|docs|examples|launch|pipeline|recipes|tests)/[\w./-]+\.\w+)`")


@pytest.mark.parametrize(
    "page", ["README.md", "CHANGELOG.md", "docs", "pipeline", "data_prep", "recipes", "tests", "launch"]
)
def test_files_that_pages_name_are_there(page):
    pages = [ROOT / page] if page.endswith(".md") else sorted((ROOT / page).rglob("*.md"))
    named = {(path.relative_to(ROOT), name) for path in pages for name in NAMED.findall(path.read_text())}
    assert [pair for pair in named if not (ROOT / pair[1]).exists()] == []


@pytest.mark.parametrize("page", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_the_package_are_there(page):
    """Those that a page names are; `make release` looks them up in the wheel too."""
    for name in names_on(page) if page.name != "CHANGELOG.md" else ():
        look_up(name)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 10
    assert all(f": {page}\n" in navigation for page in pages)


def test_tests_that_the_page_on_trust_names_are_there():
    file = ""
    for found in re.findall(r"`((?:tests/[\w/]+\.py)?(?:::\w+)?)`", (ROOT / "docs/explanation/trust.md").read_text()):
        path, _, name = found.partition("::")
        file = path or file
        assert name == "" or f"def {name}(" in (ROOT / file).read_text(), found
        assert (ROOT / file).is_file(), found


def test_the_table_of_networks_is_the_commands():
    assert named_table() in (ROOT / "pipeline/models/README.md").read_text()


def test_every_room_has_its_line():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tree = page[page.index("## The house") :]
    rooms = [path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")]
    files = [path.name for path in (ROOT / "pipeline").glob("*.py") if not path.name.startswith("__")]
    for name in [*(f"{room}/" for room in rooms), *files, "data_prep/", "launch/", "recipes/", "tests/"]:
        assert re.search(rf"(^|\s){re.escape(name)}\s", tree), name


def test_the_readme_names_recipes_sources_and_targets_that_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    names = re.findall(r"widemix (?:train|cost|submit) (\S+)", readme)
    sources = set(re.findall(r"widemix prep (\w\S+)", readme))
    targets = set(re.findall(r"\bmake (\w+)", readme.replace("make`", "")))
    assert names
    assert [name for name in names if not find_recipe(name).is_file()] == []
    assert set() < sources <= set(SOURCES)
    assert {"demo", "test"} <= targets <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    assert [path for path in re.findall(r"\btests/[\w/.]+\w", makefile) if not (ROOT / path).exists()] == []
