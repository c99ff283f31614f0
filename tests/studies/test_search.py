"""The search before a study's runs: a function of the results so far, widened at its edge, on a held-out split."""

import csv
import math
from dataclasses import replace

import pytest
from scipy.stats import qmc

from tests.studies.conftest import RATES, UNSEARCHED, plan_of, row_of, train
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import Exit, InputError, RunError
from widemix.recipe import load_recipe
from widemix.studies.protocol import Range, Search
from widemix.studies.search import arms as search_arms
from widemix.studies.search import as_csv, best, chosen_runs

PEAKS = {8: 0.016, 16: 0.2, 64: 1e-9}  # by channels; the last is beyond all that may be tried
OWN = RATES.replace("  seeded:", "  search: {optim.weight_decay: {low: 0.01, high: 1}}\n  seeded:")


@pytest.fixture
def plan(tmp_path):
    return plan_of(tmp_path, RATES)


class Trainer:
    """Ends runs at once: the top-1 has its peak at the rate of `PEAKS`; from a rate of 1 on runs diverge."""

    def __init__(self, plan, stop_at=None, kill=None):
        self.plan, self.stop_at, self.kill, self.tried = plan, stop_at, kill, []

    def __call__(self, study_runs):
        for study_run in study_runs:
            if len(self.tried) == self.stop_at:
                return Exit.REQUEUE
            self.tried.append(study_run.name)
            if self.kill == len(self.tried):
                raise RunError("killed by SIGKILL")
            self.plan.table.append(row_of(study_run, top1_of(study_run.recipe)))
        return Exit.DONE


def top1_of(recipe):
    distance = abs(math.log10(recipe.optim.lr / PEAKS[recipe.model.channels]))
    return None if recipe.optim.lr > 0.9 else 90 - 10 * distance


def outcomes(plan):
    return {arm.name: [(trial.values["optim.lr"], trial.top1) for trial in trials] for arm, trials in plan.searched()}


def test_trials_are_even_and_those_at_an_edge_are_widened(plan):
    assert plan.search(Trainer(plan)) == Exit.DONE
    assert [[rate for rate, _ in trials] for trials in outcomes(plan).values()] == [
        [0.016, 0.004, 0.064],  # the middle first, a factor of 4 apart
        [0.016, 0.004, 0.064, 0.256, 1.02],  # 0.064 was best, then 0.256
        [0.016, 0.004, 0.064, 0.001, 0.00025, 6.25e-05],
    ]
    edges = [arm.at_edge(trials) for arm, trials in plan.searched()]
    assert edges == [False, False, True]  # three more than planned, and still at the edge: it says so
    winner = best(plan.searched()[1][1])
    assert (winner.values, winner.top1) == ({"optim.lr": 0.256}, pytest.approx(90 - 10 * math.log10(1.28), abs=1e-3))


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
    plan = plan_of(tmp_path, RATES.replace("widen: 3,", f"widen: 3, ties: {ties},"))
    assert plan.search(Trainer(plan)) == Exit.DONE
    assert list(dict.fromkeys(run.recipe.optim.lr for run in plan.runs())) == chosen
    assert [len(trials) for _, trials in plan.searched()] == tried


def test_runs_have_the_values_chosen_on_the_held_out_split(plan):
    """Trials have a seed that no run has. The recipes of runs are read once."""
    assert {study_run.recipe.optim.lr for study_run in plan.runs()} == {0.004}  # the recipe's, before the search
    plan.search(Trainer(plan))
    for arm, trials in plan.searched():
        recipes = [trial.study_run.recipe for trial in trials]
        assert {(r.data.eval_split, r.train.epochs, r.train.seed) for r in recipes} == {("holdout", 3, 1000)}
        assert {study_run.name for study_run in arm.study_runs}.isdisjoint(trial.study_run.name for trial in trials)
    assert plan.searched()[2][1][0].study_run.recipe.model.permutation_seed == 1000
    runs = plan.runs()
    assert all(one is other for one, other in zip(runs, plan.runs(), strict=True))
    points = [("Normal", 0.016), ("Normal", 0.256), ("RP", 6.25e-05)]
    assert [(study_run.line, study_run.recipe.optim.lr, study_run.recipe.train.seed) for study_run in runs] == [
        (*point, seed) for point in points for seed in (0, 1, 2)
    ]
    assert {study_run.recipe.data.eval_split for study_run in runs} == {"test"}
    assert [study_run.recipe.model.permutation_seed for study_run in runs[6:]] == [0, 1, 2]


