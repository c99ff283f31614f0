"""The page of all results is that of the committed tables, and its words follow from their numbers."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
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


def test_every_figure_of_the_page_is_there(written):
    lines = [line for line in written[0].splitlines() if line.startswith("![")]
    assert lines
    for line in lines:
        assert (ROOT / "docs" / line.partition("](")[2].rstrip(")")).is_file(), line


def test_runs_and_those_that_diverged_are_counted_trials_too(written):
    shown = dict(re.findall(r"/([^/]+)\.md\)\. (\d+ runs, trials included; \d+ diverged)", written[0]))
    assert shown
    for name, words in shown.items():
        states = [json.loads(line)["state"] for line in (TABLES / f"{name}.jsonl").read_text().splitlines()]
        assert words == f"{len(states)} runs, trials included; {states.count('diverged')} diverged", name


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
    values = {"text": "a", "file": "a.json", "left": "runs.1.values", "right": "runs.0.values", "expect": "greater"}
    return Check.model_validate({**values, **keys})


def test_numbers_that_are_swapped_turn_the_word(tmp_path):
    """Two sides of five samples each: by scipy's Welch test, and the other way round by hand."""
    sides = [[1.0, 1.1, 0.9, 1.05, 0.95], [2.0, 2.1, 1.9, 2.2, 1.8]]
    for first, second, word in ((*sides, "supported"), (*reversed(sides), "contradicted")):
        (tmp_path / "a.json").write_text(json.dumps({"runs": [{"values": first}, {"values": second}]}))
        [verdict] = decide([check()], [check_estimate(check(), tmp_path)])
        assert verdict.word == word
        welch = stats.ttest_ind(second, first, equal_var=False)
        assert verdict.interval == pytest.approx(tuple(welch.confidence_interval(0.95)))
        assert verdict.p == pytest.approx(welch.pvalue)


def test_samples_in_pairs(tmp_path):
    sides = [[1.0, 2.0, 3.0, 4.0], [1.2, 2.1, 3.3, 4.2]]
    (tmp_path / "a.json").write_text(json.dumps({"runs": [{"values": side} for side in sides]}))
    [verdict] = decide([check(paired=True)], [check_estimate(check(paired=True), tmp_path)])
    assert verdict.p == pytest.approx(stats.ttest_rel(*sides).pvalue)
    (tmp_path / "a.json").write_text(json.dumps({"runs": [{"values": sides[0]}, {"values": sides[1][:3]}]}))
    with pytest.raises(InputError, match=r"a\.json: runs\.1\.values and runs\.0\.values are no pairs: 3 and 4"):
        check_estimate(check(paired=True), tmp_path)


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
        "Of 2 statements of the papers, tried in the small: 1 supported, 1 regime not reached (corrected over all of "
        "them: 1 supported); of 0 of ours"
    )
    assert "runs of 1 studies" in numbers


def test_samples_against_a_number_and_exact_numbers(tmp_path):
    values = [1.0, 1.1, 0.9]
    (tmp_path / "a.json").write_text(json.dumps({"values": values, "one": 1.5}))
    for left, right, sign in (("values", 1.5, 1), ("one", "values", -1)):
        one = check(left=left, right=right)
        [verdict] = decide([one], [check_estimate(one, tmp_path)])
        assert verdict.p == pytest.approx(stats.ttest_1samp(values, 1.5).pvalue)
        assert verdict.estimate.mean == pytest.approx(-0.5 * sign)
    nothing = check(left="one", right=0.0)
    assert check_estimate(nothing, tmp_path).mean == 1.5
    exact = check(left="one", right=1.5, expect="equal", margin=0.1)
    [verdict] = decide([exact], [check_estimate(exact, tmp_path)])
    assert (verdict.word, verdict.interval, verdict.estimate.exact) == ("supported", (0.0, 0.0), True)


def test_a_file_that_is_not_there_decides_nothing(tmp_path):
    assert check_estimate(check(), tmp_path) is None
    assert decide([check()], [None])[0].word == "with missing runs"
    (tmp_path / "a.json").write_text('{"runs": []}')
    with pytest.raises(InputError, match=r"a\.json: has no runs\.1\.values, there is no 1"):
        check_estimate(check(), tmp_path)
    for place, part in (("runs.first", "first"), ("trials", "trials")):
        with pytest.raises(InputError, match=f"has no {place}, there is no {part}"):
            check_estimate(check(left=place), tmp_path)
    (tmp_path / "papers.yaml").write_text("- {paper: A, entries: []}\n")
    with pytest.raises(InputError, match=r"papers\.yaml: 0\.entries: "):
        read_papers(tmp_path / "papers.yaml")


def test_each_study_with_runs_and_no_search_says_so(written):
    studies = [yaml.safe_load((STUDIES / f"{path.stem}.yaml").read_text()) for path in TRAINED]
    outside = [study for study in studies if "search" not in study and study["figure"]["x"] != "optim.lr"]
    assert written[0].count("**Not under the protocol**") == len(outside)


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
