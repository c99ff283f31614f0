"""The words of claims: from data that are known, against scipy's tests, and with data swapped."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy import stats

from tests.conftest import ROOT
from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.errors import InputError
from widemix.models.cost import model_cost
from widemix.studies.claims import decide, verdicts
from widemix.studies.estimates import Estimate, holm, samples_differ
from widemix.studies.page import as_page
from widemix.studies.protocol import Statement
from widemix.studies.results import collect
from widemix.studies.rows import Row, Table
from widemix.studies.study import read_study, study_runs_of

STUDY = """
title: t
source: s
seeds: [0, 1, 2, 3]
runs:
- label: Normal
  recipes: {Digits: ROOT/recipes/digits/s_mixer.yaml}
  axes: {model.depth: [2, 4]}
- label: RP
  recipes: {Digits: ROOT/recipes/digits/rp_s_mixer.yaml}
  axes: {model.depth: [2, 4]}
figure: {x: model.depth}
claims:
- text: RP has a higher error at depth 2
  left: {line: RP, at: {model.depth: 2}}
  right: {line: Normal, at: {model.depth: 2}}
  expect: greater
  margin: 0.5
- {text: as good on average, left: {line: RP}, right: {line: Normal}, expect: equal, margin: 1.5}
- {text: deeper is better, slope: {line: Normal}, expect: less}
"""
ALONE = "{line: Normal, at: {model.depth: 2}}, expect: greater, y"
NORMAL2, NORMAL4 = (60.0, 61.0, 60.5, 61.5), (70.0, 71.5, 70.2, 71.0)
RP2, RP4 = (57.0, 57.8, 57.2, 58.6), (70.5, 71.0, 71.2, 71.4)


def row(study_run, top1):
    return Row(
        study_run.name,
        "",
        "done",
        study_run.seed,
        "val",
        1,
        {"top1": top1, "loss": 1.0},
        1.0,
        1.0,
        1.0,
        "c",
        "m",
        "h",
        "d",
    )


def study_of(folder, top1s, text=STUDY):
    path = folder / "study.yaml"
    path.write_text(text.replace("ROOT", str(ROOT)))
    study = read_study(path)
    study_runs = study_runs_of(path, study)
    table = Table(folder / "study.jsonl")
    for study_run, top1 in zip(study_runs, (value for group in top1s for value in group), strict=False):
        if top1 is not None:
            table.append(row(study_run, top1))
    return collect(study_runs, table, study), study


def test_differences_of_seeds_are_tested_in_pairs(tmp_path):
    results, study = study_of(tmp_path, (NORMAL2, NORMAL4, RP2, RP4))
    first, second, third = verdicts(results, study)
    expected = stats.ttest_rel(NORMAL2, RP2)  # errors are 100 - top1: RP - Normal in errors is Normal - RP in top-1
    interval = expected.confidence_interval(0.95)
    assert first.interval == pytest.approx((interval.low, interval.high))
    assert first.estimate.mean == pytest.approx(np.mean(NORMAL2) - np.mean(RP2))
    assert (first.estimate.count, first.estimate.paired, first.estimate.freedom) == (4, True, 3)
    means = (np.add(NORMAL2, NORMAL4) - np.add(RP2, RP4)) / 2
    assert second.estimate.mean == pytest.approx(means.mean())
    slopes = -(np.subtract(NORMAL4, NORMAL2)) / 2  # of the error, by block
    slope = stats.ttest_1samp(slopes, 0)
    assert third.estimate.mean == pytest.approx(slopes.mean())
    least = min((expected.pvalue, slope.pvalue))
    assert min(verdict.p for verdict in (first, second, third)) == pytest.approx(3 * least)
    assert [verdict.word for verdict in (first, second, third)] == ["supported", "undecided", "supported"]
    for verdict, rank in ((third, 0), (first, 1), (second, 2)):  # of three p values, from the least
        level = stats.t.ppf(1 - 0.025 / (3 - rank), 3)
        assert verdict.detectable == pytest.approx((level + stats.t.ppf(0.8, 3)) * verdict.estimate.error)


def test_swapped_data_contradict(tmp_path):
    results, study = study_of(tmp_path, (RP2, NORMAL4, NORMAL2, RP4))
    first, _, third = verdicts(results, study)
    assert (first.word, third.word) == ("contradicted", "supported")
    page = as_page(results, study, "study.yaml")
    assert "| RP has a higher error at depth 2 | ours | greater (± 0.5) | -3.1" in page
    assert "**contradicted**" in page


def test_a_margin_decides_what_is_equal(tmp_path):
    tight = tuple(value + 0.1 for value in NORMAL2)
    more = (tight[0], tight[1] + 0.01, tight[2], tight[3] - 0.01)
    results, study = study_of(tmp_path, (NORMAL2, NORMAL4, more, NORMAL4))
    first, second, _ = verdicts(results, study)
    assert first.estimate.mean == pytest.approx(-0.1)
    assert first.word == "contradicted"  # it is below the margin
    assert second.word == "supported"
    apart = study_of(tmp_path / "..", (NORMAL2, NORMAL4, [v - 9 for v in more], [v - 9 for v in NORMAL4]))
    assert verdicts(*apart)[1].word == "contradicted"


@pytest.mark.parametrize(
    ("expect", "margin", "mean", "word"),
    [
        *(("greater", 0.0, mean, word) for mean, word in ((1, "supported"), (0, "undecided"), (-1, "contradicted"))),
        *(
            ("greater", 0.5, mean, word)
            for mean, word in ((1, "supported"), (0.1, "contradicted"), (0.3, "contradicted"))
        ),
        ("greater", 0.5, 0.5, "supported"),
        *(("less", 0.0, mean, word) for mean, word in ((-1, "supported"), (0, "undecided"), (1, "contradicted"))),
        *(
            ("less", 0.5, mean, word)
            for mean, word in ((-1, "supported"), (-0.1, "contradicted"), (-0.3, "contradicted"))
        ),
        *(("equal", 0.5, mean, "supported") for mean in (0.1, -0.1)),
        *(("equal", 0.5, mean, "undecided") for mean in (0.5, -0.5)),
        *(("equal", 0.5, mean, "contradicted") for mean in (1, -1)),
        *(("not greater", 0.5, mean, "supported") for mean in (-1, 0, 0.3)),
        *(("not greater", 0.5, mean, word) for mean, word in ((0.5, "undecided"), (1, "contradicted"))),
        *(("not less", 0.5, mean, "supported") for mean in (1, 0, -0.3)),
        *(("not less", 0.5, mean, word) for mean, word in ((-0.5, "undecided"), (-1, "contradicted"))),
    ],
)
def test_each_word_follows_from_the_sign_of_the_mean_and_the_margin(expect, margin, mean, word):
    """With an error of a hundredth: what is nearer to a border than that is undecided."""
    statement = Statement(text="a", expect=expect, margin=margin)
    [found] = decide([statement], [Estimate(mean, 0.01, 3, 4, paired=True)])
    assert found.word == word


@pytest.mark.parametrize(
    ("expect", "against"),
    [("greater", "less"), ("less", "greater"), ("not greater", "greater"), ("not less", "less")],
)
@pytest.mark.parametrize("offset", [-2.0, -0.7, -0.3, 0.0, 0.2, 0.4, 0.8, 2.0])
def test_one_sided_words_are_those_of_scipys_tests_at_the_border(expect, against, offset):
    """Of five values and a margin of a half; the margin alone decides what the same tests with none do not."""
    values = offset + np.array([0.02, -0.11, 0.06, 0.1, -0.07])
    estimate = Estimate(values.mean(), stats.sem(values), 4, 5, paired=True)

    def word_of(margin):
        border = margin if against == "greater" else -margin
        if expect in ("greater", "less"):
            holds = stats.ttest_1samp(values, 0, alternative=expect).pvalue
            fails = stats.ttest_1samp(values, -border, alternative=against).pvalue
        else:
            fails = stats.ttest_1samp(values, border, alternative=against).pvalue
            holds = stats.ttest_1samp(
                values, border, alternative="less" if against == "greater" else "greater"
            ).pvalue
        if expect in ("greater", "less") and max(holds, fails) < 0.025:
            holds = 1
        word = "supported" if holds <= fails else "contradicted"
        return word if 2 * min(holds, fails) < 0.05 else "undecided", min(1, 2 * min(holds, fails))

    [found] = decide([Statement(text="a", expect=expect, margin=0.5)], [estimate])
    assert (found.word, found.p) == (word_of(0.5)[0], pytest.approx(word_of(0.5)[1]))
    assert found.by_margin == (found.word != "undecided" and found.word != word_of(0.0)[0])


def test_what_only_one_claim_would_show_without_its_margin_is_the_margins():
    """Holm doubles the p of the clearer of two: 0.03 of a mean above 0, and much less of one below the margin."""
    mean = stats.t.isf(0.015, 4)
    estimates = [Estimate(-mean, 1.0, 4, 5, paired=True), Estimate(0.0, 1.0, 4, 5, paired=True)]
    statements = [Statement(text="a", expect="not greater", margin=9), Statement(text="b", expect="less")]
    assert decide(statements, estimates)[0].by_margin
    assert not decide(statements[:1], estimates[:1])[0].by_margin


def test_of_a_logarithmic_axis_a_slope_is_by_decade_and_other_results_than_the_figures_are_compared(tmp_path):
    text = STUDY.replace("{x: model.depth}", "{x: model.depth, log_x: true}")
    text = text.replace("expect: less}", "expect: greater, y: top1}")
    results, study = study_of(tmp_path, (NORMAL2, NORMAL4, RP2, RP4), text)
    slope = verdicts(results, study)[2]
    slopes = np.subtract(NORMAL4, NORMAL2) / math.log10(4 / 2)
    assert (slope.estimate.mean, slope.word) == (pytest.approx(slopes.mean()), "supported")
    with pytest.raises(InputError, match="a slope takes points at two or more x"):
        verdicts(*study_of(tmp_path, (NORMAL2, NORMAL4), text.replace("{line: Normal}, expect: greater, y", ALONE)))
    with pytest.raises(InputError, match="a slope takes points at two or more x"):  # both have as many channels
        verdicts(*study_of(tmp_path, (NORMAL2, NORMAL4), text.replace("x: model.depth", "x: model.channels")))


@pytest.mark.parametrize(("seeds", "word"), [(3, "undecided"), (5, "undecided"), (8, "supported")])
def test_the_same_difference_in_all_seeds_is_as_sure_as_their_signs(tmp_path, seeds, word):
    """One image of 360 in each seed, as rows have it: with six digits. Student's t would take it for certain."""
    wrong = [5, 6, 10, 7, 9, 12, 8, 11][:seeds]
    left, right = ([float(f"{100 - (more + each) / 3.6:.6g}") for each in wrong] for more in (1, 0))
    assert len({one - other for one, other in zip(left, right, strict=True)}) > 1  # but for their digits
    text = STUDY.replace("seeds: [0, 1, 2, 3]", f"seeds: {list(range(seeds))}").replace("margin: 0.5", "margin: 0.1")
    text = text[: text.index("- {text: as good")]
    results, study = study_of(tmp_path, (right, right, left, right), text)
    (found,) = verdicts(results, study)
    assert found.word == word
    assert found.p == pytest.approx(stats.wilcoxon([1 / 3.6] * seeds, method="exact").pvalue)
    of_top1 = study.claims[0].model_copy(update={"y": "top1", "expect": "less"})
    [other] = verdicts(results, study.model_copy(update={"claims": [of_top1]}))
    assert (other.word, other.p) == (found.word, pytest.approx(found.p))
    page = as_page(results, study, "study.yaml")
    assert ("undecided: all seeds have the same difference" in page) == (word == "undecided")


