"""The recipes' table is what the command writes, and the data of studies follow the laws that they name."""

import re

import pytest
import torch

from tests.conftest import ROOT
from widemix.estimate.recipe_tables import BEGIN, END, hours, measured, refresh, row, shipped
from widemix.models.cost import model_cost
from widemix.models.registry import build_model
from widemix.recipe import Recipe, load_recipe
from widemix.studies.quantity import value_of
from widemix.studies.study import read_study, study_runs_of

FOLDER = ROOT / "recipes"
STUDIES = sorted(FOLDER.glob("studies/*.yaml"))


STALE = "stale: `widemix cost --recipes recipes` writes it"


def test_the_table_is_the_commands():
    lines = (FOLDER / "README.md").read_text().splitlines()
    named = [line for line in lines if line.startswith("| `") and ".yaml` |" in line]
    rows = [row(path) for path in shipped(FOLDER)]
    assert [line[: len(text)] for line, text in zip(named, rows, strict=False)] == rows, STALE
    assert measured(FOLDER) == lines[lines.index(measured(FOLDER)[0]) :][: len(measured(FOLDER))], STALE


def test_the_tables_are_written_between_their_lines(tmp_path):
    for name in ("mnist/monarch", "digits/mixer"):
        (tmp_path / name).parent.mkdir()
        text = (FOLDER / f"{name}.yaml").read_text().replace("../base/", f"{FOLDER}/base/")
        (tmp_path / f"{name}.yaml").write_text(text.replace("#   source  ", "#   measured  of a test\n#   source  "))
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}an old table\n{END}after\n")
    assert refresh(tmp_path) == tmp_path / "README.md"
    head, rule, *rows = (tmp_path / "README.md").read_text().split("\n\n")[1].splitlines()
    assert [head.count("|"), rule.count("|")] == [11, 11]
    paths = [tmp_path / "digits/mixer.yaml", tmp_path / "mnist/monarch.yaml"]
    assert rows == [f"{row(path)} {hours(path)} |" for path in paths]
    rest = (tmp_path / "README.md").read_text()
    assert rest.startswith(f"before\n{BEGIN}\n| recipe |")
    short = "".join(f"| `{path.parent.name}/{path.name}` | of a test |\n" for path in paths)
    assert rest.endswith(f"\n| recipe | small-scale measurement |\n|---|---|\n{short}\n{END}after\n")


@pytest.mark.skipif(not torch.__version__.startswith("2.15."), reason="the table's hours are those of torch 2.15")
@pytest.mark.parametrize("name", ["digits/rp_mixer", "mnist/monarch", "imagenet/mixer_s32"])
def test_the_tables_hours_are_the_commands(name):
    """Of a few recipes: each takes a second, and the other columns hold what the hours follow from."""
    path = FOLDER / f"{name}.yaml"
    assert f"{row(path)} {hours(path)} |\n" in (FOLDER / "README.md").read_text(), STALE


def test_every_recipe_is_named_in_the_readme():
    readme = (FOLDER / "README.md").read_text()
    assert all(f"`{path.relative_to(FOLDER)}`" in readme for path in shipped(FOLDER))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_claim_is_that_of_its_paper(path):
    """The page of a study says "the paper's claim": what we expect ourselves has no place there."""
    study = read_study(path)
    paper = r"(Hayase & Karakida|Navon & Bronstein|Tolstikhin et al\.|Qiu et al\.) 20\d\d, "
    assert not study.claim or re.match(paper, study.source)


def study_runs(study: str, line: str = "") -> list[Recipe]:
    """The recipes of a study's first seed, or of one of its lines."""
    path = FOLDER / f"studies/{study}.yaml"
    parsed = read_study(path)
    chosen = study_runs_of(path, parsed.model_copy(update={"seeds": parsed.seeds[:1]}))
    return [study_run.recipe for study_run in chosen if study_run.line.startswith(line)]


