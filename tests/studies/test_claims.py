"""The words of claims: from data that are known, against scipy's tests, and with data swapped."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tests.studies.conftest import CLAIMS, plan_of, row_of
from widemix.errors import InputError
from widemix.models.cost import model_cost
from widemix.studies.claims import decide, verdicts
from widemix.studies.estimates import Estimate
from widemix.studies.protocol import Statement
from widemix.studies.study_page import as_page

ALONE = "{line: Normal, at: {model.depth: 2}}, expect: greater, y"
NORMAL2, NORMAL4 = (60.0, 61.0, 60.5, 61.5), (70.0, 71.5, 70.2, 71.0)
RP2, RP4 = (57.0, 57.8, 57.2, 58.6), (70.5, 71.0, 71.2, 71.4)
ALL = (NORMAL2, NORMAL4, RP2, RP4)


def study_of(folder, top1s, text=CLAIMS):
    """Results of runs with these top-1, in their order, and their study; nan of one that diverged, None of none."""
    plan = plan_of(folder, text)
    plan.table.rows.clear()
    for study_run, top1 in zip(plan.study_runs, (value for group in top1s for value in group), strict=False):
        if top1 is not None:
            plan.table.rows[study_run.name] = row_of(study_run, None if math.isnan(top1) else top1)
    return plan.results(), plan.study


def holds(verdict, expected, **estimate):
    """Whether an estimate is that of a test of scipy's."""
    interval = expected.confidence_interval(0.95)
    assert verdict.interval == pytest.approx((interval.low, interval.high))
    assert {name: getattr(verdict.estimate, name) for name in estimate} == pytest.approx(estimate)


def test_differences_of_seeds_are_tested_in_pairs(tmp_path):
    """Errors are 100 - top1: RP - Normal in errors is Normal - RP in top-1."""
    found = first, second, third = verdicts(*study_of(tmp_path, ALL))
    expected = stats.ttest_rel(NORMAL2, RP2)
    holds(first, expected, count=4, paired=True, freedom=3, mean=np.mean(NORMAL2) - np.mean(RP2))
    assert second.estimate.mean == pytest.approx(np.mean([NORMAL2, NORMAL4]) - np.mean([RP2, RP4]))
    slope = stats.ttest_1samp(-np.subtract(NORMAL4, NORMAL2) / 2, 0)  # of the error, by block
    holds(third, slope, mean=np.mean(NORMAL2) / 2 - np.mean(NORMAL4) / 2)
    assert min(verdict.p for verdict in found) == pytest.approx(3 * min(expected.pvalue, slope.pvalue))
    assert [verdict.word for verdict in found] == ["supported", "undecided", "supported"]
    for verdict, rank in ((third, 0), (first, 1), (second, 2)):  # of three p values, from the least
        level = stats.t.ppf(1 - 0.025 / (3 - rank), 3)
        assert verdict.detectable == pytest.approx((level + stats.t.ppf(0.8, 3)) * verdict.estimate.error)


@pytest.mark.parametrize(("top1", "word"), [(None, "with missing runs"), (math.nan, "with a diverged run")])
def test_claims_about_missing_or_diverged_runs_have_no_word(tmp_path, top1, word):
    """The family is of three, though two are not tested yet."""
    *found, slope = verdicts(*study_of(tmp_path, (NORMAL2, NORMAL4, (57.0, top1, 57.0, 57.0), RP4)))
    assert [verdict.word for verdict in (*found, slope)] == [word, word, "supported"]
    assert slope.p == pytest.approx(3 * stats.ttest_1samp(np.subtract(NORMAL4, NORMAL2), 0).pvalue)
    quantiles = stats.t.ppf(1 - 0.025 / 3, 3) + stats.t.ppf(0.8, 3)
    assert slope.detectable == pytest.approx(quantiles * slope.estimate.error)