def test_runs_of_before_the_search_are_no_results(plan):
    trainer = Trainer(plan, stop_at=9 + 3)
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
def test_a_stopped_or_killed_search_ends_as_any_other(plan, tmp_path, stop_at):
    plan.search(Trainer(plan))
    trainer = Trainer(plan_of(tmp_path / "second", RATES), stop_at=stop_at)
    assert trainer.plan.search(trainer) == Exit.REQUEUE
    trainer = Trainer(plan_of(tmp_path / "second", RATES), kill=1)  # the table alone is left
    with pytest.raises(RunError):
        trainer.plan.search(trainer)
    last = plan_of(tmp_path / "second", RATES)
    trainer = Trainer(last)
    assert last.search(trainer) == Exit.DONE
    assert outcomes(last) == outcomes(plan)
    assert len(trainer.tried) == len(set(trainer.tried)) == 14 - stop_at  # a trial that was killed is tried again
    more = Trainer(last)
    assert (last.search(more), more.tried) == (Exit.DONE, [])


def test_more_trials_repeat_none_of_a_shorter_search(tmp_path):
    """The values are a Halton sequence, as scipy computes it."""
    rate, momentum = Range(low=1e-4, high=1.0), Range(low=0, high=0.9, log=False)
    searched = plan_of(tmp_path, RATES).searched
    for count in (4, 8):
        [(_, trials), *_] = searched(Search(keys={"optim.lr": rate}, trials=count, widen=0))
        values = [trial.values["optim.lr"] for trial in trials]
        unit = qmc.Halton(1, scramble=False).random(count + 1)[1:, 0]
        assert values == pytest.approx([10 ** (-4 + 4 * u) for u in unit], rel=6e-3)  # three digits
        assert len(set(values)) == count
    [(_, trials), *_] = searched(Search(keys={"optim.lr": rate, "optim.momentum": momentum}, trials=6))
    for trial, (u, v) in zip(trials, qmc.Halton(2, scramble=False).random(7)[1:], strict=True):
        assert trial.values["optim.lr"] == pytest.approx(10 ** (-4 + 4 * u), rel=6e-3)
        assert trial.values["optim.momentum"] == pytest.approx(0.9 * v, abs=6e-3)


def test_only_a_result_that_is_not_finite_is_final(tmp_path):
    """Trials that diverged are not tried again; a point all of whose trials did is not widened."""
    plan = plan_of(tmp_path, RATES.replace("high: 0.256", "high: 256").replace("0.001", "0.01"))
    plan.search(Trainer(plan))
    (arm, trials), *_ = plan.searched()
    assert [math.isnan(trial.top1) for trial in trials[:3]] == [True, False, True]  # 1.6, 0.126, 20.2
    rows = list(csv.DictReader(as_csv(plan.searched()).splitlines()))
    assert [(row["state"], bool(row["top1"])) for row in rows[:3]] == [
        ("diverged", False), ("done", True), ("diverged", False),
    ]  # fmt: skip
    again = Trainer(plan_of(tmp_path, plan.path.read_text()))
    assert (again.plan.search(again), again.tried) == (Exit.DONE, [])
    with pytest.raises(InputError, match="all 1 trials diverged"):
        chosen_runs(arm, [replace(trials[0], top1=math.nan)])


