"""The README says what is so."""

import re
from pathlib import Path

import pytest

from widemix.data_prep.sources import SOURCES
from widemix.estimate.tables import named_table
from widemix.models.cost import model_cost
from widemix.models.mixer.section import MixerSection
from widemix.recipe.files import find_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ROOMS = ("pipeline", "data_prep", "launch", "recipes", "docs")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.md"))]


def test_the_table_of_networks_is_the_commands():
    assert named_table() in (ROOT / "pipeline/models/README.md").read_text()


def test_every_room_has_its_line():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tree = page[page.index("## The house") :]
    rooms = [path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")]
    files = [path.name for path in (ROOT / "pipeline").glob("*.py") if not path.name.startswith("__")]
    for name in [*(f"{room}/" for room in rooms), *files, "data_prep/", "launch/", "recipes/", "tests/"]:
        assert re.search(rf"(^|\s){re.escape(name)}\s", tree), name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_every_page_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_every_recipe_and_path_that_it_names_exists():
    names = re.findall(r"widemix (?:train|cost|submit) (\S+)", README)
    links = re.findall(r"\]\((?!https)([^)]+)\)", README)
    assert names
    assert len(links) >= 5
    for name in names:
        assert find_recipe(name).is_file(), name
    for link in links:
        assert (ROOT / link).exists(), link


def test_its_commands_name_sources_and_targets_that_exist():
    sources = set(re.findall(r"widemix prep (\w\S+)", README))
    targets = set(re.findall(r"\bmake (\w+)", README.replace("make`", "")))
    assert sources
    assert sources <= set(SOURCES)
    assert targets >= {"demo", "test"}
    makefile = (ROOT / "Makefile").read_text()
    assert targets <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    assert [path for path in re.findall(r"\btests/[\w/.]+\w", makefile) if not (ROOT / path).exists()] == []


def test_table_s3_is_mixer_b_w_at_gamma_4():
    section = MixerSection(kind="mixer", patch_size=14, tokens=256, channels=588, depth=8, expansion=4.0)
    cost = model_cost(section, 224, 1000)
    weights = 8 * 2 * 4 * (256**2 + 588**2)
    assert round(weights / 1e6, 1) == 26.3
    assert round(cost.connections / 1e9, 2) == 8.13
