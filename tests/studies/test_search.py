"""The search before a study's runs: a function of the results so far, widened at its edge, on a held-out split."""

import csv
import io
import json
import math
from dataclasses import replace

import pytest
from scipy.stats import qmc

from tests.conftest import ROOT
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.errors import Exit, InputError, RunError
from widemix.recipe import dump_recipe
from widemix.studies.page import as_page, write_report
from widemix.studies.plan import make_plan
from widemix.studies.protocol import Range, Search
from widemix.studies.rows import Table
from widemix.studies.search import arms as search_arms
from widemix.studies.search import as_csv, best, chosen_runs
from widemix.studies.study import read_study

STUDY = """
title: t
source: s
seeds: [0, 1, 2]
set: {eval.every_epochs: 1000}
search: {keys: {optim.lr: {low: 0.001, high: 0.256}}, trials: 3, widen: 3, set: {train.epochs: 3}}
runs:
- label: Normal
  recipes: {Digits: ROOT/recipes/digits/s_mixer.yaml}
  axes: {model.channels: [8, 16]}
- label: RP
  recipes: {Digits: ROOT/recipes/digits/rp_s_mixer.yaml}
  seeded: [model.permutation_seed]
figure: {x: width}
"""
OF_NUMBERS = "data.targets: regression, train.loss: mse, augment.smoothing: 0"
SIX = ", ".join(f"optim.{name}: {{low: 0.1, high: 0.9}}" for name in ("a", "b", "c", "d", "e", "f"))
PEAKS = {("Normal", 8): 0.016, ("Normal", 16): 0.2, ("RP", 64): 1e-9}  # RP: beyond all that may be tried


@pytest.fixture
def plan(tmp_path):
    return plan_of(tmp_path, STUDY)


def plan_of(folder, text, table="study.jsonl"):
    path = folder / "study.yaml"
    path.write_text(text.replace("ROOT", str(ROOT)))
    return make_plan(path, read_study(path), Table(folder / table))


class Trainer:
    """Ends runs at once: the top-1 has its peak at the rate of `PEAKS`; from a rate of 1 on runs diverge."""

    def __init__(self, plan, folder, stop_at=None, kill=None):
        self.plan, self.folder, self.stop_at, self.kill, self.tried = plan, folder, stop_at, kill, []

    def __call__(self, study_runs):
        for study_run in study_runs:
            if len(self.tried) == self.stop_at:
                return Exit.REQUEUE
            recipe = study_run.recipe
            self.tried.append(study_run.name)
            if self.kill == len(self.tried):
                raise RunError("killed by SIGKILL")
            run = self.folder / study_run.name
            run.mkdir(exist_ok=True, parents=True)
            (run / "recipe.yaml").write_text(dump_recipe(recipe))
            (run / "environment.json").write_text("{}")
            (run / "metrics.jsonl").write_text("")
            peak = PEAKS[study_run.line, recipe.model.channels]
            top1 = None if recipe.optim.lr > 0.9 else 90 - 10 * abs(math.log10(recipe.optim.lr / peak))
            (run / "done.json").write_text(json.dumps({"top1": top1, "loss": 1.0, "seconds": 1.0}))
            self.plan.table.add_finished([study_run], self.folder)
        return Exit.DONE


def outcomes(plan):
    return {arm.name: [(trial.values["optim.lr"], trial.top1) for trial in trials] for arm, trials in plan.searched()}