@pytest.mark.parametrize(
    ("expect", "margin", "words"),
    [  # of each mean
        ("greater", 0.0, {1: "supported", 0: "undecided", -1: "contradicted"}),
        ("greater", 0.5, {1: "supported", 0.5: "supported", 0.1: "contradicted", 0.3: "contradicted"}),
        ("less", 0.0, {-1: "supported", 0: "undecided", 1: "contradicted"}),
        ("less", 0.5, {-1: "supported", -0.1: "contradicted", -0.3: "contradicted"}),
        ("equal", 0.5, {0.1: "supported", -0.1: "supported", 0.5: "undecided", -0.5: "undecided",
                        1: "contradicted", -1: "contradicted"}),
        ("not greater", 0.5, {-1: "supported", 0: "supported", 0.3: "supported", 0.5: "undecided",
                              1: "contradicted"}),
        ("not less", 0.5, {1: "supported", 0: "supported", -0.3: "supported", -0.5: "undecided",
                           -1: "contradicted"}),
    ],
)  # fmt: skip
def test_each_word_follows_from_the_mean_and_the_margin(expect, margin, words):
    """With an error of a hundredth: what is nearer to a border than that is undecided."""
    statement = Statement(text="a", expect=expect, margin=margin)
    found = {mean: decide([statement], [Estimate(mean, 0.01, 3, 4, paired=True)])[0].word for mean in words}
    assert found == words


@pytest.mark.parametrize(
    ("expect", "against"),
    [("greater", "less"), ("less", "greater"), ("not greater", "greater"), ("not less", "less")],
)
@pytest.mark.parametrize("offset", [-2.0, -0.7, -0.3, 0.0, 0.2, 0.4, 0.8, 2.0])
def test_one_sided_words_are_those_of_scipys_tests(expect, against, offset):
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


def test_what_no_claim_shows_without_its_margin_is_the_margins():
    """Holm doubles the p of the clearer of two: 0.03 of a mean above 0, and much less of one below the margin."""
    mean = stats.t.isf(0.015, 4)
    estimates = [Estimate(-mean, 1.0, 4, 5, paired=True), Estimate(0.0, 1.0, 4, 5, paired=True)]
    statements = [Statement(text="a", expect="not greater", margin=9), Statement(text="b", expect="less")]
    assert decide(statements, estimates)[0].by_margin
    assert not decide(statements[:1], estimates[:1])[0].by_margin


def test_slopes_are_by_decade_of_a_logarithmic_axis(tmp_path):
    """And other results than the figure's are compared."""
    text = CLAIMS.replace("{x: model.depth}", "{x: model.depth, log_x: true}")
    text = text.replace("expect: less}", "expect: greater, y: top1}")
    slope = verdicts(*study_of(tmp_path, ALL, text))[2]
    slopes = np.subtract(NORMAL4, NORMAL2) / math.log10(4 / 2)
    assert (slope.estimate.mean, slope.word) == (pytest.approx(slopes.mean()), "supported")
    for wrong in (
        text.replace("{line: Normal}, expect: greater, y", ALONE),
        text.replace("x: model.depth", "x: model.channels"),  # both have as many channels
    ):
        with pytest.raises(InputError, match="a slope takes points at two or more x"):
            verdicts(*study_of(tmp_path, (NORMAL2, NORMAL4), wrong))


@pytest.mark.parametrize(("seeds", "word"), [(3, "undecided"), (5, "undecided"), (8, "supported")])
def test_one_difference_in_all_seeds_is_as_sure_as_signs(tmp_path, seeds, word):
    """One image of 360 in each seed, as rows have it: with six digits. Student's t would take it for certain."""
    wrong = [5, 6, 10, 7, 9, 12, 8, 11][:seeds]
    left, right = ([float(f"{100 - (more + each) / 3.6:.6g}") for each in wrong] for more in (1, 0))
    assert len({one - other for one, other in zip(left, right, strict=True)}) > 1  # but for their digits
    text = CLAIMS.replace("seeds: [0, 1, 2, 3]", f"seeds: {list(range(seeds))}").replace("margin: 0.5", "margin: 0.1")
    text = text[: text.index("- {text: as good")]
    results, study = study_of(tmp_path, (right, right, left, right), text)
    (found,) = verdicts(results, study)
    assert found.word == word
    assert found.p == pytest.approx(stats.wilcoxon([1 / 3.6] * seeds, method="exact").pvalue)
    of_top1 = study.claims[0].model_copy(update={"y": "top1", "expect": "less"})
    [other] = verdicts(results, study.model_copy(update={"claims": [of_top1]}))
    assert (other.word, other.p) == (found.word, pytest.approx(found.p))
    page = as_page(results, study, "study.yaml")
    assert ("**undecided**: all seeds have the same difference" in page) == (word == "undecided")


