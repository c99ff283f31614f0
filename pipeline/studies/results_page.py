"""One page of all results: the figures and tables of the papers, what the committed tables say, and what is open.

Nothing in it depends on the day or the machine, and nothing on runs of a study that has not ended: the same tables
give the same page.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from widemix.markdown import escaped
from widemix.studies.baselines import baseline_lines
from widemix.studies.claims import Verdict, decide
from widemix.studies.papers import Entry, Paper, check_estimate, full_size_hours, runs_of_one_seed
from widemix.studies.quantity import label_of
from widemix.studies.statements import Held, Stated, findings, read_held, statements_table
from widemix.studies.study import read_study
from widemix.studies.study_page import plot_caption
from widemix.studies.study_run import scale

STATEMENTS = "statements.png"
_DECIDED = ("supported", "contradicted", "undecided")
_COUNTED = (*_DECIDED, "regime not reached")
_WORDS = (*_COUNTED, "with missing runs", "with a diverged run", "below a linear baseline")
_OUTSIDE = (
    "**Not under the protocol**: no values were searched for its lines, so differences may be those of settings. No "
    "verdict."
)


def results_page(papers: Sequence[Paper], studies: Path, folder: Path, links: str) -> tuple[str, str, list[Verdict]]:
    """Return the page as Markdown, its numbers in one line, and what is to be plotted: the statements of papers.

    studies: folder of the study files. folder: of the tables. links: where that folder lies seen from the page.
    """
    held, hours = _read(papers, studies, folder), full_size_hours(folder)
    stated = {paper.paper: list(_stated(paper, held, studies, folder, links)) for paper in papers}
    counted: dict[object, Stated] = {}
    for one in itertools.chain(*stated.values()):
        if one.verdict.word in _COUNTED:
            stands = one.verdict.claim
            counted.setdefault(id(one) if stands.ours else (stands.place or stands.source, stands.text), one)
    printed = [one.verdict for one in counted.values() if not one.verdict.claim.ours]
    overall = _overall(printed)
    summary = _summary(list(held.values()), [one.verdict for one in counted.values()], overall)
    results = [result for each in held.values() if each.plan.study.measured and each.ended for result in each.results]
    parts = ["# Results", _INTRODUCTION, summary, f"![Statements of the papers]({STATEMENTS})", _CAPTION]
    parts += ["## Findings", findings(list(counted.values()), overall), _RULE]
    parts += _folded("How words and numbers are found", [_READING.replace("LINKS", links)])
    parts += _folded("What knows nothing of networks", baseline_lines(results, folder))
    for paper in papers:
        own = stated[paper.paper]
        parts += [f"## {paper.paper}", *statements_table([one for one in own if not one.verdict.claim.ours], overall)]
        ours = [one for one in own if one.verdict.claim.ours]
        parts += _folded(f"Statements of ours: {len(ours)}", statements_table(ours))
        for entry in paper.entries:
            found = [one.verdict for one in own if one.figure == entry.figure]
            claim = entry.claim or _claim_of(entry, held, studies)
            parts += _section(entry, claim, [held[name] for name in entry.studies], found, hours, links)
    return "\n\n".join(parts) + "\n", summary, printed


_INTRODUCTION = """\
What papers say of MLP-Mixers as wide MLPs with sparse weights, tried on CPU cores. *SW-MLP*: an MLP whose wide
weights are masked at random. *S-Mixer*: a Mixer whose mixings are single square layers. *RP*: with random
permutations in place of transpositions. Statements about matrices are computed; those about accuracy were tried with
small networks on few images, and say at most in which direction it goes there."""
_CAPTION = """\
Each statement of a paper once, where it has an interval: its difference and 95 % interval, to the right what the
paper claims. The unit is the margin that counts as none, where a statement has one, else half of the interval, which
then spans 2; beyond 1 the axis is logarithmic. *In the small* means what a CPU core can train: mostly 5,000 of the
50,000 images of CIFAR-10, as JPEGs, and fewer epochs, blocks and channels than in the papers; the tables below have
both sizes. *Ours* are statements that no paper makes, which the studies ask besides."""
_RULE = """\
The clearest statement of each figure and word, five in all, of which two are contradicted at most: of those of papers
that are decided also over all papers; of five seeds and more before fewer; then by the difference in units of its
margin or, without one, of half its interval. What a margin alone decides, as that a difference is small, is no
finding."""
_READING = """\
Written by `widemix study results` from the study files, the committed tables in `recipes/studies/results` and
`recipes/papers.yaml`; a test holds it to them. `widemix study run NAME --report recipes/studies/results` trains what
a study's table does not have yet. The words *supported*, *contradicted* and *undecided* are computed by [the
protocol](explanation/protocol.md); nobody writes one, nor *regime not reached*, of runs that do not meet a condition
without which they say nothing of the statement. They follow from p after Holm's correction over the statements of a
study, while an interval is that of one statement, so a word may be *undecided* though its interval leaves out 0.
*All papers* has the word and p over all statements of papers, each of which is counted once, at the size listed
first. A difference that would have shown is one that so many seeds find in four of five cases. A study whose rates
were not searched for each line has no word, nor has a statement about networks that a linear baseline beats. Lines
are those of the papers' texts, whose words the study files quote. Core hours are those of all runs of a study,
trials included. CIFAR-10 was trained on JPEGs of the official images: errors here compare with each other, not with
published ones. Hours at full size are those of a roofline on one H100, of all seeds together
([table](LINKS/full_size.csv)). Each row has the commit, machine and day of its run; `CITATION.cff` says how
to cite them."""


def _stated(paper: Paper, held: Mapping[str, Held], studies: Path, folder: Path, links: str) -> Iterable[Stated]:
    """The statements of a paper's figures, in their order."""
    for entry in paper.entries:
        theirs = scale(run for name in entry.full for run in runs_of_one_seed(studies / f"{name}.yaml"))
        for each in (held[name] for name in entry.studies):
            rows = f"[{each.name}]({links}/{each.name}.md)"
            if each.plan.study.measured:
                rows += f", {each.core_hours:.2f}"
            runs, y = each.plan.study_runs, each.plan.study.figure.y[:1]
            for verdict in each.verdicts:
                own = [run for run in runs if run.panel == verdict.claim.panel]
                quantity = label_of(getattr(verdict.claim, "y", "") or y[0])
                yield Stated(verdict, entry.figure, quantity, theirs, scale(own), rows, len(own) < len(runs))
        found = decide(entry.checks, [check_estimate(check, folder) for check in entry.checks])
        for check, verdict in zip(entry.checks, found, strict=True):
            yield Stated(verdict, entry.figure, rows=f"[{check.file}]({links}/{check.file})")