def test_an_entry_may_search_keys_of_its_own(tmp_path):
    plan = plan_of(tmp_path, OWN)
    keys = [(arm.study_runs[0].line, list(arm.ranges), len(trials)) for arm, trials in plan.searched()]
    assert keys == [
        ("Normal", ["optim.lr"], 3),
        ("Normal", ["optim.lr"], 3),
        ("RP", ["optim.lr", "optim.weight_decay"], 3),
    ]
    names = "optim.lr optim.weight_decay optim.clip_grad augment.hflip augment.smoothing augment.re_prob"
    most = Search(keys={name: Range(low=0.1, high=0.2) for name in names.split()}, trials=1)
    assert len(search_arms(plan.study_runs, most, [{}, {}])[0].ranges) == 6  # of seven refused.yaml has a row
    own = {"optim.lr": Range(low=0.5, high=0.7)}
    twice = [
        plan.study_runs[0],
        replace(plan.study_runs[0], group=1),
    ]  # entries with one label are points of their own
    first, second = search_arms(twice, plan.study.search, [{}, own])
    assert (first.ranges, second.ranges) == (plan.study.search.keys, own)  # its own, where both have one


RATE = {"optim.lr": Range(low=1e-4, high=1.0)}
DECAY = {"optim.weight_decay": Range(low=0.0, high=0.8, log=False)}
FLIP = {"augment.hflip": Range(low=0.0, high=1.0, log=False)}


@pytest.mark.parametrize(
    ("keys", "trials", "widen", "top1", "added"),
    [
        # Nine trials of two keys are three of each: a quarter of their ranges apart.
        (RATE | DECAY, 9, 2, lambda r: r.optim.weight_decay,
         [(10 ** (-4 - 3 / 4), 0.8 * 8 / 9), (10 ** (-4 + 1 / 4), 0.8 * (8 / 9 + 1 / 4))]),
        (RATE | DECAY, 9, 2, lambda r: -r.optim.weight_decay, []),  # below 0 no recipe has a weight decay
        # Eight are 2.8 of each, also a quarter apart; one is in the middle.
        (DECAY | FLIP, 8, 1, lambda r: r.optim.weight_decay, [(7 / 8 * 0.8 + 0.2, 5 / 9)]),
        (DECAY | FLIP, 1, 5, lambda r: -abs(r.optim.weight_decay - 0.4) - r.augment.hflip,
         [(0.0, 0.333), (0.8, 0.333), (0.4, 0.833)]),
        (DECAY, 1, 1, lambda r: -50.0, [(0.0,)]),  # below first
    ],
)  # fmt: skip
def test_each_key_is_widened_by_the_distance_of_its_trials(plan, keys, trials, widen, top1, added):
    """Each way once, as far as recipes allow."""
    arm = search_arms(
        plan.study_runs, Search(keys=keys, trials=trials, widen=widen, split="train", seed=7), [{}, {}]
    )[0]
    found = arm.trials(lambda run: 50 + top1(run.recipe))
    values = [tuple(trial.values.values()) for trial in found[trials:]]
    for own, expected in zip(values, added, strict=True):
        assert own == pytest.approx(expected, rel=6e-3, abs=1e-3)
    recipe = found[0].study_run.recipe
    assert (recipe.data.eval_split, recipe.train.seed) == ("train", 7)
    missing = arm.trials(lambda run: None if run.overrides == found[0].study_run.overrides else 50 + top1(run.recipe))
    assert [trial.top1 is None for trial in missing] == [True, *[False] * (trials - 1)]  # none after one that is open
    equal = arm.trials(lambda run: 50.0)
    assert best(equal) is equal[0]


def test_a_top1_of_0_is_a_result(plan):
    arm, (trial, *_) = plan.searched()[0]
    lost, poor = (replace(trial, top1=top1) for top1 in (math.nan, 0.0))
    assert best([lost, poor]) is poor
    assert [run.chosen for run in chosen_runs(arm, [lost, poor])] == [(("optim.lr", "0.016"),)] * 3


def test_what_was_trained_without_the_table_is_added(plan, tmp_path):
    """Trials, those that widen them, and the runs with what they have chosen: all of a job array's."""
    trainer = Trainer(plan)
    assert plan.search(trainer) == Exit.DONE
    trainer(plan.runs())
    for runs in ([trial.study_run for _, own in plan.searched() for trial in own], plan.runs()):
        for study_run in runs:
            train(study_run, tmp_path / "runs", top1_of(study_run.recipe))
    fresh = plan_of(tmp_path, RATES, "other.jsonl")
    fresh.add_finished(tmp_path / "runs")
    assert set(fresh.table.rows) == set(plan.table.rows)
    assert len(fresh.table.rows) == 14 + 9


