"""Reports of studies as the command writes them: `pytest --regenerate` writes golden/ anew; look at the diff.

That its means and verdicts are right is held against numpy and scipy: test_figure.py, test_claims.py.
"""

import csv
import math
import re
import statistics
from dataclasses import replace

import pytest

from tests.conftest import ROOT
from tests.studies.conftest import RATES, WIDTHS, drawn, plan_of, row_of, runs_of, train
from widemix.errors import Exit
from widemix.lease import Leases
from widemix.models.cost import model_cost
from widemix.studies.plan import make_plan, requirements
from widemix.studies.points import Result, as_csv, lines_of, measured
from widemix.studies.rows import Table
from widemix.studies.study import read_study
from widemix.studies.study_run import unique

GOLDEN = ROOT / "tests/studies/golden"
# Top-1 of the trials and then of the runs, in the order in which they are trained; - is missing, x has diverged.
TOP1 = {
    "widths": "70 72 71 60 61 65 90 91 92 80 80 x 50 - - 40 60 80",
    "curves": "100 64 x x x x",
    "rates": "80 70 75 60 x 71 50 60 -  72 - 73 - -  81 82 81.5 82.5 71 71.5 70.9 71.8 50 50 50 50",
    "sizes": "",
}


def fill(plan, top1s: str) -> None:
    """Put rows into a study's table whose other numbers follow from the top-1 and their place in the order."""
    words = iter(enumerate(top1s.split()))

    def run(study_runs) -> Exit:
        for study_run, (number, word) in zip(study_runs, words, strict=False):
            if word == "-":
                continue
            top1 = None if word == "x" else float(word)
            loss = 2.0 if top1 is None else 3 - top1 / 50
            curve = [
                {"split": split, "epoch": epoch, "loss": loss + number / 8 + 1 / epoch, "top1": 90 - loss * epoch}
                for split in ("train", "eval")
                for epoch in (1, 2, 3)
            ]
            metrics = {"top1": top1, "loss": loss, "train_loss": loss / 200} if top1 else {"top1": None}
            cost = {"core_seconds": 3600.0 * number, "images_per_s": 100.0 * number} if number % 3 else {}
            where = {"commit": ("c1", "0e4c70b76de0")[number % 2], "machine": ("2 CPU cores", "an H100")[number % 2]}
            seconds = 1800.0 + number
            plan.table.append(row_of(study_run, top1, metrics=metrics, curve=curve, seconds=seconds, **where, **cost))
        return Exit.DONE

    if plan.study.search:
        plan.search(run)
    if top1s:
        run(unique(plan.runs()))


@pytest.mark.parametrize("name", TOP1)
def test_a_report_is_the_golden_one(name, tmp_path, widemix, figures, request):
    path = GOLDEN / f"{name}.yaml"
    fill(make_plan(path, read_study(path), Table(tmp_path / f"{name}.jsonl")), TOP1[name])
    code, said = widemix("study", "report", path, "--to", tmp_path)
    assert code == 0, said
    (tmp_path / f"{name}.txt").write_text(drawn(figures[0]))
    (tmp_path / f"{name}.jsonl").unlink(missing_ok=True)
    found = {file.name: file.read_text() for file in tmp_path.iterdir() if file.suffix not in (".png", ".svg")}
    found[f"{name}.md"] = re.sub(r" on \d{4}-\d\d-\d\d", " on DATE", found[f"{name}.md"])
    if request.config.option.regenerate:
        for file, text in found.items():
            (GOLDEN / file).write_text(text)
    assert found == {file.name: file.read_text() for file in GOLDEN.glob(f"{name}*") if file.suffix != ".yaml"}


