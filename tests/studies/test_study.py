"""A study runs its cells, leaves out those that are done, goes on after a failure, and draws what they reached."""

import json
import math

import pytest
from matplotlib.image import imread

from pipeline.errors import InputError
from pipeline.models.cost import model_cost
from pipeline.recipe import dump_recipe, recipe_hash
from pipeline.studies.plan import read_studies
from pipeline.studies.report import collect, write_report
from tests.conftest import ROOT, SMALL, Command

STUDIES = sorted((ROOT / "recipes/studies").glob("*.yaml"))


def pretend(cell, folder, top1=50.0):
    """A finished run of a cell."""
    run = folder / cell.name
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(dump_recipe(cell.recipe()))
    done = {"top1": top1, "top5": 90.0, "loss": 1.0, "step": 1, "seconds": 2.0}
    (run / "done.json").write_text(json.dumps({**done, "recipe": recipe_hash(cell.recipe())}))


def write(folder, text):
    path = folder / "study.yaml"
    path.write_text(text.replace("DIGITS", str(ROOT / "recipes/digits")))
    return path


TWO = "- recipes: [DIGITS/s_mixer.yaml]\n  keys: [model.channels]\n  cells: [[8], [16]]\n"


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_lines_of_a_shipped_study_are_functions(path):
    """No two cells of a line share their x, or the figure would zigzag."""
    seen = set()
    for cell in read_studies([path]):
        section = cell.recipe().model
        width = getattr(section, "width", None) or section.channels
        x = section.depth / math.log2(width) if cell.across == "depth_to_width" else model_cost(section, 32, 10).width
        assert (cell.line, x) not in seen
        seen.add((cell.line, x))
    assert len({line for line, _ in seen}) < len(seen)


def test_a_cell_is_its_recipe_with_its_values_and_those_of_all(tmp_path):
    cells = read_studies([write(tmp_path, TWO)], [("train.epochs", "3")])
    assert [cell.name for cell in cells] == ["digits-s_mixer_channels-8", "digits-s_mixer_channels-16"]
    assert [(c.recipe().model.channels, c.recipe().train.epochs) for c in cells] == [(8, 3), (16, 3)]
    other = tmp_path / "other.yaml"
    other.write_text(write(tmp_path, TWO).read_text().replace("s_mixer", "rp_s_mixer"))
    both = read_studies([write(tmp_path, TWO), other])
    assert [cell.line for cell in both] == 2 * ["digits-s_mixer"] + 2 * ["digits-rp_s_mixer"]
    assert [c.name for c in read_studies([write(tmp_path, TWO)], only="*-16")] == ["digits-s_mixer_channels-16"]


@pytest.mark.parametrize(
    ("text", "overrides", "only", "complaint"),
    [
        (TWO, [("model.channels", "8")], "*", "--model.channels: .* varies it"),
        (TWO, [], "x*", "no cell is called x.; the first is digits-s_mixer_channels-8"),
        (TWO.replace("[16]", "[8]"), [], "*", "the cell digits-s_mixer_channels-8 is duplicated"),
        (TWO.replace("[16]", "[16, 2]"), [], "*", r"the cell \[16, 2\] has 2 values, there are 1 keys"),
        (TWO.replace("keys", "key"), [], "*", "0.keys: Field required"),
        (TWO.replace("channels", "chanels"), [], "*", "model.chanels.*channels"),
        (TWO.replace("cells: [[8], [16]]", "cells: [[8], [0]]"), [], "*", "model.channels"),
        ("- [", [], "*", "is not YAML"),
        ("a: 1", [], "*", "the whole file: Input should be a valid list"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_trained(tmp_path, text, overrides, only, complaint):
    with pytest.raises(InputError, match=complaint) as found:
        read_studies([write(tmp_path, text)], overrides, only)
    assert "\n" not in str(found.value)


def test_a_report_has_the_finished_cells_at_their_widths(tmp_path):
    cells = read_studies([write(tmp_path, TWO)])
    with pytest.raises(InputError, match="none of the study's 2 cells"):
        collect(cells, tmp_path)
    for cell, top1 in zip(cells, (40.0, 60.0), strict=True):
        pretend(cell, tmp_path, top1)
    points = collect(cells, tmp_path)
    assert [(p.x, p.top1) for p in points] == [(16 * 8, 40.0), (16 * 16, 60.0)]
    table, figure = write_report(points, tmp_path)
    rows = table.read_text().splitlines()
    assert [row.split(" | ")[4] for row in rows[2:]] == ["40.00", "60.00"]
    assert imread(figure)[:, :, :3].std() > 0.05


def test_a_cell_is_done_only_by_its_own_recipe(tmp_path):
    path = write(tmp_path, TWO)
    cell = read_studies([path])[0]
    assert not cell.is_done(tmp_path)
    pretend(cell, tmp_path)
    assert cell.is_done(tmp_path)
    assert not read_studies([path], [("train.epochs", "3")])[0].is_done(tmp_path)


def test_run_goes_on_after_a_failure_and_leaves_out_what_is_done(tmp_path, digits):
    path = write(tmp_path, TWO.replace("[16]", "[16], [24]"))
    cuts = (*SMALL, "--train.max_steps", "1", "--data.path", str(digits))
    pairs = [(name.removeprefix("--"), value) for name, value in zip(cuts[::2], cuts[1::2], strict=True)]
    done, broken, missing = read_studies([path], pairs)
    folder = tmp_path / "runs"
    pretend(done, folder)
    (folder / broken.name).mkdir()
    (folder / broken.name / "mine.txt").touch()
    record = folder / done.name / "metrics.jsonl"
    code, output = Command("study", "run", path, "--to", folder, "--ranks", "1", *cuts).wait()
    assert (code, "1 of 3 cells are done" in output) == (2, True), output
    assert f"{broken.name}: is not empty and not a run folder" in output
    assert not missing.is_done(folder)  # a mistake would be made again by every other cell
    (folder / broken.name / "recipe.yaml").write_text(dump_recipe(broken.recipe()))
    (folder / broken.name / "metrics.jsonl").mkdir()
    code, output = Command("study", "run", path, "--to", folder, "--ranks", "1", *cuts).wait()
    assert (code, f"1 of 3 cells failed, {broken.name} first" in output) == (1, True), output
    assert missing.is_done(folder)
    assert not record.exists()  # the finished one was left alone
