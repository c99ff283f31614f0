"""Which verdicts a page of results begins with, and their words."""

import re
from dataclasses import replace

import pytest

from widemix.studies.claims import Verdict
from widemix.studies.estimates import Estimate, exact
from widemix.studies.figure import plot_statements
from widemix.studies.protocol import Statement
from widemix.studies.statements import Stated, findings


def verdict(text, word, source="section 4", panel=""):
    claim = Statement(text=text, expect="greater", source=source, panel=panel)
    if word == "with missing runs":
        return Verdict(claim, word)
    return Verdict(claim, word, Estimate(1.5, 0.1, 4, 5, True), 0.011, 0.5)


FOUND = [
    ("figure 1", verdict("a", "with missing runs")),
    ("figure 2", verdict("b", "undecided")),
    ("figure 2", verdict("c", "supported", panel="MNIST")),
    ("figure 2", verdict("d", "supported")),
    ("figure 3", verdict("e", "contradicted", source="ours")),
    ("figure 4", verdict("f", "supported")),
    ("figure 4", verdict("g", "contradicted")),
    ("figure 5", verdict("h", "contradicted")),
    ("figure 6", verdict("k", "contradicted")),
    ("figure 6", verdict("i", "supported")),
    ("figure 7", verdict("j", "supported")),
]


def listed(found):
    """Of those of papers all are decided over all papers too, but one that says so."""
    overall = {
        id(verdict): f"{'undecided' if verdict.claim.text == 'o' else verdict.word}, p = 1"
        for _, verdict in found
        if not verdict.claim.ours
    }
    return findings([Stated(verdict, figure) for figure, verdict in found], overall)


def texts(found):
    """The letters of the list, whose numbers are checked."""
    lines = listed(found).splitlines()
    assert [line.partition(". ")[0] for line in lines] == [str(n) for n in range(1, len(lines) + 1)]
    return [line.partition(" [")[0][-1] for line in lines]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            FOUND,
            "ghcfi",
        ),  # c before d, of one figure and word; neither e, of ours, nor k, the third that is contradicted
        (FOUND[4:6], "f"),
        ([("figure 0", verdict("o", "supported")), ("figure 0", verdict("o", "contradicted")), *FOUND[5:6]], "f"),
        ([(f"figure {n}", verdict(str(n), "contradicted")) for n in range(7)], "01234"),
        ([(f"figure {n}", verdict(str(n), "supported")) for n in range(7)], "01234"),
    ],
)
def test_two_at_most_are_negative_where_there_are_others(found, expected):
    assert "".join(texts(found)) == expected


def test_the_clearest_of_a_figure_has_most_seeds_and_margins():
    """Its margin's, not the first of the figure; what a margin alone decides is no finding."""
    plain = verdict("c", "supported")

    def of(text, mean, count=5, figure="figure 1", **keys):
        claim = plain.claim.model_copy(update={"text": text, "margin": 0.5})
        return (figure, replace(plain, claim=claim, estimate=Estimate(mean, 0.1, count - 1, count, True), **keys))

    found = [of("a", 1.0), of("b", 9.0, count=3), of("c", -2.0), of("d", 5.0, by_margin=True)]
    assert texts(found) == ["c"]
    assert texts([found[1], found[0]]) == ["a"]
    assert texts([found[1], found[3]]) == ["b"]
    assert texts([*found, of("e", 3.0, figure="figure 2"), of("f", 9.0, count=3, figure="figure 3")]) == [
        "e",
        "c",
        "f",
    ]


def test_a_finding_has_its_panel_source_numbers_and_sizes():
    [(figure, one)] = FOUND[2:3]
    late = replace(one, claim=one.claim.model_copy(update={"after_runs": ["statement"]}))
    stated = Stated(late, figure, quantity="test error (%)", theirs="8 blocks", ours="2 blocks")
    assert findings([stated], {id(late): "supported, p = 0.02"}) == (
        "1. **supported**: MNIST: c [section 4; statement stated after the runs]: difference of test error (%) +1.5, "
        "95 % interval +1.222 to +1.778, p = 0.011, n = 5 (figure 2; here: 2 blocks; in the paper: 8 blocks)"
    )
    assert listed(FOUND[2:3]).endswith(
        "[section 4]: difference +1.5, 95 % interval +1.222 to +1.778, p = 0.011, n = 5 (figure 2)"
    )
    computed = replace(verdict("e", "contradicted"), estimate=exact(1.5))
    assert listed([("figure 3", computed)]) == "1. **contradicted**: e [section 4]: difference +1.5, exact (figure 3)"
    assert listed(FOUND[:2]) == "None yet: no statement is decided."


def test_the_figure_has_each_statement_that_has_an_interval(tmp_path):
    """In their order, cut where they are long; neither what is computed nor what has no word."""
    exactly = verdict("computed", "supported")
    shown = [*(verdict(f"statement {n}", "supported") for n in range(3)), verdict("x" * 200, "regime not reached")]
    others = [replace(exactly, estimate=exact(1.5)), verdict("missing", "with missing runs")]
    plot_statements([*shown, *others], [tmp_path / "a.svg"])
    texts = re.findall("<!--  ?(statement .|x+…x+|computed|missing) -->", (tmp_path / "a.svg").read_text())
    assert texts == ["statement 0", "statement 1", "statement 2", f"{'x' * 42}…{'x' * 42}"]