def test_trials_are_even_and_those_at_an_edge_are_widened(plan, tmp_path):
    assert plan.search(Trainer(plan, tmp_path / "runs")) == Exit.DONE
    normal8, normal16, rp = outcomes(plan).values()
    assert [rate for rate, _ in normal8] == [0.016, 0.004, 0.064]  # the middle first, a factor of 4 apart
    assert [rate for rate, _ in normal16] == [0.016, 0.004, 0.064, 0.256, 1.02]  # 0.064 was best, then 0.256
    assert [rate for rate, _ in rp] == [0.016, 0.004, 0.064, 0.001, 0.00025, 6.25e-05]
    edges = [arm.at_edge(trials) for arm, trials in plan.searched()]
    assert edges == [False, False, True]  # three more than planned, and still at the edge: it says so
    winner = best(plan.searched()[1][1])
    assert winner.values == {"optim.lr": 0.256}
    assert winner.top1 == pytest.approx(90 - 10 * math.log10(0.256 / 0.2), abs=1e-3)


@pytest.mark.parametrize(
    ("ties", "chosen", "tried"),
    [
        (0.0, [0.016, 0.256, 6.25e-05], [3, 5, 6]),
        (3.8, [0.016, 0.256, 6.25e-05], [3, 5, 6]),
        (4.0, [0.016, 0.064, 6.25e-05], [3, 4, 6]),  # 0.256 is 3.9 better than 0.064, and no more is tried
        (9.0, [0.004, 0.016, 6.25e-05], [4, 3, 6]),  # 0.004 is at the edge, 0.001 too bad
    ],
)
def test_near_ties_go_to_the_smaller_rate(tmp_path, ties, chosen, tried):
    plan = plan_of(tmp_path, STUDY.replace("widen: 3,", f"widen: 3, ties: {ties},"))
    assert plan.search(Trainer(plan, tmp_path / "runs")) == Exit.DONE
    assert list(dict.fromkeys(run.recipe.optim.lr for run in plan.runs())) == chosen
    assert [len(trials) for _, trials in plan.searched()] == tried


def test_trials_use_the_held_out_split_and_another_seed_and_runs_the_chosen_value(plan, tmp_path):
    assert {study_run.recipe.optim.lr for study_run in plan.runs()} == {0.004}  # the recipe's, before the search
    plan.search(Trainer(plan, tmp_path / "runs"))
    for arm, trials in plan.searched():
        for trial in trials:
            recipe = trial.study_run.recipe
            assert (recipe.data.eval_split, recipe.train.epochs, recipe.train.seed) == ("holdout", 3, 1000)
        assert {study_run.name for study_run in arm.study_runs}.isdisjoint(trial.study_run.name for trial in trials)
    runs = plan.runs()
    assert all(one is other for one, other in zip(runs, plan.runs(), strict=True))  # their recipes are read once
    assert [(study_run.line, study_run.recipe.optim.lr, study_run.recipe.train.seed) for study_run in runs] == [
        *[("Normal", 0.016, seed) for seed in (0, 1, 2)],
        *[("Normal", 0.256, seed) for seed in (0, 1, 2)],
        *[("RP", 6.25e-05, seed) for seed in (0, 1, 2)],
    ]
    assert {study_run.recipe.data.eval_split for study_run in runs} == {"test"}
    assert [study_run.recipe.model.permutation_seed for study_run in runs[6:]] == [0, 1, 2]
    assert plan.searched()[2][1][0].study_run.recipe.model.permutation_seed == 1000


def test_runs_of_before_the_search_are_no_results_of_a_point_that_is_still_searched(plan, tmp_path):
    trainer = Trainer(plan, tmp_path / "runs", stop_at=9 + 3)
    trainer(plan.runs())  # with the recipe's rate, as before the file had a search
    assert [result.row for result in plan.results()] == [None] * 9
    assert plan.search(trainer) == Exit.REQUEUE  # three trials later, in which the first point is done
    assert len(plan.runs()) == 9
    assert [result.row for result in plan.results()] == [None] * 9
    trainer.stop_at = None
    assert plan.search(trainer) == Exit.DONE
    trainer(plan.runs())
    assert [result.row.run for result in plan.results()] == [study_run.name for study_run in plan.runs()]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stop_at", [0, 1, 4, 9, 11])