def test_digits_are_those_of_the_numbers_that_are_compared(tmp_path):
    """Losses of a tenth, whose differences of a thousandth are no rounding, nor are slopes of a millionth."""
    results, study = study_of(tmp_path, (NORMAL2, NORMAL4, RP2, RP4))
    steps = (0.0010, 0.0011, 0.0012, 0.0013)
    losses = {("Normal", 2): [0.1] * 4, ("RP", 2): [0.1 + step for step in steps], ("RP", 4): [0.1] * 4}
    losses["Normal", 4] = [0.1 - step / 500 for step in steps]
    changed = []
    for result in results:
        run = result.study_run
        changed.append(replace(result, y={"loss": losses[run.line, run.recipe.model.depth][run.seed]}))
    claims = [study.claims[at].model_copy(update={"y": "loss"}) for at in (0, 2)]
    for found, scale in zip(verdicts(changed, study.model_copy(update={"claims": claims})), (1, -1e-3), strict=True):
        expected = stats.ttest_1samp([scale * step for step in steps], 0)
        assert found.estimate.mean == pytest.approx(scale * np.mean(steps))
        assert found.estimate.error == pytest.approx(stats.sem(steps) * abs(scale))
        assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_what_is_computed_has_no_error(tmp_path):
    text = STUDY.replace("{x: model.depth}", "{x: model.depth, y: [error, parameters]}")
    text = (
        text[: text.index("- text: RP")]
        + """
- {text: deeper is larger, left: {line: RP, at: {model.depth: 4}}, right: {line: RP, at: {model.depth: 2}},
   expect: greater, y: parameters}
- {text: by block, slope: {line: RP}, expect: greater, y: parameters}
"""
    )
    results, study = study_of(tmp_path, (NORMAL2, NORMAL4, RP2, RP4), text)
    found, slope = verdicts(results, study)
    assert (found.word, found.p, found.estimate.exact) == ("supported", 0, True)
    sizes = [
        model_cost(results[at].study_run.recipe.model, 8, 10).parameters
        for at in (8, 12)  # RP, of depth 2 and 4
    ]
    assert (found.estimate.mean, found.interval) == (sizes[1] - sizes[0], (sizes[1] - sizes[0],) * 2)
    assert (slope.estimate.mean, slope.word) == (pytest.approx((sizes[1] - sizes[0]) / 2), "supported")
    assert f"| greater | {found.estimate.mean:+.6g} | exact | |  | **supported** |" in as_page(
        results, study, "s.yaml"
    )