def test_digits_are_those_of_the_numbers_that_are_compared(tmp_path):
    """Losses of a tenth, whose differences of a thousandth are no rounding, nor are slopes of a millionth."""
    results, study = study_of(tmp_path, ALL)
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
        holds(found, expected, mean=scale * np.mean(steps), error=stats.sem(steps) * abs(scale))


COMPUTED = """\
- {text: deeper is larger, left: {line: RP, at: {model.depth: 4}}, right: {line: RP, at: {model.depth: 2}},
   expect: greater, y: parameters}
- {text: by block, slope: {line: RP}, expect: greater, y: parameters}
"""


def test_what_is_computed_has_no_error(tmp_path):
    text = CLAIMS.replace("{x: model.depth}", "{x: model.depth, y: [error, parameters]}").partition("- text: RP")[0]
    results, study = study_of(tmp_path, ALL, text + COMPUTED)
    found, slope = verdicts(results, study)
    assert (found.word, found.p, found.estimate.exact) == ("supported", 0, True)
    sizes = [model_cost(results[at].study_run.recipe.model, 8, 10).parameters for at in (8, 12)]  # RP, of both depths
    assert (found.estimate.mean, found.interval) == (sizes[1] - sizes[0], (sizes[1] - sizes[0],) * 2)
    assert (slope.estimate.mean, slope.word) == (pytest.approx((sizes[1] - sizes[0]) / 2), "supported")


@pytest.mark.parametrize(
    ("seeds", "paired"), [(((0, 1, 2), (2, 3, 4, 5)), False), (((0, 1, 2), (0, 2, 3, 4)), True)], ids=["one", "two"]
)
def test_sides_with_fewer_than_two_shared_seeds_are_welchs(tmp_path, seeds, paired):
    text = CLAIMS.partition("- {text: as good")[0].replace("seeds: [0, 1, 2, 3]\n", "")
    for own in seeds:
        text = text.replace("{model.depth: [2, 4]}", f"{{train.seed: {[*own]}, model.depth: [2]}}", 1)
    normal, rp = (60.0, 61.0, 60.5), (58.0, 57.0, 58.5, 57.7)
    results, study = study_of(tmp_path, (normal, rp), text)
    [found] = verdicts(results, study)
    if paired:
        pairs = [100 - rp[at] for at in (0, 1)], [100 - normal[at] for at in (0, 2)]  # of seeds 0 and 2
        holds(found, stats.ttest_rel(*pairs), paired=True, count=2, freedom=1)
    else:
        expected = stats.ttest_ind(np.subtract(100, rp), np.subtract(100, normal), equal_var=False)
        holds(found, expected, paired=False, count=3, freedom=expected.df)
    assert (" | 3, unpaired | " in as_page(results, study, "s.yaml")) != paired


