"""The page of all results is that of the committed tables, and its words follow from their numbers."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.conftest import ROOT
from widemix.errors import InputError
from widemix.estimate.hardware import Cluster
from widemix.estimate.report import estimate
from widemix.recipe import dump_recipe, load_recipe
from widemix.studies import papers
from widemix.studies.claims import decide
from widemix.studies.papers import Check, Entry, Paper, check_estimate, full_size_csv, full_size_hours, read_papers
from widemix.studies.results_page import results_page
from widemix.studies.study import Study, read_study

STUDIES, TABLES = ROOT / "recipes/studies", ROOT / "recipes/studies/results"
TRAINED = [path for path in TABLES.glob("*.jsonl") if path.stem != "baselines"]
CURE = "run `widemix study results --readme README.md`"


@pytest.fixture(scope="module")
def written():
    return results_page(read_papers(), STUDIES, TABLES, os.path.relpath(TABLES, ROOT / "docs"))


def test_the_committed_page_is_that_of_the_tables(written):
    page, numbers, _ = written
    assert (ROOT / "docs/results.md").read_text() == page, CURE
    assert f"\n{numbers}\n" in (ROOT / "README.md").read_text(), CURE


def test_every_study_is_in_the_catalogue():
    entries = [entry for paper in read_papers() for entry in paper.entries]
    named = {name for entry in entries for name in (*entry.studies, *entry.full)}
    chains = {path.stem for path in STUDIES.glob("mixer_small-*.yaml")}  # of no paper; recipes/README.md has them
    assert named | chains == {path.stem for path in STUDIES.glob("*.yaml")}
    assert {path.stem for path in TRAINED} <= named


def test_full_studies_take_the_hours_of_all_their_runs(tmp_path):
    """Of two seeds of two recipes by the roofline of each run; nan where one says nothing of its samples."""
    recipes = {name: load_recipe(ROOT / f"recipes/digits/{name}.yaml") for name in ("s_mixer", "rp_s_mixer")}
    (tmp_path / "own.yaml").write_text(dump_recipe(recipes["s_mixer"]))
    head = "title: t\nsource: s\nseeds: [0, 1]\nfigure: {x: width}\nruns:\n"
    text = f"{head}- {{label: a, recipes: {{Digits: digits/%s}}}}\n"
    (tmp_path / "known.yaml").write_text((text + "- {label: b, recipes: {Digits: digits/%s}}\n") % (*recipes,))
    (tmp_path / "unknown.yaml").write_text(text.replace("digits/%s", "own.yaml"))
    (tmp_path / "once.yaml").write_text(
        (text + "- {label: c, recipes: {Digits: digits/%s}}\n").replace("seeds: [0, 1]\n", "")
        % ("s_mixer", "s_mixer")
    )
    entries = [Entry(figure="1", full=["known", "unknown"]), Entry(figure="2", full=["known", "once"])]
    rows = full_size_csv([Paper(paper="p", entries=entries)], tmp_path, "v100").splitlines()
    found = [estimate(recipe, Cluster(1, "v100"), 1437) for recipe in recipes.values()]
    total = sum(2 * row.value for each in found for row in each if row.name == "hours")
    once = sum(row.value for row in found[0] if row.name == "hours")
    assert rows[:3] == ["study,runs,hours,gpu", f"known,4,{total:.3g},v100", "unknown,2,nan,v100"]
    assert rows[3:] == [f"once,1,{once:.3g},v100"]


def page_of(folder, table="", **keys):
    """The page of one entry of a paper, in a folder of its own, with the committed table of a study."""
    if table:
        shutil.copy(TABLES / f"{table}.jsonl", folder)
    entry = Entry(**{"figure": "figure 1"} | ({"studies": [table]} if table else {}) | keys)
    return lambda: results_page([Paper(paper="A, B & C, 2024: a title", entries=[entry])], STUDIES, folder, "results")


@pytest.mark.parametrize(
    ("keys", "row", "said"),
    [
        ({}, "Here: nothing.", None),
        ({"open": "the data."}, "Here: nothing.", "Open: the data."),
        ({"open": "the data.", "claim": "A|B.", "full": ["figure7", "figure3", "figure5"]},
         r"The paper: A\|B. Here: nothing.",
         "Open: the data; the paper's size, `widemix study run figure7` (1,235 GPU hours); "
         "the paper's size, `widemix study run figure3`; "
         "the paper's size, `widemix study run figure5` (65 GPU hours)."),
        ({"command": "widemix analyse cka runs/a"}, "Here: no statement to decide.", None),
        ({"command": "widemix a", "caption": "Look."}, "Look. Made by `widemix a`.", None),
        ({"studies": ["figure3"], "claim": "C."}, "The paper: C. Here: computed, no training.", None),
        ({"studies": ["figure7"], "claim": "C."}, "The paper: C. Here: withdrawn, to be run.", None),
    ],
)  # fmt: skip
def test_what_is_open_has_its_hours_where_they_are_known(tmp_path, keys, row, said):
    assert full_size_hours(tmp_path) == {}
    (tmp_path / "full_size.csv").write_text(
        "study,runs,hours,gpu\nfigure7,3,1234.6,h100\nfigure3,2,nan,h100\nfigure5,1,65.4,h100\n"
    )
    assert full_size_hours(tmp_path) == {"figure7": 1234.6, "figure5": 65.4}
    page = page_of(tmp_path, **keys)()[0]
    assert f"\n\n{row}\n" in page
    assert [line for line in page.splitlines() if line.startswith("Open: ")] == ([said] if said else [])


def test_a_study_has_no_verdict_before_it_has_ended(tmp_path):
    """Nor core hours, which are of wall clock where cores were not counted. Its search must have ended too."""
    page, table = page_of(tmp_path, "figure2d-small"), tmp_path / "figure2d-small.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    trial, run = (next(row for row in rows if (row["seed"] == 1000) == is_trial) for is_trial in (True, False))
    rows[0] |= {"core_seconds": None, "seconds": 1800.0}
    rows[1] |= {"core_seconds": None, "seconds": None}
    hours = sum(row["core_seconds"] or row["seconds"] or 0 for row in rows) / 3600
    for left, ended in ((None, True), (trial, False), (run, False)):
        kept = [row for row in rows if left is None or row["run"] != left["run"]]
        table.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
        text = page()[0]
        assert ("(`figure2d-small`): its runs have not ended. No verdict yet." in text) != ended
        assert (
            ("**supported" in text)
            == (f"[figure2d-small](results/figure2d-small.md), {hours:.2f} |" in text)
            == ended
        )
        assert (f" diverged; {hours:.2f} core hours." in text) == ended


def check(**keys):
    values = {"text": "a", "file": "a.json", "left": "one.0.values", "right": "other", "expect": "greater"}
    return Check.model_validate({**values, **keys})


LOW, HIGH = [1.0, 1.1, 0.9, 1.05, 0.95], [2.0, 2.1, 1.9, 2.2, 1.8]
PAIRED = {"paired": True}


@pytest.mark.parametrize(
    ("one", "other", "keys", "expected", "mean", "word"),
    [
        (HIGH, LOW, {}, stats.ttest_ind(HIGH, LOW, equal_var=False), 1.0, "supported"),
        (LOW, HIGH, {}, stats.ttest_ind(LOW, HIGH, equal_var=False), -1.0, "contradicted"),
        (HIGH, LOW, PAIRED, stats.ttest_rel(HIGH, LOW), 1.0, "supported"),
        (LOW, None, {"right": 1.5}, stats.ttest_1samp(np.subtract(LOW, 1.5), 0), -0.5, "contradicted"),
        ([1.5], LOW, {}, stats.ttest_1samp(np.subtract(1.5, LOW), 0), 0.5, "supported"),
        ([1.5], None, {"right": 0.0}, None, 1.5, "supported"),
        ([1.5], [1.45], {"expect": "equal", "margin": 0.1}, None, 0.05, "supported"),
    ],
    ids=["samples", "swapped", "pairs", "number", "number first", "exact", "exact and equal"],
)
def test_numbers_of_an_analysis_are_tested_as_scipy_does(tmp_path, one, other, keys, expected, mean, word):
    (tmp_path / "a.json").write_text(json.dumps({"one": [{"values": one}], "other": other}))
    [found] = decide([check(**keys)], [check_estimate(check(**keys), tmp_path)])
    assert (found.word, found.estimate.mean) == (word, pytest.approx(mean))
    assert found.estimate.exact == (expected is None)
    if expected is not None:
        assert found.p == pytest.approx(expected.pvalue)
        interval = expected.confidence_interval(0.95)
        assert found.interval == pytest.approx((interval.low, interval.high))


def test_networks_that_a_linear_baseline_beats_decide_nothing(tmp_path):
    """By a baseline above all of them, above one of the means of depth 2 (50.2 and 47.2 %), and below all."""
    page = page_of(tmp_path, "figure7-small")
    row = {"data": "cifar10-5000", "split": "test", "samples": 5000, "features": "pixels", "majority": 10.0}
    row |= {"linear": 99.0, "penalty": 1.0, "seconds": 1.0, "date": "2026-11-27"}
    (tmp_path / "baselines.jsonl").write_text(json.dumps(row) + "\n")
    beaten, numbers, _ = page()
    assert numbers.startswith("Of 0 statements of the papers, tried in the small: ")
    assert "None yet: no statement is decided." in beaten
    said = "Statements without numbers: 2 of [figure7-small](results/figure7-small.md) (below a linear baseline)."
    assert said in beaten
    assert "Here: 2 below a linear baseline." in beaten
    (tmp_path / "baselines.jsonl").write_text(json.dumps(row | {"linear": 48.5}) + "\n")
    assert said in page()[0]
    (tmp_path / "baselines.jsonl").write_text(json.dumps(row | {"linear": 11.0}) + "\n")
    above, numbers, _ = page()
    assert "elow logistic" not in above
    assert numbers.startswith(
        "Of 2 statements of the papers, tried in the small: 1 supported, 1 regime not reached; corrected over all of "
        "them and not within a study: 1 supported. Of 0 of ours"
    )
    assert "runs of 1 studies" in numbers


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"left": "one.1"}, "has no one.1, there is no 1"),
        ({"left": "one.first"}, "has no one.first, there is no first"),
        ({"left": "trials"}, "has no trials, there is no trials"),
        ({"right": "other", "paired": True}, "one.0.values and other are no pairs: 2 and 1"),
    ],
)
def test_numbers_that_are_not_there_are_named(tmp_path, keys, said):
    """A file that is not there decides nothing."""
    assert decide([check()], [check_estimate(check(), tmp_path)])[0].word == "with missing runs"
    (tmp_path / "a.json").write_text('{"one": [{"values": [1, 2]}], "other": [1]}')
    with pytest.raises(InputError, match=f"^{tmp_path / 'a.json'}: {said}$"):
        check_estimate(check(**keys), tmp_path)


def test_a_paper_without_figures_is_refused(tmp_path):
    (tmp_path / "papers.yaml").write_text("- {paper: A, entries: []}\n")
    with pytest.raises(InputError, match=r"papers\.yaml: 0\.entries: "):
        read_papers(tmp_path / "papers.yaml")


@pytest.mark.parametrize(
    ("x", "seeds", "search", "held"),
    [
        ("width", [0, 1, 2], {"keys": {"optim.lr": {"low": 0.1, "high": 1}}, "trials": 3}, True),
        ("width", [0, 1, 2], None, False),
        ("optim.lr", [0, 1, 2], None, True),
        ("optim.lr", [0, 1, 1], None, False),
    ],
)
def test_the_protocol_asks_to_search_rates_or_compare_them(x, seeds, search, held):
    runs = [{"label": "one", "recipes": {"": "one.yaml"}}]
    study = {"title": "t", "source": "s", "runs": runs, "figure": {"x": x}, "seeds": seeds, "search": search}
    assert Study.model_validate(study).by_protocol is held


def test_the_command_writes_the_page_where_it_is_asked_to(tmp_path, widemix, monkeypatch):
    (tmp_path / "papers.yaml").write_text("- {paper: A paper, entries: [{figure: figure 3, studies: [figure3]}]}\n")
    monkeypatch.setattr(papers.read_papers, "__defaults__", (tmp_path / "papers.yaml",))
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- written by `widemix study results --readme README.md` -->\nold\n<!-- end -->\nz\n")
    code, said = widemix("study", "results", "--report", TABLES, "--to", tmp_path / "r.md", "--readme", readme)
    assert code == 0, said
    assert "### Figure 3\n\nThe paper: The width has a single peak" in (tmp_path / "r.md").read_text()
    before, _, rest = readme.read_text().partition("-->\n")
    assert before.startswith("a\n<!--")
    assert (rest.endswith("<!-- end -->\nz\n"), "old" in rest) == (True, False)


def stated():
    """Every statement of the study files and the catalogue, with where it is written."""
    studies = [(path.stem, claim) for path in sorted(STUDIES.glob("*.yaml")) for claim in read_study(path).claims]
    return studies + [
        (paper.paper, check) for paper in read_papers() for entry in paper.entries for check in entry.checks
    ]


def test_each_statement_of_a_paper_has_its_place_and_words():
    assert [(where, one.text) for where, one in stated() if one.ours == bool(one.place)] == []


@pytest.mark.skipif("WIDEMIX_PAPERS" not in os.environ, reason="WIDEMIX_PAPERS names no folder of the papers' texts")
def test_the_words_of_each_statement_are_at_its_place():
    """Of the line and the four after it, without spaces and hyphens, which texts out of PDFs have elsewhere."""
    for where, one in stated():
        if one.place:
            name, _, line = one.place.rpartition(":")
            lines = (Path(os.environ["WIDEMIX_PAPERS"]) / name).read_text().splitlines()
            near, words = (re.sub(r"[\s-]", "", text) for text in ("".join(lines[int(line) - 1 :][:5]), one.words))
            assert words in near, (where, one.place, one.words)
            assert words not in re.sub(r"[\s-]", "", "".join(lines[int(line) :][:4])), (where, one.place, "later")