def test_a_report_of_a_part_or_other_keys_says_so(tmp_path, widemix):
    """And a part decides nothing."""
    claim = "claims:\n- {text: RP is better, left: {line: RP}, right: {line: Normal}, expect: less}\n"
    for overrides in ([], [("train.epochs", "3")]):
        for study_run in runs_of(tmp_path, WIDTHS + claim, overrides):
            train(study_run, tmp_path)
    for options, said, has_claims in (
        ([], "", True),
        (["--only", "*-s_mixer_*"], "--only '*-s_mixer_*'", False),
        (["--train.epochs", "3"], "--train.epochs=3", True),
    ):
        assert widemix("study", "report", tmp_path / "study.yaml", "--to", tmp_path, *options)[0] == 0
        page = (tmp_path / "study.md").read_text()
        assert ("RP is better" in page) == has_claims
        assert page.count("Not the study") == page.count(f"file has it**, but with `{said}`.") == bool(options)
        assert f"`{' '.join(filter(None, ['widemix study run study.yaml', said]))}` trains those" in page


def test_a_report_adds_runs_that_were_trained_elsewhere(tmp_path, widemix):
    """Of a run that was trained twice the row that is there counts; what has ended is not trained again."""
    study_runs = runs_of(tmp_path, WIDTHS)
    here, there, both, report = (tmp_path / name for name in ("here", "there", "both", "report"))
    for number, study_run in enumerate(study_runs[:5]):
        for folder in (there if number < 3 else here, both):
            train(study_run, folder, 60.0 + number)
    train(study_runs[0], here, 10.0)
    for folder, to in ((there, report), (here, report), (both, tmp_path / "whole")):
        assert widemix("study", "report", tmp_path / "study.yaml", "--to", folder, "--report", to)[0] == 0
    for name in ("study.csv", "study.md"):
        assert (report / name).read_text() == (tmp_path / "whole" / name).read_text()
    part = ("--to", tmp_path / "new", "--report", report, "--only", "*-s_mixer_channels-8_*")
    for verb in ("plan", "run", "report"):
        code, output = widemix("study", verb, tmp_path / "study.yaml", *part)
        assert (code, "3 of 3 runs have ended" in output) == (0, True), output
    assert not list((tmp_path / "new").glob("*/done.json"))


@pytest.mark.parametrize(
    ("top1s", "most", "kept"),
    [
        ((60.0, 60.1, 60.2, 70.0, 71.0, 72.0), 0.15, [128]),
        ((60.0, 60.1, 60.2, 70.0, 71.0, 72.0), statistics.stdev([60.0, 60.1, 60.2]), []),
        ((60.0, 60.1, 60.2, 70.0, 71.0, 72.0), None, [128, 256]),
        ((60.0, 70.0, None), 7.0, [256]),  # their deviation is the root of 50
        ((60.0, 70.0, None), 7.1, [128, 256]),
    ],
)
def test_points_whose_seeds_deviate_are_left_out(tmp_path, top1s, most, kept):
    plan = plan_of(tmp_path, WIDTHS)
    for study_run, top1 in zip(plan.study_runs, top1s, strict=False):
        plan.table.append(row_of(study_run, top1))
    figure = plan.study.figure.model_copy(update={"max_std": most})
    assert [point.x for point in lines_of(plan.results(), "Digits", "top1", figure)["Normal"]] == kept


def test_seconds_are_divided_by_the_epochs_that_were_evaluated(tmp_path):
    """By those of the recipe where none was."""
    row = row_of(runs_of(tmp_path, WIDTHS)[0], 50.0, epochs=8, seconds=24.0)
    curve = [{"split": "train", "epoch": 6, "loss": 1.0}, {"split": "eval", "epoch": 4.0, "loss": 1.0}]
    assert [measured(replace(row, curve=own), "epoch_seconds") for own in ([], curve[:1], curve)] == [3, 3, 6]
    assert math.isnan(measured(replace(row, seconds=None), "epoch_seconds"))
    assert math.isnan(measured(replace(row, state="diverged", metrics={"loss": 2.0}), "loss"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e15, "1000000000000000"), (float(2**53), "9.0072e+15"), (1e300, "1e+300"), (0.1234567, "0.123457"),
     (-3.0, "-3"), (7, "7"), (math.nan, "")],
)  # fmt: skip
def test_whole_numbers_of_the_table_have_all_digits(tmp_path, value, text):
    """Others have six; a key that is plotted too is one column."""
    plan = plan_of(tmp_path, WIDTHS.replace("x: width", "x: model.channels, y: [model.channels, error]"))
    head, first = csv.reader(as_csv([Result(plan.study_runs[0], 8, {"error": value})], plan.study).splitlines())
    assert first[head.index("error")] == text
    assert head.count("model.channels") == 1
    assert first[head.index("model.channels")] == "8"