def test_a_search_that_was_stopped_or_killed_is_the_one_that_was_not(plan, tmp_path, stop_at):
    plan.search(Trainer(plan, tmp_path / "runs"))
    (tmp_path / "second").mkdir()
    stopped = plan_of(tmp_path / "second", STUDY)
    assert stopped.search(Trainer(stopped, tmp_path / "second" / "runs", stop_at=stop_at)) == Exit.REQUEUE
    again = plan_of(tmp_path / "second", STUDY)  # the table alone is left
    with pytest.raises(RunError):
        again.search(Trainer(again, tmp_path / "second" / "runs", kill=1))
    last = plan_of(tmp_path / "second", STUDY)
    trainer = Trainer(last, tmp_path / "second" / "runs")
    assert last.search(trainer) == Exit.DONE
    assert outcomes(last) == outcomes(plan)
    assert len(trainer.tried) == len(set(trainer.tried)) == 14 - stop_at  # a trial that was killed is tried again
    more = Trainer(last, tmp_path / "second" / "runs")
    assert last.search(more) == Exit.DONE
    assert more.tried == []


def test_more_trials_repeat_none_and_are_those_of_a_longer_search(tmp_path):
    """The values are a Halton sequence, as scipy computes it."""
    few = Search(keys={"optim.lr": Range(low=1e-4, high=1.0)}, trials=4, widen=0)
    for count in (4, 8):
        plan = plan_of(tmp_path, STUDY.replace("trials: 3, widen: 3", f"trials: {count}, widen: 0"))
        values = [trial.values["optim.lr"] for trial in plan.searched(few.model_copy(update={"trials": count}))[0][1]]
        unit = qmc.Halton(1, scramble=False).random(count + 1)[1:, 0]
        assert values == pytest.approx([10 ** (-4 + 4 * u) for u in unit], rel=6e-3)  # three digits
        assert len(set(values)) == count
    two = Search(
        keys={"optim.lr": Range(low=1e-4, high=1.0), "optim.momentum": Range(low=0, high=0.9, log=False)}, trials=6
    )
    values = [tuple(trial.values.values()) for trial in plan.searched(two)[0][1]]
    unit = qmc.Halton(2, scramble=False).random(7)[1:]
    for (rate, momentum), (u, v) in zip(values, unit, strict=True):
        assert rate == pytest.approx(10 ** (-4 + 4 * u), rel=6e-3)
        assert momentum == pytest.approx(0.9 * v, abs=6e-3)


def test_the_table_of_trials_has_each_with_its_value_and_what_became_of_it(plan, tmp_path):
    plan.search(Trainer(plan, tmp_path / "runs", stop_at=13))
    searched = plan.searched()
    table = as_csv(searched)
    assert "\r" not in table
    head, *lines = csv.reader(io.StringIO(table))
    assert head == ["point", "optim.lr", "top1", "state", "run"]
    expected = []
    for arm, trials in searched:
        for trial in trials:
            rate, top1 = trial.values["optim.lr"], trial.top1
            state = "missing" if top1 is None else "diverged" if rate > 0.9 else "done"
            shown = f"{top1}" if state == "done" else ""
            expected.append([arm.name, f"{rate}", shown, state, trial.study_run.name])
    assert lines == expected
    assert {state for *_, state, _ in lines} == {"done", "diverged", "missing"}


def test_the_page_has_what_was_chosen_for_each_point_and_of_how_many_trials(plan, tmp_path):
    trainer = Trainer(plan, tmp_path / "runs", stop_at=13)
    for state in ("not complete", "at the edge"):
        plan.search(trainer)
        page = as_page(plan.results(), plan.study, "study.yaml", plan.searched())
        assert "Values with the best top-1 on the split `holdout`, of single runs with seed 1000 " in page
        assert "([study_search.csv](study_search.csv)):\n" in page
        assert "\n| point | optim.lr | top-1 (%) | trials | diverged | |\n" in page
        rows = [line for line in page.splitlines() if line.startswith("| Digits, ")]
        third = {"not complete": "| 0.00025 | 36.02 | 5 |", "at the edge": "| 6.25e-05 | 42.04 | 6 |"}[state]
        assert rows[-3:] == [
            "| Digits, Normal, model.channels 8 | 0.016 | 90.00 | 3 | 0 |  |",
            "| Digits, Normal, model.channels 16 | 0.256 | 88.93 | 5 | 1 |  |",
            f"| Digits, RP {third} 0 | {state} |",
        ]
        trainer.stop_at = None


