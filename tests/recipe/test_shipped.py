"""The recipes' table is what the command writes, and the data of studies follow the laws that they name."""

from functools import cache

import pytest
import torch
import yaml

from pipeline.estimate.recipe_tables import hours, measured, row, shipped
from pipeline.models.cost import model_cost
from pipeline.models.registry import build_model
from pipeline.recipe import Recipe, load_recipe
from tests.conftest import ROOT

FOLDER = ROOT / "recipes"
STUDIES = sorted(FOLDER.glob("studies/*.yaml"))
BUDGETS = [round(2 ** (17 + k / 2)) for k in range(9)]


STALE = "stale: `widemix cost --recipes recipes` writes it"


def test_the_table_is_the_commands():
    lines = (FOLDER / "README.md").read_text().splitlines()
    named = [line for line in lines if line.startswith("| `") and ".yaml` |" in line]
    rows = [row(path) for path in shipped(FOLDER)]
    assert [line[: len(text)] for line, text in zip(named, rows, strict=False)] == rows, STALE
    assert measured(FOLDER) == lines[lines.index(measured(FOLDER)[0]) :][: len(measured(FOLDER))], STALE


@pytest.mark.parametrize("name", ["digits/rp_mixer", "mnist/monarch", "imagenet/mixer_s32"])
def test_the_tables_hours_are_the_commands(name):
    """Of a few recipes: each takes a second, and the other columns hold what the hours follow from."""
    path = FOLDER / f"{name}.yaml"
    assert f"{row(path)} {hours(path)} |\n" in (FOLDER / "README.md").read_text(), STALE


def test_every_recipe_and_study_is_named_in_the_readme():
    readme = (FOLDER / "README.md").read_text()
    assert all(f"`{path.relative_to(FOLDER)}`" in readme for path in shipped(FOLDER))
    named = ("studies/svhn_mixer_*.yaml", "studies/mnli_mixer_*.yaml")
    assert all(f"`{path.relative_to(FOLDER)}`" in readme or any(path.match(n) for n in named) for path in STUDIES)


@cache
def cells(study: str) -> list[Recipe]:
    """The recipes of a study, cell by cell; all are valid, and no two are the same."""
    path, recipes = FOLDER / f"studies/{study}.yaml", []
    for entry in yaml.safe_load(path.read_text()):
        for name in entry["recipes"]:
            for cell in entry["cells"]:
                values = zip(entry["keys"], map(yaml.safe_dump, cell), strict=True)
                recipes.append(load_recipe(path.parent / name, list(values)))
    assert len({repr(recipe) for recipe in recipes}) == len(recipes)
    return recipes


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_cell_is_a_recipe(path):
    assert len(cells(path.stem)) > 1


@pytest.mark.parametrize("power", [18, 21])
def test_s_mixers_have_the_nearest_whole_tokens(power):
    for recipe in cells(f"s_mixers_{power}"):
        c, s = recipe.model.channels, recipe.model.tokens
        low, high = ((c * t**2 + c**2 * t) / 2 for t in (s - 0.5, s + 0.5))
        assert low <= 2**power <= high


@pytest.mark.parametrize("power", [18, 21])
def test_sw_mlps_have_equal_connections(power):
    for recipe in cells(f"sw_mlps_{power}"):
        assert recipe.model.density * recipe.model.width**2 == pytest.approx(2**power, rel=2e-3)


def test_figure_6d_has_the_omega_of_mixer_b_w():
    for recipe in cells("figure6d"):
        section, gamma = recipe.model, recipe.model.expansion
        omega = gamma * (588 * 256**2 + 588**2 * 256) / 2
        assert section.channels == 3 * section.patch_size**2
        low, high = (
            gamma * (section.channels * s**2 + section.channels**2 * s) / 2
            for s in (section.tokens - 0.5, section.tokens + 0.5)
        )
        assert low <= omega <= high


def test_figure_2a_pairs_are_as_wide_and_as_sparse():
    recipes = cells("figure2a")
    for mixer, mlp in zip(recipes[:2], recipes[2:], strict=True):
        one, other = (model_cost(recipe.model, 32, 10) for recipe in (mixer, mlp))
        assert (one.width, one.hidden_width) == (other.width, other.hidden_width)
        assert other.omega == pytest.approx(one.omega, rel=0.01)
    section = recipes[2].model
    assert section.depth * 2 * section.expansion * section.width**2 == 48 * 4096**2  # 805 M


def test_the_fair_pair_differs_in_width_alone():
    one, other = (load_recipe(FOLDER / f"imagenet/fair_{name}.yaml") for name in ("b16", "wide"))
    costs = [model_cost(recipe.model, 224, 1000) for recipe in (one, other)]
    assert costs[1].connections == pytest.approx(costs[0].connections, rel=2e-3)
    assert costs[1].gamma == pytest.approx(costs[0].gamma, rel=0.02)
    assert costs[1].width > 1.15 * costs[0].width
    assert (one.model.depth, one.model.patch_size) == (other.model.depth, other.model.patch_size)
    assert one.model_copy(update={"model": other.model}) == other


@pytest.mark.parametrize(
    "study", ["svhn_mixer_square", "svhn_mixer_gelu", "mnli_mixer_square", "mnli_mixer_gelu", "mnli_transformer"]
)
def test_pairs_of_depth_and_width_fill_their_budgets(study):
    """Counted on modules: no budget has room for the next width."""
    step = 4 if study == "mnli_transformer" else 1
    widths: dict[int, int] = {}

    def weights(recipe: Recipe, width: int) -> int:
        if width not in widths:
            section = recipe.model.model_copy(update={"depth": 1, "channels": width})
            with torch.device("meta"):
                network = build_model(section, recipe.data.image_size, 3)
            blocks = network.encoder if study == "mnli_transformer" else network.blocks
            widths[width] = sum(p.numel() for p in blocks.parameters())
        return recipe.model.depth * widths[width]

    filled = set()
    for recipe in cells(study):
        width = recipe.model.channels
        most = min(b for b in BUDGETS if b >= weights(recipe, width))
        assert weights(recipe, width + step) > most
        filled.add((recipe.model.depth, most))
    assert {most for _, most in filled} == set(BUDGETS)
    assert len(filled) == len(cells(study))


@pytest.mark.parametrize("name", ["svhn", "mnli"])
def test_squares_stay_finite_in_the_deepest_cells(name):
    """Without norms they would not be after four blocks."""
    for recipe in cells(f"{name}_mixer_square")[:: 8 if name == "svhn" else 9]:
        torch.manual_seed(0)
        network = build_model(recipe.model, recipe.data.image_size, 3)
        given = torch.randn(2, 3, 32, 32) if name == "svhn" else torch.randint(1, 30522, (2, 128))
        network.forward_features(given).sum().backward()
        norms = [p.grad.norm() for p in network.parameters() if p.grad is not None]
        assert torch.isfinite(torch.stack(norms)).all()