def test_a_search_whose_trials_others_have_is_to_be_continued(plan, capsys):
    assert plan.search(lambda trials: Exit.DONE) == Exit.REQUEUE
    assert "9 trials are left to other processes" in capsys.readouterr().out


# The command.


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """The digits with a split that is held out."""
    folder = tmp_path_factory.mktemp("held")
    prepare("digits", None, folder, PrepSettings(holdout=0.1))
    return folder


@pytest.fixture
def study(held, trained, tmp_path, widemix):
    """study(verb, text, options...) -> exit code and lines of the command."""
    trained.top1_of = staticmethod(top1_of)

    def answer(verb, text, *options):
        (tmp_path / "study.yaml").write_text(text)
        code, said = widemix("study", verb, tmp_path / "study.yaml", "--to", tmp_path, "--data.path", held, *options)
        return code, [line for line in said.splitlines() if line.startswith(("Digits", "all", "error"))]

    return answer


def test_a_search_prints_what_each_point_has_chosen(study, trained, tmp_path):
    table = tmp_path / "study_search.csv"
    assert study("search", RATES) == (
        Exit.DONE,
        [
            "Digits, Normal, model.channels 8: optim.lr 0.016, top-1 90.00 % on holdout",
            "Digits, Normal, model.channels 16: optim.lr 0.256, top-1 88.93 % on holdout",
            "Digits, RP: optim.lr 6.25e-05, top-1 42.04 % on holdout, at the edge of what was tried",
            f"all 14 trials are in {table}",
        ],
    )
    assert {line.rpartition(",")[2] for line in table.read_text().splitlines()[1:]} == set(trained.names)
    _, said = study("search", RATES, "--trials", "4")
    assert said[-1] == f"all {len(table.read_text().splitlines()) - 1} trials are in {table}"
    _, said = study("search", RATES.replace("low: 0.001, high: 0.256", "low: 1, high: 256"))
    assert [point.rpartition(": ")[2] for point in said[:-1]] == ["all diverged"] * 3
    assert said[-1].startswith("all 9 trials are in ")  # none is widened


def test_runs_follow_once_the_search_is_complete(study, trained):
    trained.stop_at = 2
    for verb in ("search", "run"):
        assert study(verb, RATES)[0] == Exit.REQUEUE
        assert len(trained.names) == 2  # what is stopped trains nothing more
    trained.stop_at = None
    assert study("run", RATES)[0] == Exit.DONE
    assert len(trained.names) == 14 + 9
    assert [name.partition("_lr")[0].rpartition("-")[2] for name in trained.names[14:]] == ["8"] * 3 + ["16"] * 3 + [
        "rp_s_mixer"
    ] * 3


def test_a_study_that_searches_nothing_searches_what_the_command_says(study, trained, tmp_path):
    """Of runs without seeds: the trials have one of their own, and are not evaluated before they end."""
    unseeded = UNSEARCHED.replace("seeds: [0, 1, 2]\n", "")
    code, said = study("search", unseeded, "--low", "0.001", "--high", "0.256")
    assert code == Exit.DONE
    assert said[-1].startswith("all 27 trials are in ")  # seven of each; 0.256 and 0.512; four at the edge
    recipes = [load_recipe(tmp_path / name / "recipe.yaml") for name in trained.names]
    assert {(recipe.train.seed, recipe.data.eval_split, recipe.eval.every_epochs) for recipe in recipes} == {
        (1000, "holdout", 30)
    }
    assert {0.001 * 2**n for n in range(1, 8)} <= {round(recipe.optim.lr, 4) for recipe in recipes}
    for option in ("--low", "--high"):
        code, said = study("search", RATES, option, "0.1")
        assert (code, f"{option}: {tmp_path / 'study.yaml'} has a section search" in said[0]) == (2, True)
    numbers = "data.targets: regression, train.loss: mse, augment.smoothing: 0, eval.every"
    text = UNSEARCHED.replace("eval.every", numbers).replace("{x: width}", "{x: width, y: [loss]}")
    code, said = study("search", text, "--low", "0.1", "--high", "1")
    assert (code, "search: chooses by top-1, and data.targets is regression" in said[0]) == (2, True)