def test_the_command_prints_what_each_point_has_chosen_and_writes_all_trials(plan, tmp_path, monkeypatch, capsys):
    trainer = Trainer(plan, tmp_path / "runs")
    monkeypatch.setattr("widemix.cli.study._trained", lambda _: (plan, tmp_path))
    monkeypatch.setattr("widemix.cli.study._runner", lambda *_: trainer)
    words = ["study", "search", str(plan.path), "--to", str(tmp_path)]
    assert run_command(make_parser(), argv=words) == Exit.DONE
    table = tmp_path / "study_search.csv"
    assert capsys.readouterr().out.splitlines() == [
        "Digits, Normal, model.channels 8: optim.lr 0.016, top-1 90.00 % on holdout",
        "Digits, Normal, model.channels 16: optim.lr 0.256, top-1 88.93 % on holdout",
        "Digits, RP: optim.lr 6.25e-05, top-1 42.04 % on holdout, at the edge of what was tried",
        f"all 14 trials are in {table}",
    ]
    assert table.read_text() == as_csv(plan.searched())
    assert run_command(make_parser(), argv=[*words, "--trials", "4"]) == Exit.DONE
    searched = plan.searched(plan.study.search.model_copy(update={"trials": 4}))
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"all {sum(len(own) for _, own in searched)} trials are in {table}"
    )
    assert table.read_text() == as_csv(searched)


def test_runs_follow_once_the_search_is_complete(plan, tmp_path, monkeypatch):
    trainer, calls = Trainer(plan, tmp_path / "runs", stop_at=2), []
    monkeypatch.setattr("widemix.cli.study._trained", lambda _: (plan, tmp_path))
    monkeypatch.setattr("widemix.cli.study._runner", lambda *_: lambda runs: calls.append(1) or trainer(runs))
    for number, verb in enumerate(("search", "run"), start=1):
        assert run_command(make_parser(), argv=["study", verb, str(plan.path)]) == Exit.REQUEUE
        assert (len(trainer.tried), len(calls)) == (2, number)  # what is stopped trains nothing more
    trainer.stop_at = None
    assert run_command(make_parser(), argv=["study", "run", str(plan.path)]) == Exit.DONE
    assert trainer.tried[14:] == [study_run.name for study_run in plan.runs()]


def test_a_point_all_of_whose_trials_diverge_says_so_and_is_not_widened(tmp_path, monkeypatch, capsys):
    plan = plan_of(tmp_path, STUDY.replace("low: 0.001, high: 0.256", "low: 1, high: 256"))
    monkeypatch.setattr("widemix.cli.study._trained", lambda _: (plan, tmp_path))
    monkeypatch.setattr("widemix.cli.study._runner", lambda *_: Trainer(plan, tmp_path / "runs"))
    assert run_command(make_parser(), argv=["study", "search", str(plan.path)]) == Exit.DONE
    *points, last = capsys.readouterr().out.splitlines()
    assert [point.rpartition(": ")[2] for point in points] == ["all diverged"] * 3
    assert last.startswith("all 9 trials are in ")