@pytest.mark.parametrize(
    ("below", "words"),
    [
        ([("RP", 2)], ["below a linear baseline", "undecided", "supported"]),
        (
            [("Normal", 2)],
            ["below a linear baseline", "undecided", "below a linear baseline"],
        ),  # a slope of one point
        ([("Normal", 2), ("RP", 4)], ["below a linear baseline"] * 3),
    ],
)
def test_points_below_a_linear_baseline_decide_nothing(tmp_path, below, words):
    """They are left out of means, with what the other side has at their values; the family stays as great."""
    results, study = study_of(tmp_path, ALL)
    points = {(r.study_run.line, r.study_run.recipe.model.depth): r.study_run.point for r in results}
    first, mean, slope = verdicts(results, study, {points[one] for one in below})
    assert [first.word, mean.word, slope.word] == words
    assert (first.estimate, first.note) == (None, "")
    assert all(map(math.isnan, (*first.interval, first.p, first.detectable)))
    if mean.word == "undecided":
        holds(mean, stats.ttest_rel(NORMAL4, RP4), mean=np.mean(NORMAL4) - np.mean(RP4))
        assert mean.note == "without model.depth 2, below a linear baseline"
    if slope.word == "supported":
        assert slope.p == pytest.approx(3 * stats.ttest_1samp(np.subtract(NORMAL4, NORMAL2), 0).pvalue)


def test_sides_of_unequal_points_are_not_compared(tmp_path):
    text = CLAIMS.replace("axes: {model.depth: [2, 4]}", "axes: {model.depth: [3, 5]}", 1)
    text = text[: text.index("- text: RP")] + text[text.index("- {text: as good") : text.index("- {text: deeper")]
    results, study = study_of(tmp_path, ALL, text)
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
        ("{line: RP, y: loss, minus: train_loss, above: 0.7}", "loss - train_loss of RP is 0.6, not above 0.7"),
    ],
)
def test_runs_in_another_regime_decide_nothing(tmp_path, condition, unmet):
    """Means over points and seeds; the difference is shown, and the other claims have the family as before."""
    text = CLAIMS.replace("margin: 0.5\n", f"margin: 0.5\n  regime: [{condition}]\n")
    results, study = study_of(tmp_path, ALL, text)
    results = [replace(result, y=result.y | {"loss": 1.0, "train_loss": 0.4}) for result in results]
    plain = verdicts(results, plan_of(tmp_path, CLAIMS).study)
    first, *others = verdicts(results, study)
    assert first.word == ("regime not reached" if unmet else "supported")
    assert first.estimate == plain[0].estimate
    assert math.isnan(first.p) == bool(unmet)
    left = [None if unmet else plain[0].estimate, *(one.estimate for one in plain[1:])]
    expected = decide([one.claim for one in plain], left)[1:]
    assert [(one.word, one.p) for one in others] == [(one.word, one.p) for one in expected]
    assert first.note == unmet


def test_within_the_margin_the_likelier_word_has_its_p():
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


def test_a_claim_without_a_panel_is_decided_in_each(tmp_path):
    """By itself: in one the error falls with the depth, in the other it rises."""
    panels = CLAIMS.replace("{Digits: digits/s_mixer}", "{One: digits/s_mixer, Two: digits/mixer}")
    head, _, claims = panels.replace("{Digits: digits/rp", "{One: digits/rp").partition("- text: RP")
    slope = claims[claims.index("- {text: deeper") :]
    data = (NORMAL2, NORMAL4, NORMAL4, NORMAL2)
    found = verdicts(*study_of(tmp_path, data, head + slope))
    assert [(verdict.claim.panel, verdict.word) for verdict in found] == [
        ("One", "supported"),
        ("Two", "contradicted"),
    ]
    [alone] = verdicts(*study_of(tmp_path, data, head + slope.replace("less}", "less, panel: Two}")))
    assert (alone.claim.panel, alone.word) == ("Two", "contradicted")


def test_points_are_told_apart_by_lists_too(tmp_path):
    text = CLAIMS.partition("- text: RP")[0].replace("  axes: {model.depth: [2, 4]}\n", "", 1)
    text = text.replace("model.depth: [2, 4]", "model.permuted_blocks: [[0], [1]]").replace(
        "x: model.depth", "x: omega"
    )
    text += """- text: a first block costs
  left: {line: RP, at: {model.permuted_blocks: [0]}}
  right: {line: RP, at: {model.permuted_blocks: [1]}}
  expect: greater
"""
    [verdict] = verdicts(*study_of(tmp_path, [NORMAL2, RP2, RP4], text))
    assert verdict.estimate.mean == pytest.approx(np.mean(RP4) - np.mean(RP2))  # y is the error