def _folded(title: str, parts: Sequence[str]) -> list[str]:
    """Parts that a reader unfolds."""
    if not parts:
        return []
    return [f'<details markdown="1"><summary>{title}</summary>', *parts, "</details>"]


def _overall(printed: Sequence[Verdict]) -> dict[int, str]:
    """By the identity of each verdict on a statement of a paper, its word and p in the family of all of them."""
    estimates = [verdict.estimate if verdict.word in _DECIDED else None for verdict in printed]
    found = decide([verdict.claim for verdict in printed], estimates)
    words = (f"{one.word}, p = {one.p:.2g}" if one.estimate else "no word" for one in found)
    return dict(zip(map(id, printed), words, strict=True))


def _summary(held: Sequence[Held], found: Sequence[Verdict], overall: Mapping[int, str]) -> str:
    """The page's numbers in one line."""
    printed, own = ([each for each in found if each.claim.ours == ours] for ours in (False, True))
    left = Counter(word.partition(",")[0] for word in overall.values())
    over_all = ", ".join(f"{left[word]} {word}" for word in _DECIDED if left[word]) or "none"
    trained = [each for each in held if each.plan.study.measured and each.ended]
    runs = sum(len(each.plan.table.rows) for each in trained)
    outside = sum(each.plan.study.measured and not each.plan.study.by_protocol for each in held)
    without = f"; {outside} of the studies are not under the protocol yet and have no verdict" if outside else ""
    return (
        f"Of {len(printed)} statements of the papers, tried in the small: {_counted(printed)}; corrected over all of "
        f"them and not within a study: {over_all}. Of {len(own)} of ours: {_counted(own)}. {runs:,} runs of "
        f"{len(trained)} studies are in the tables{without}."
    )