def test_only_a_result_that_is_not_finite_is_final(tmp_path):
    text = STUDY.replace("high: 0.256", "high: 256").replace("0.001", "0.01")
    plan = plan_of(tmp_path, text)
    trainer = Trainer(plan, tmp_path / "runs")
    plan.search(trainer)
    (_, trials), *_ = plan.searched()
    assert [math.isnan(trial.top1) for trial in trials[:3]] == [True, False, True]  # 1.6, 0.126, 20.2
    rows = list(csv.DictReader(as_csv(plan.searched()).splitlines()))
    assert [row["state"] for row in rows[:3]] == ["diverged", "done", "diverged"]
    assert rows[0]["top1"] == ""
    again = Trainer(plan_of(tmp_path, text), tmp_path / "runs")
    assert again.plan.search(again) == Exit.DONE
    assert again.tried == []
    arm = plan.searched()[0][0]
    with pytest.raises(InputError, match="all 1 trials diverged"):
        chosen_runs(arm, [replace(trials[0], top1=math.nan)])


def test_an_entry_searches_nothing_where_the_study_does_not(tmp_path):
    text = STUDY.replace("  seeded:", "  search: {optim.weight_decay: {low: 0.01, high: 1}}\n  seeded:")
    with pytest.raises(InputError, match=r"runs\.1\.search: the study has no search"):
        plan_of(tmp_path, text.replace(text[text.index("search:") : text.index("runs:")], ""))


def test_an_entry_may_search_keys_of_its_own(tmp_path):
    text = STUDY.replace(
        "  seeded: [model.permutation_seed]\n",
        "  search: {optim.weight_decay: {low: 0.01, high: 1}}\n  seeded: [model.permutation_seed]\n",
    )
    arms = [
        (arm.study_runs[0].line, list(arm.ranges), len(trials)) for arm, trials in plan_of(tmp_path, text).searched()
    ]
    assert arms == [
        ("Normal", ["optim.lr"], 3),
        ("Normal", ["optim.lr"], 3),
        ("RP", ["optim.lr", "optim.weight_decay"], 3),
    ]
    plan = plan_of(tmp_path, text)
    plan.search(Trainer(plan, tmp_path / "runs"))
    rows = list(csv.DictReader(as_csv(plan.searched()).splitlines()))
    assert [bool(row["optim.weight_decay"]) for row in rows] == [row["point"] == "Digits, RP" for row in rows]
    page = as_page(plan.results(), plan.study, "study.yaml", plan.searched())
    assert "\n| point | optim.lr | optim.weight_decay | top-1 (%) | trials | diverged | |\n" in page
    assert "\n| Digits, Normal, model.channels 8 | 0.016 |  | 90.00 | 3 | 0 |  |\n" in page
    trials = len(plan.searched()[2][1])
    assert f"; {3 + 5 + trials} trials of the search; " in page


def arm_of(tmp_path, search, text=STUDY):
    """The first point of a study, whose trials' top-1 is their first value's by the function given."""
    plan = plan_of(tmp_path, text)
    return search_arms(plan.study_runs, search, [{}, {}])[0]


def test_of_several_keys_each_is_widened_by_the_distance_of_its_trials_as_far_as_recipes_allow(tmp_path):
    """Nine trials of two keys are three of each: a quarter of their ranges apart."""
    rates = {"optim.lr": Range(low=1e-4, high=1.0), "optim.weight_decay": Range(low=0.0, high=0.8, log=False)}
    arm = arm_of(tmp_path, Search(keys=rates, trials=9, widen=2, split="train", seed=7))
    for sign, widened in ((1, [(-3 / 16, 8 / 9), (1 / 16, 8 / 9 + 1 / 4)]), (-1, [])):
        trials = arm.trials(lambda run, sign=sign: 50 + sign * run.recipe.optim.weight_decay)
        assert [tuple(trial.values.values()) for trial in trials[9:]] == [
            (pytest.approx(10 ** (-4 + 4 * u), rel=6e-3), pytest.approx(0.8 * v, abs=1e-3)) for u, v in widened
        ]  # below 0 no recipe has a weight decay
        assert arm.at_edge(trials) is bool(widened)
    recipe = trials[0].study_run.recipe
    assert (recipe.data.eval_split, recipe.train.seed) == ("train", 7)
    linear = Range(low=0.5, high=0.9, log=False)
    assert [linear.at(fraction) for fraction in (-0.25, 0, 0.25, 1)] == [0.4, 0.5, 0.6, 0.9]
    assert (linear.fraction(0.6), rates["optim.lr"].fraction(1e-2)) == (pytest.approx(0.25), pytest.approx(0.5))
    equal = arm.trials(lambda run: 50.0)
    assert best(equal) is equal[0]