# Plans.


def test_a_plan_adds_up_what_the_open_runs_take(tmp_path, widemix):
    """Of a network whose number of samples nobody knows there are no hours."""
    (tmp_path / "own.yaml").write_text("extends: digits/mixer\n")
    text = WIDTHS.replace("{Digits: digits/s_mixer}", "{Digits: digits/s_mixer, Own: own.yaml}")
    study_runs = runs_of(tmp_path, f"{text}set: {{train.epochs: 30000}}\n")
    train(study_runs[0], tmp_path)
    train(study_runs[1], tmp_path, None)
    train(study_runs[2], tmp_path, done=False)
    assert Leases(tmp_path).take(study_runs[3].name)
    code, output = widemix("study", "plan", tmp_path / "study.yaml", "--to", tmp_path, "--gpu", "h100")
    assert code == 0, output
    *lines, ended, rest = output.splitlines()
    needs, states = requirements(study_runs, "h100"), {0: "done", 1: "diverged", 2: "begun", 3: "running on"}
    for number, (study_run, line) in enumerate(zip(study_runs, lines, strict=True)):
        hours = needs[study_run.name].hours
        assert (hours is None) == (study_run.panel == "Own")
        assert line.startswith(states.get(number, "open"))
        assert line.split()[-3:] == ["?" if hours is None else f"{hours:.2f}", "h", study_run.name]
    assert ended == f"{tmp_path}: 2 of 18 runs have ended"
    hours, size = (sum(getattr(needs[one.name], name) or 0 for one in study_runs[2:]) for name in ("hours", "bytes"))
    assert rest == f"the others take {hours:.1f} hours on one h100, {size / 1e9:.2f} GB of checkpoints"
    assert (tmp_path / "study.jsonl").read_text().count("\n") == 2  # a plan notes what has ended


def test_trials_of_a_search_come_before_its_runs(tmp_path, widemix, monkeypatch):
    """By default in a folder of the study's name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.yaml").write_text(RATES)
    code, output = widemix("study", "plan", "rates.yaml", "--gpu", "a100")
    assert code == 0, output
    *lines, ended, trials, _ = output.splitlines()
    notes = [[*line.split()[:1], *line.split()[2:4]] for line in lines]
    assert notes == 9 * [["open", "h", "trial"]] + 9 * [["open", "h", "run"]]
    assert ended == "runs/rates: 0 of 9 runs have ended"
    assert trials.startswith("9 trials of the search come first")


@pytest.mark.parametrize(
    ("keys", "copies", "epochs"),
    [
        ({}, 3, 30),  # weights and two moments of AdamW
        ({"train.keep_best": "top1"}, 3, 30),
        ({"train.ema_decay": "0.9", "train.epochs": "300"}, 4, 300),
    ],
)
def test_requirements_are_of_the_checkpoints_that_are_kept(tmp_path, keys, copies, epochs):
    plain, other = runs_of(tmp_path, WIDTHS)[0], runs_of(tmp_path, WIDTHS, list(keys.items()))[0]
    weights, train_keys = model_cost(other.recipe.model, 8, 10).parameters, other.recipe.train
    needs = requirements([plain, other], "v100")
    assert needs[other.name].bytes == 4 * weights * copies * (train_keys.keep_last + ("train.keep_best" in keys))
    assert needs[other.name].hours == pytest.approx(epochs / 30 * needs[plain.name].hours, rel=1e-3)
    assert requirements([plain], "h100")[plain.name].hours < needs[plain.name].hours