def test_of_a_number_and_samples_the_difference_is_left_less_right():
    below, above = samples_differ([1.0], [3.0, 5.0, 4.0], False), samples_differ([3.0, 5.0, 4.0], [1.0], False)
    assert (below.mean, above.mean) == (-3, 3)
    assert below.error == above.error == pytest.approx(1 / 3**0.5)
    same = samples_differ([1.0, 1.0], [2.0, 2.0, 2.0], False)
    assert (same.mean, same.error, same.freedom, same.count) == (-1, 0, 3, 2)


def test_sides_without_shared_seeds_are_welchs(tmp_path):
    text = STUDY.replace("seeds: [0, 1, 2, 3]\n", "").replace(
        "axes: {model.depth: [2, 4]}", "axes: {train.seed: [SEEDS], model.depth: [2, 4]}"
    )
    text = text.replace("SEEDS", "0, 1, 2", 1).replace("SEEDS", "2, 3, 4, 5", 1)  # one is no pairs
    path = tmp_path / "study.yaml"
    path.write_text(text.replace("ROOT", str(ROOT)))
    study = read_study(path)
    study_runs = study_runs_of(path, study)
    values = {"Normal": iter([60.0, 70.0, 61.0, 71.0, 60.5, 70.5]), "RP": iter([58.0, 0, 57.0, 0, 58.5, 0, 57.7, 0])}
    table = Table(tmp_path / "study.jsonl")
    for study_run in study_runs:
        entry = row(study_run, next(values[study_run.line]))
        table.append(Row(**{**asdict(entry), "seed": study_run.recipe.train.seed}))
    first, *_ = verdicts(collect(study_runs, table, study), study)
    expected = stats.ttest_ind([42.0, 43.0, 41.5, 42.3], [40.0, 39.0, 39.5], equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert first.interval == pytest.approx((interval.low, interval.high))
    assert first.estimate.freedom == pytest.approx(expected.df)
    assert (first.estimate.paired, first.estimate.count) == (False, 3)
    rows = [
        line for line in as_page(collect(study_runs, table, study), study, "s.yaml").splitlines() if "| **" in line
    ]
    assert [row.split(" | ")[6] for row in rows] == ["3, unpaired", "3, unpaired", "3"]  # the last is of one line


def test_missing_and_diverged_runs_decide_nothing(tmp_path):
    results, study = study_of(tmp_path, (NORMAL2, NORMAL4, (57.0, None, 57.0, 57.0), RP4))
    words = [verdict.word for verdict in verdicts(results, study)]
    assert words == ["with missing runs", "with missing runs", "supported"]
    *_, slope = verdicts(results, study)
    expected = stats.ttest_1samp(-np.subtract(NORMAL4, NORMAL2) / 2, 0).pvalue
    assert slope.p == pytest.approx(3 * expected)  # of a family of three, though two are not tested yet
    quantiles = stats.t.ppf(1 - 0.025 / 3, 3) + stats.t.ppf(0.8, 3)
    assert slope.detectable == pytest.approx(quantiles * slope.estimate.error)
    assert "**supported**" in as_page(results, study, "study.yaml")


def test_points_below_a_linear_baseline_decide_nothing(tmp_path):
    """They are left out of means, with what the other side has at their values; the family stays as great."""
    results, study = study_of(tmp_path, (NORMAL2, NORMAL4, RP2, RP4))
    points = {(r.study_run.line, r.study_run.recipe.model.depth): r.study_run.point for r in results}
    first, mean, slope = verdicts(results, study, {points["RP", 2]})
    assert [first.word, slope.word] == ["below a linear baseline", "supported"]
    assert (first.estimate, first.note) == (None, "")
    assert all(map(math.isnan, (*first.interval, first.p, first.detectable)))
    expected = stats.ttest_rel(NORMAL4, RP4)
    assert mean.estimate.mean == pytest.approx(np.mean(NORMAL4) - np.mean(RP4))
    assert mean.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert mean.note == "without model.depth 2, below a linear baseline"
    assert slope.p == pytest.approx(3 * stats.ttest_1samp(-np.subtract(NORMAL4, NORMAL2) / 2, 0).pvalue)
    *_, slope = verdicts(results, study, {points["Normal", 2]})
    assert slope.word == "below a linear baseline"  # of one point there is none
    both = verdicts(results, study, {points["Normal", 2], points["RP", 4]})
    assert [verdict.word for verdict in both] == ["below a linear baseline"] * 3
    assert "without model.depth 2, below" in as_page(results, study, "s.yaml", below={points["RP", 2]})


def test_sides_that_no_longer_have_as_many_points_are_not_compared(tmp_path):
    text = STUDY.replace("axes: {model.depth: [2, 4]}", "axes: {model.depth: [3, 5]}", 1)
    text = text[: text.index("- text: RP")] + text[text.index("- {text: as good") : text.index("- {text: deeper")]
    results, study = study_of(tmp_path, (NORMAL2, NORMAL4, RP2, RP4), text)
    [found] = verdicts(results, study, {results[0].study_run.point})
    assert found.word == "below a linear baseline"


@pytest.mark.parametrize(
    ("condition", "unmet"),
    [
        ("{line: Normal, y: error, below: 35}", ""),
        ("{line: Normal, at: {model.depth: 2}, y: error, below: 35}", "error of Normal is 39.2, not below 35"),
        ("{line: RP, y: error, above: 30, below: 36}", ""),
        ("{line: RP, y: error, above: 36}", "error of RP is 35.7, not above 36"),
        ("{line: RP, y: loss, minus: train_loss, above: 0.5}", ""),
        ("{line: RP, y: loss, minus: train_loss, above: 0.7}", "loss - train\\_loss of RP is 0.6, not above 0.7"),
    ],
)
def test_runs_in_another_regime_decide_nothing_and_say_what_they_have(tmp_path, condition, unmet):
    """Means over points and seeds; the difference is shown, and the other claims have the family as before."""
    text = STUDY.replace("margin: 0.5\n", f"margin: 0.5\n  regime: [{condition}]\n")
    results, study = study_of(tmp_path, (NORMAL2, NORMAL4, RP2, RP4), text)
    results = [replace(result, y=result.y | {"loss": 1.0, "train_loss": 0.4}) for result in results]
    plain = verdicts(
        results, study.model_copy(update={"claims": [c.model_copy(update={"regime": []}) for c in study.claims]})
    )
    first, *others = verdicts(results, study)
    assert first.word == ("regime not reached" if unmet else "supported")
    assert first.estimate == plain[0].estimate
    assert math.isnan(first.p) == bool(unmet)
    left = [None if unmet else plain[0].estimate, *(one.estimate for one in plain[1:])]
    expected = decide([one.claim for one in plain], left)[1:]
    assert [(one.word, one.p) for one in others] == [(one.word, one.p) for one in expected]
    page = as_page(results, study, "s.yaml")
    assert (f"**regime not reached**: {unmet} |" in page) == bool(unmet)


def test_what_was_stated_after_the_runs_says_so_with_its_place(tmp_path):
    words = "place: paper.txt:12, words: deeper is better, after_runs: [statement, condition]"
    results, study = study_of(
        tmp_path,
        (NORMAL2, NORMAL4, RP2, RP4),
        STUDY.replace("expect: less}", f"expect: less, {words}, source: figure 1}}"),
    )
    page = as_page(results, study, "s.yaml")
    assert "| deeper is better | figure 1; line 12; statement and condition stated after the runs | less |" in page
    assert "| as good on average | ours | equal (± 1.5) |" in page


def test_between_0_and_the_margin_the_likelier_of_two_words_has_its_p():
    """Neither is significant: a mean that is above 0 with 3 %, and below the margin with 4 %, by chance."""
    mean, rest = stats.t.isf(0.03, 3), stats.t.isf(0.04, 3)
    statement = Statement(text="a", expect="greater", margin=mean + rest)
    [found] = decide([statement], [Estimate(mean, 1.0, 3, 4, paired=True)])
    assert (found.word, found.p) == ("undecided", pytest.approx(0.06))
    statement = Statement(text="a", expect="greater", margin=mean + 9)
    [found] = decide([statement], [Estimate(mean, 1.0, 3, 4, paired=True)])
    assert (found.word, found.p) == ("contradicted", pytest.approx(2 * stats.t.sf(9, 3)))


@pytest.mark.parametrize("count", [0, 8])
def test_no_difference_at_all_is_neither_greater_nor_less(count):
    """Whether it is exact or that of eight seeds."""
    none = Estimate(0.0, 0.0, math.inf if count == 0 else 7, count, paired=True)
    statements = [Statement(text="a", expect=expect) for expect in ("greater", "less")]
    assert [(found.word, found.p) for found in decide(statements, [none, none])] == [("undecided", 1.0)] * 2


def test_two_seeds_that_both_sides_have_are_a_pair_each(tmp_path):
    text = STUDY[: STUDY.index("- {text: as good")].replace("seeds: [0, 1, 2, 3]\n", "")
    text = text.replace("axes: {model.depth: [2, 4]}", "axes: {train.seed: [0, 1, 2], model.depth: [2]}", 1)
    text = text.replace("axes: {model.depth: [2, 4]}", "axes: {train.seed: [1, 2, 3], model.depth: [2]}")
    [found] = verdicts(*study_of(tmp_path, [(60.0, 61.0, 62.0), (70.0, 71.5, 99.0)], text))
    expected = stats.ttest_rel([30.0, 28.5], [39.0, 38.0])
    interval = expected.confidence_interval(0.95)
    assert (found.estimate.paired, found.estimate.count, found.estimate.freedom) == (True, 2, 1)
    assert found.interval == pytest.approx((interval.low, interval.high))


def test_a_difference_of_the_detectable_size_is_found_in_four_of_five_cases():
    """By simulation, of the claim with the least p of two, the other of which is far from decided."""
    numbers, found = np.random.RandomState(0), 0
    statements = [Statement(text="a", expect="greater"), Statement(text="b", expect="greater")]
    idle = Estimate(0.0, 1.0, 5, 6, paired=True)
    [one, _] = decide(statements, [Estimate(9.0, 1.0, 5, 6, paired=True), idle])
    for _ in range(1000):
        values = numbers.normal(one.detectable, np.sqrt(6), size=6)  # a standard error of 1
        error = values.std(ddof=1) / np.sqrt(6)
        [verdict, _] = decide(statements, [Estimate(values.mean(), error, 5, 6, paired=True), idle])
        found += verdict.word == "supported"
    assert 730 <= found <= 830  # the approximation gives 78 %


def test_a_run_that_diverged_is_said_to_have(tmp_path):
    results, study = study_of(tmp_path, (NORMAL2, NORMAL4, RP2, RP4))
    lost = next(result for result in results if result.study_run.line == "RP")
    changed = [
        replace(result, row=replace(result.row, state="diverged"), y={"error": math.nan})
        if result is lost
        else result
        for result in results
    ]
    assert lost.study_run.recipe.model.depth == 2
    words = [verdict.word for verdict in verdicts(changed, study)]
    assert words == ["with a diverged run", "with a diverged run", "supported"]


def test_a_claim_without_a_panel_is_decided_in_each_by_itself(tmp_path):
    text = STUDY.replace(
        "{Digits: ROOT/recipes/digits/s_mixer.yaml}", "{One: ROOT/recipes/digits/s_mixer.yaml, Two: TWO}"
    )
    text = text.replace("{Digits: ROOT/recipes/digits/rp", "{One: ROOT/recipes/digits/rp")
    text = text.replace("TWO", "ROOT/recipes/digits/mixer.yaml")
    path = tmp_path / "study.yaml"
    path.write_text(text.replace("ROOT", str(ROOT)))
    study = read_study(path)
    study = study.model_copy(update={"claims": study.claims[2:]})
    study_runs = study_runs_of(path, study)
    table = Table(tmp_path / "study.jsonl")
    for study_run in study_runs:
        depth, rises = study_run.recipe.model.depth, study_run.panel == "Two"
        sign = -1 if rises else 1
        table.rows[study_run.name] = row(study_run, 50.0 + sign * (2 * depth + 0.1 * study_run.seed * depth))
    found = verdicts(collect(study_runs, table, study), study)
    assert [(verdict.claim.panel, verdict.word) for verdict in found] == [
        ("One", "supported"),
        ("Two", "contradicted"),
    ]
    assert "| Two: deeper is better |" in as_page(collect(study_runs, table, study), study, "study.yaml")
    own = study.claims[0].model_copy(update={"panel": "Two"})
    [alone] = verdicts(collect(study_runs, table, study), study.model_copy(update={"claims": [own]}))
    assert (alone.claim.panel, alone.word) == ("Two", "contradicted")


def test_points_are_told_apart_by_lists_too(tmp_path):
    axes = "  axes: {model.depth: [2, 4]}\n"
    text = STUDY[: STUDY.index("- text: RP")].replace(axes, "", 1).replace("x: model.depth", "x: permuted_block")
    text = text.replace(axes, "  axes: {model.permuted_blocks: [[0], [1]]}\n")
    text += """- text: a first block costs
  left: {line: RP, at: {model.permuted_blocks: [0]}}
  right: {line: RP, at: {model.permuted_blocks: [1]}}
  expect: greater
"""
    [verdict] = verdicts(*study_of(tmp_path, [NORMAL2, RP2, RP4], text))
    assert verdict.estimate.mean == pytest.approx(np.mean(RP4) - np.mean(RP2))  # y is the error


def test_holm_by_hand():
    """Holm 1979: the k-th smallest of m p values is multiplied by m - k + 1, and none is below one before it."""
    assert holm({0: 0.01, 1: 0.04, 2: 0.03, 3: 0.005}, 4) == pytest.approx({3: 0.02, 0: 0.03, 2: 0.06, 1: 0.06})
    assert holm({0: 0.4, 1: 0.9}, 3) == pytest.approx({0: 1.0, 1: 1.0})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("line: RP, at: {model.depth: 2}", "line: RO, at: {model.depth: 2}", "has line RO model.depth 2"),
        ("line: RP, at: {model.depth: 2}", "line: RP, at: {model.depth: 3}", "has line RP model.depth 3"),
        ("slope: {line: Normal}", "slope: {line: RO}", "has line RO"),
        ("expect: less}", "expect: less, panel: Digit}", "panel is one of Digits"),
        ("slope: {line: Normal}, expect", "expect", "give left and right, or slope"),
        ("expect: equal, margin: 1.5", "expect: equal", "nothing is equal without one"),
        ("expect: less}", "expect: less, y: speed}", "y is one of"),
        ("expect: less}", "expects: less}", "did you mean expect"),
        ("{line: Normal}, expect: less", "{lnie: Normal}, expect: less", "did you mean line"),
        ("slope: {line: Normal}", "left: {line: Normal}", "give left and right, or slope"),
        ("slope: {line: Normal}", "slope: {line: RP}, right: {line: Normal}", "give left and right, or slope"),
        (
            "right: {line: Normal}, expect",
            "right: {line: Normal}, slope: {line: RP}, expect",
            "give left and right, or",
        ),
        ("margin: 1.5", "margin: -1.5", "claims.1.margin: "),
        ("expect: equal, margin: 1.5", "expect: not less", "nothing is equal without one"),
        ("expect: less}", "expect: less, place: a:1}", "place and words: give both"),
        ("expect: less}", "expect: less, place: a, words: b}", "place: a is not FILE:LINE"),
        ("expect: less}", f"expect: less, place: a:1, words: {'b ' * 16}}}", "place and words: give both"),
        ("expect: less}", "expect: less, regime: [{line: RP, y: loss}]}", "give above, below or both"),
        ("expect: less}", "expect: less, regime: [{line: RO, y: loss, above: 1}]}", "has line RO"),
        ("expect: less}", "expect: less, regime: [{line: RP, y: los, above: 1}]}", "regime: los is none of error"),
        ("expect: less}", "expect: less, regime: [{line: RP, y: loss, abov: 1}]}", "did you mean above"),
    ],
)
def test_claims_about_nothing_are_refused_before_anything_is_trained(
    tmp_path, monkeypatch, capsys, old, new, message
):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace(old, new).replace("ROOT", str(ROOT)))
    monkeypatch.setattr("sys.argv", ["widemix", "study", "plan", str(path)])
    assert run_command(make_parser()) == 2
    assert message in capsys.readouterr().err