def _counted(found: Sequence[Verdict]) -> str:
    """How many of each word, of those that there are."""
    counts = Counter(verdict.word for verdict in found)
    return ", ".join(f"{counts[word]} {word}" for word in _WORDS if counts[word])


def _read(papers: Sequence[Paper], studies: Path, folder: Path) -> dict[str, Held]:
    names = dict.fromkeys(name for paper in papers for entry in paper.entries for name in entry.studies)
    return {name: read_held(studies / f"{name}.yaml", folder) for name in names}


def _claim_of(entry: Entry, held: Mapping[str, Held], studies: Path) -> str:
    """The claim of the first of an entry's studies that has one, those of the paper's size first."""
    full = (read_study(studies / f"{name}.yaml") for name in entry.full)
    of_paper = (study.claim for study in itertools.chain(full, (held[name].plan.study for name in entry.studies)))
    return next(filter(None, of_paper), "")


def _section(
    entry: Entry, claim: str, held: Sequence[Held], found: Sequence[Verdict], hours: dict[str, float], links: str
) -> list[str]:
    """A figure's sentence, plots and rows."""
    states = dict.fromkeys(each.state for each in held)
    of_paper, ours = ([one for one in found if one.claim.ours == is_ours] for is_ours in (False, True))
    counts = [_counted(of_paper), f"of ours {_counted(ours)}" if ours else ""]
    here = (
        "; ".join(filter(None, counts))
        or "; ".join(states)
        or ("no statement to decide" if entry.command else "nothing")
    )
    claimed = f"The paper: {escaped(claim)} " if claim else ""
    parts = [f"### {entry.figure[0].upper()}{entry.figure[1:]}", f"{claimed}Here: {here}."]
    for each in held:
        parts += _study(each, links)
    parts += [f"![{entry.figure}]({links}/{image})" for image in entry.images]
    parts.append(" ".join(filter(None, [entry.caption, entry.command and f"Made by `{entry.command}`."])))
    parts.append(_open(entry, hours))
    return list(filter(None, parts))


def _study(held: Held, links: str) -> list[str]:
    study, name, title = held.plan.study, held.name, escaped(held.plan.study.title)
    if study.measured and not held.ended:
        return [f"**{title}** (`{name}`): {held.state}. No verdict yet."]
    rows = held.plan.table.rows.values()
    lost = sum(row.state == "diverged" for row in rows)
    cost = f" `widemix study run {name}`: {len(rows)} runs, trials included; {lost} diverged; "
    cost += f"{held.core_hours:.2f} core hours."
    parts = [] if study.by_protocol or not study.measured else [_OUTSIDE]
    caption = " ".join(filter(None, [f"{title}.", plot_caption(study), f"[All numbers]({links}/{name}.md)."]))
    return [*parts, f"![{title}]({links}/{name}.png)", caption + (cost if study.measured else "")]


def _open(entry: Entry, hours: dict[str, float]) -> str:
    parts = [entry.open] if entry.open else []
    for name in entry.full:
        cost = f" ({hours[name]:,.0f} GPU hours)" if name in hours else ""
        parts.append(f"the paper's size, `widemix study run {name}`{cost}")
    return f"Open: {'; '.join(part.rstrip('.') for part in parts)}." if parts else ""