def test_few_trials_are_widened_by_the_distance_nearest_to_theirs_below_first_and_when_all_have_ended(tmp_path):
    """Eight trials of two keys are 2.8 of each, a quarter of their ranges apart; one is in the middle."""
    rate, decay = Range(low=0.0, high=1.0, log=False), Range(low=0.0, high=0.8, log=False)
    rates = {"optim.weight_decay": decay, "augment.hflip": rate}
    arm = arm_of(tmp_path, Search(keys=rates, trials=8, widen=1, set={"data.eval_split": "train"}))
    found = arm.trials(lambda run: 50 + run.recipe.optim.weight_decay)
    *tried, (widened, _) = [tuple(trial.values.values()) for trial in found]
    assert widened == pytest.approx(max(value for value, _ in tried) + 0.8 / 4, abs=1e-3)
    assert {trial.study_run.recipe.data.eval_split for trial in found} == {"train"}  # which set says
    begun = found[0].study_run.overrides
    first = arm.trials(lambda run: None if run.overrides == begun else 50 + run.recipe.optim.weight_decay)
    assert [trial.top1 is None for trial in first] == [True, *[False] * 7]  # none after the one that is missing
    alone = arm_of(tmp_path, Search(keys=rates, trials=1, widen=5))
    found = alone.trials(lambda run: 50.0 - abs(run.recipe.optim.weight_decay - 0.4) - run.recipe.augment.hflip)
    values = [tuple(trial.values.values()) for trial in found]
    assert values == [(0.4, 0.333), (0.0, 0.333), (0.8, 0.333), (0.4, 0.833)]  # each way once, within what is valid
    one = arm_of(tmp_path, Search(keys={"optim.weight_decay": decay}, trials=1, widen=1))
    assert [trial.values["optim.weight_decay"] for trial in one.trials(lambda run: 0.0)] == [0.4, 0.0]


def test_a_top1_of_0_is_a_result_and_entries_with_one_label_are_points_of_their_own(plan):
    arm = plan.searched()[0][0]
    lost, poor = (replace(plan.searched()[0][1][0], top1=top1) for top1 in (math.nan, 0.0))
    assert best([lost, poor]) is poor
    assert [run.chosen for run in chosen_runs(arm, [lost, poor])] == [(("optim.lr", "0.016"),)] * 3
    twice = [arm.study_runs[0], replace(arm.study_runs[0], group=1)]
    own = {"optim.lr": Range(low=0.5, high=0.7)}
    first, second = search_arms(twice, plan.study.search, [{}, own])
    assert (first.ranges, second.ranges) == (plan.study.search.keys, own)  # its own, where both have one


def test_what_was_trained_without_the_table_is_added_as_far_as_it_follows(plan, tmp_path):
    """Trials, those that widen them, and the runs with what they have chosen: all of a job array's."""
    folder = tmp_path / "runs"
    trainer = Trainer(plan, folder)
    assert plan.search(trainer) == Exit.DONE
    trainer(plan.runs())
    fresh = plan_of(tmp_path, STUDY, "other.jsonl")
    fresh.add_finished(folder)
    assert set(fresh.table.rows) == set(plan.table.rows)
    assert len(fresh.table.rows) == 14 + 9


def test_a_search_whose_trials_others_have_is_to_be_continued(plan, capsys):
    assert plan.search(lambda trials: Exit.DONE) == Exit.REQUEUE
    assert "9 trials are left to other processes" in capsys.readouterr().out