def test_figure_6d_has_the_omega_of_mixer_b16():
    """Appendix C.5: Omega = 290,217,984 at gamma 4 is that of (S, C) = (196, 768), and S the nearest to it."""
    omega = 4 * (768 * 196**2 + 768**2 * 196) / 2
    assert omega == 290_217_984
    recipes = study_runs("figure6d", "Normal")
    assert [recipe.model.patch_size for recipe in recipes] == [7, 8, 14, 16, 28, 32]
    for section in (recipe.model for recipe in recipes):
        assert section.channels == 3 * section.patch_size**2
        low, high = (
            section.expansion * (section.channels * s**2 + section.channels**2 * s) / 2
            for s in (section.project_tokens - 0.5, section.project_tokens + 0.5)
        )
        assert low <= omega <= high


def test_figure_4_pairs_have_equal_gamma_m():
    """Appendix C.2: gamma m of both is 2 S C, though the first token mixing of the Mixers has other inputs."""
    mixers, mlps = (
        [value_of("hidden_width", recipe) for recipe in study_runs("figure4", line)]
        for line in ("MLP-Mixer", "SW-MLP")
    )
    assert mixers == mlps
    assert (mixers[0], mixers[-1]) == (2 * 4 * 360, 2 * 64 * 64)


def test_figure_s2_is_drawn_over_gamma_m():
    """Its printed axis has labels from 2,000 to 10,000: m goes from 540 to 4,096, gamma m from 2,160 to 16,384."""
    widths = [value_of("width", recipe) for recipe in study_runs("figureS2")]
    assert (min(widths), max(widths)) == (540, 4096)
    x = read_study(FOLDER / "studies/figureS2.yaml").figure.x
    assert [value_of(x, recipe) for recipe in study_runs("figureS2")] == [4 * width for width in widths]


def test_figure_2a_pairs_are_as_wide_and_as_sparse():
    """The SW-MLP of p = 1/C has the widths and, but for the first block, the connections of the Mixer of S = C."""
    mixers, mlps = study_runs("figure2a")[:2], study_runs("figure2a")[2:]
    assert [mixer.model.channels for mixer in mixers] == [64, 32]
    assert all(len([mlp for mlp in mlps if mlp.model.channels == c]) == 11 for c in (64, 32))
    for mixer in mixers:
        size = mixer.model.channels
        mlp = next(mlp for mlp in mlps if mlp.model.channels == size and mlp.model.density * size == 1)
        one, other = (model_cost(recipe.model, 32, 10) for recipe in (mixer, mlp))
        assert (one.width, one.max_width) == (other.width, other.max_width)
        assert mlp.model.depth == 2 * mixer.model.depth
        assert other.omega == pytest.approx(one.omega, rel=0.01 if size == 64 else 0.1)


def test_the_fair_pair_differs_in_width_alone():
    one, other = (load_recipe(FOLDER / f"imagenet/fair_{name}.yaml") for name in ("b16", "wide"))
    costs = [model_cost(recipe.model, 224, 1000) for recipe in (one, other)]
    assert costs[1].connections == pytest.approx(costs[0].connections, rel=2e-3)
    assert costs[1].gamma == pytest.approx(costs[0].gamma, rel=0.02)
    assert costs[1].width > 1.15 * costs[0].width
    assert (one.model.depth, one.model.patch_size) == (other.model.depth, other.model.patch_size)
    assert one.model_copy(update={"model": other.model}) == other


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["svhn", "mnli"])
def test_squares_stay_finite_in_the_deepest_cells(name):
    """Without norms they would not be after four blocks."""
    line = "squares" if name == "svhn" else "Mixer, squares"
    for recipe in study_runs(f"depth_to_width_{name}", line)[:: 8 if name == "svhn" else 9]:
        torch.manual_seed(0)
        network = build_model(recipe.model, recipe.data.image_size, 3)
        given = torch.randn(2, 3, 32, 32) if name == "svhn" else torch.randint(1, 30522, (2, 128))
        network.forward_features(given).sum().backward()
        norms = [p.grad.norm() for p in network.parameters() if p.grad is not None]
        assert torch.isfinite(torch.stack(norms)).all()