def test_the_report_has_the_table_of_the_trials_besides(plan, tmp_path):
    plan.search(Trainer(plan, tmp_path / "runs"))
    files = write_report(plan.results(), plan.study, plan.path, tmp_path / "report", plan.searched())
    assert [path.name for path in files] == [f"study{end}" for end in (".csv", ".png", ".svg", ".md", "_search.csv")]
    assert files[-1].read_text() == as_csv(plan.searched())


def test_a_study_that_searches_nothing_searches_what_the_command_says(tmp_path, monkeypatch, capsys):
    """Of runs without seeds: the trials have one of their own, and are not evaluated before they end."""
    plan = plan_of(tmp_path, STUDY.replace(STUDY[STUDY.index("seeds:") : STUDY.index("runs:")], ""))
    trainer = Trainer(plan, tmp_path / "runs")
    monkeypatch.setattr("widemix.cli.study._trained", lambda _: (plan, tmp_path))
    given = []
    monkeypatch.setattr("widemix.cli.study._runner", lambda *rest: given.append(rest) or trainer)
    words = ["study", "search", str(plan.path), "--to", str(tmp_path)]
    assert run_command(make_parser(), argv=[*words, "--low", "0.001", "--high", "0.256"]) == Exit.DONE
    assert "all " in capsys.readouterr().out
    search = given[0][3]
    assert search.keys == {"optim.lr": Range(low=0.001, high=0.256)}
    assert (search.trials, search.split, search.widen, search.seed) == (7, "holdout", 4, 1000)
    trials = [trial.study_run.recipe for _, own in plan.searched(search) for trial in own]
    assert {(recipe.eval.every_epochs, recipe.train.seed, recipe.data.eval_split) for recipe in trials} == {
        (recipe.train.epochs, 1000, "holdout") for recipe in trials
    }
    plan_of(tmp_path, STUDY)
    for option in ("--low", "--high"):
        monkeypatch.setattr("widemix.cli.study._trained", lambda _: (plan_of(tmp_path, STUDY), tmp_path))
        assert run_command(make_parser(), argv=[*words, option, "0.1"]) == 2
        assert f"{option}: {plan.path} has a section search" in capsys.readouterr().err


def test_a_value_that_the_search_would_replace_is_refused(tmp_path):
    """Of a key of the whole study, or of an entry; the runs had the chosen one without a word."""
    text = STUDY.replace("  seeded:", "  search: {optim.weight_decay: {low: 0.01, high: 1}}\n  seeded:")
    path, table = tmp_path / "study.yaml", Table(tmp_path / "study.jsonl")
    plan_of(tmp_path, text)
    for key in ("optim.lr", "optim.weight_decay"):
        with pytest.raises(InputError, match=f"^--{key}: {path} varies it"):
            make_plan(path, read_study(path), table, [(key, "0.5")])
    plan_of(tmp_path, STUDY.replace(STUDY[STUDY.index("search:") : STUDY.index("runs:")], ""))
    plan = make_plan(path, read_study(path), table, [("optim.lr", "0.5")])
    assert {study_run.recipe.optim.lr for study_run in plan.runs()} == {0.5}


def test_after_a_search_the_test_split_is_read_at_the_end(tmp_path):
    text = STUDY.replace("eval.every_epochs: 1000", "train.epochs: 40, eval.every_epochs: EVERY")
    plan_of(tmp_path, text.replace("EVERY", "40"))
    with pytest.raises(InputError, match=r"eval\.every_epochs 39 reads the test split before the end of 40 epochs"):
        plan_of(tmp_path, text.replace("EVERY", "39"))


def test_top1_of_numbers_is_not_plotted(tmp_path):
    text = STUDY.replace(STUDY[STUDY.index("search:") : STUDY.index("runs:")], "")
    text = text.replace("every_epochs: 1000", f"every_epochs: 1000, {OF_NUMBERS}")
    with pytest.raises(InputError, match=r"figure\.y: error is of classes, and data\.targets is regression"):
        plan_of(tmp_path, text)
    plan_of(tmp_path, text.replace("{x: width}", "{x: width, y: [loss]}"))
    with pytest.raises(InputError, match=r"figure\.y: top1 is of classes"):
        plan_of(tmp_path, text.replace("{x: width}", "{x: width, y: [loss, top1]}"))


def test_nor_does_it_choose_where_the_command_says_what_is_searched(tmp_path, monkeypatch, capsys):
    text = STUDY.replace(STUDY[STUDY.index("search:") : STUDY.index("runs:")], "")
    text = text.replace("every_epochs: 1000", f"every_epochs: 1000, {OF_NUMBERS}")
    text = text.replace("{x: width}", "{x: width, y: [loss]}").replace("ROOT", str(ROOT))
    (tmp_path / "study.yaml").write_text(text)
    words = ["study", "search", tmp_path / "study.yaml", "--to", tmp_path, "--low", "0.1", "--high", "1"]
    monkeypatch.setattr("sys.argv", ["widemix", *map(str, words)])
    assert run_command(make_parser()) == 2
    assert "search: chooses by top-1, and data.targets is regression" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("low: 0.001, high: 0.256", "low: 1.0, high: 0.1", "search.keys.optim.lr: .*the first must be smaller"),
        ("low: 0.001, high: 0.256", "low: 0.1, high: 0.1", "search.keys.optim.lr: .*the first must be smaller"),
        ("keys: {", "keys: {augment.hflip: {low: 0, high: 1.5, log: false}, ", "augment.hflip 1.5"),
        ("keys: {", "keys: {optim.weight_decay: {low: -0.5, high: 1, log: false}, ", "optim.weight_decay -0.5"),
        ("keys: {", f"keys: {{{SIX}, ", "search: 7 keys for Digits, Normal, model.channels 8; at most 6"),
        ("set: {train.epochs: 3}", "set: {model.channels: 4}", "search: the study varies model.channels"),
        (
            "axes: {model.channels: [8, 16]}",
            "axes: {data.eval_split: [test]}",
            "search: the study varies data.eval_s",
        ),
        ("{model.channels: [8, 16]}", "{optim.lr: [0.1]}", "search: the study varies optim.lr"),
        ("trials: 3", "trials: 0", "search.trials: "),
        (", trials: 3", "", "search.trials: "),
        ("high: 0.256", "hihg: 0.256", "unknown key hihg; did you mean high"),
        ("widen: 3", "widen: -1", "search.widen: "),
        ("keys: {optim.lr: {low: 0.001, high: 0.256}}", "keys: {}", "search.keys: "),
        ("seeds: [0, 1, 2]", "seeds: [0, 1, 1]", "at least 3, each once"),
        ("low: 0.001", "low: 0.0", "must be above 0 on a logarithmic axis"),
        ("optim.lr: {", "model.channels: {", "search: the study varies model.channels"),
        ("optim.lr: {", "optim.rate: {", "optim.rate"),
        ("set: {train.epochs: 3}", "set: {train.epochs: 0}", "train.epochs"),
        ("set: {train.epochs: 3}", "seed: 1", "search.seed 1 is one of seeds"),
        ("seeds: [0, 1, 2]", "seeds: [0, 1]", "at least 3"),
        ("eval.every_epochs: 1000", "eval.every_epochs: 1", "reads the test split before the end"),
        ("trials: 3", "trails: 3", "did you mean trials"),
        ("every_epochs: 1000", f"every_epochs: 1000, {OF_NUMBERS}", "search: chooses by top-1, and data.targets"),
    ],
)
def test_what_cannot_be_searched(tmp_path, old, new, message):
    with pytest.raises(InputError, match=message):
        plan_of(tmp_path, STUDY.replace(old, new)).searched()
