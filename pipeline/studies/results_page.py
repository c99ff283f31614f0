"""One page of all results: the figures and tables of the papers, what the committed tables say, and what is open.

Nothing in it depends on the day or the machine, and nothing on runs of a study that has not ended: the same tables
give the same page.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from widemix.markdown import escaped
from widemix.studies.baselines import baseline_lines, points_below
from widemix.studies.claims import Verdict, decide, verdicts
from widemix.studies.findings import findings
from widemix.studies.page import Searched, claims_table, train_loss_lines
from widemix.studies.papers import Entry, Paper, check_estimate, full_size_hours
from widemix.studies.plan import Plan, make_plan, open_trials
from widemix.studies.results import Result
from widemix.studies.rows import Table
from widemix.studies.study import read_study

STATEMENTS = "statements.png"
_DECIDED = ("supported", "contradicted", "undecided")
_COUNTED = (*_DECIDED, "regime not reached")
_WORDS = (*_COUNTED, "with missing runs", "with a diverged run", "below a linear baseline")
_OUTSIDE = (
    "**Not under the protocol**: no values were searched for its lines, so differences may be those of settings. No "
    "verdict."
)


@dataclass(frozen=True)
class Held:
    """A study of the catalogue with its committed table."""

    plan: Plan
    folder: Path  # of the tables

    @cached_property
    def results(self) -> list[Result]:
        """Of all its runs."""
        return self.plan.results()

    @property
    def name(self) -> str:
        """Of its file."""
        return self.plan.path.stem

    @cached_property
    def _searched(self) -> Searched:
        """The points whose values are searched, with their trials."""
        return self.plan.searched()

    @cached_property
    def ended(self) -> bool:
        """Whether its search and all its runs have ended."""
        complete = not any(open_trials(trials) for _, trials in self._searched)
        return complete and all(result.row is not None for result in self.results)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """What its runs say; nothing where it does not follow the protocol."""
        study = self.plan.study
        decided = self.ended if study.by_protocol else not study.measured
        return verdicts(self.results, study, points_below(self.results, self.folder)) if decided else []

    @cached_property
    def at_edge(self) -> list[str]:
        """The points whose best values are still the least or the greatest that were searched."""
        return [arm.name for arm, trials in self._searched if arm.at_edge(trials)]

    @property
    def core_hours(self) -> float:
        """Of all its rows, trials included: core seconds, or wall clock where these were not counted yet."""
        rows = self.plan.table.rows.values()
        return sum(row.core_seconds if row.core_seconds is not None else row.seconds or 0 for row in rows) / 3600


def results_page(papers: Sequence[Paper], studies: Path, folder: Path, links: str) -> tuple[str, str, list[Verdict]]:
    """Return the page as Markdown, its numbers in one line, and what is to be plotted: the statements of papers.

    studies: folder of the study files. folder: of the tables. links: where that folder lies seen from the page.
    """
    held, hours = _read(papers, studies, folder), full_size_hours(folder)
    checks = {
        id(entry): decide(entry.checks, [check_estimate(check, folder) for check in entry.checks])
        for paper in papers
        for entry in paper.entries
    }
    counted: dict[object, tuple[str, Verdict]] = {}
    for entry in (entry for paper in papers for entry in paper.entries):
        for verdict in (*(one for name in entry.studies for one in held[name].verdicts), *checks[id(entry)]):
            claim = verdict.claim
            if verdict.word in _COUNTED:
                statement = id(verdict) if claim.ours else (claim.place or claim.source, claim.text)
                counted.setdefault(statement, (entry.figure, verdict))
    printed = [verdict for _, verdict in counted.values() if not verdict.claim.ours]
    overall = _overall(printed)
    rows, sections = [], []
    for paper in papers:
        sections.append(f"## {paper.paper}")
        for entry in paper.entries:
            own, checked = [held[name] for name in entry.studies], checks[id(entry)]
            text = entry.claim or _claim_of(entry, own, studies)
            sections.append(_section(entry, text, own, checked, overall, hours, links))
            rows.append(_row(paper, entry, own, checked, hours))
    summary = _summary(list(held.values()), [verdict for _, verdict in counted.values()], overall)
    head = "| figure or table | what was run | verdicts | core hours | open: GPU hours at full size |"
    page = (
        "\n\n".join(
            [
                "# Results",
                summary,
                f"![Statements of the papers]({STATEMENTS})",
                _CAPTION,
                _INTRODUCTION.replace("LINKS", links),
                "## Findings",
                findings(list(counted.values())),
                "## All figures and tables",
                "\n".join([head, "|---|---|---|---:|---:|", *rows]),
                *sections,
            ]
        )
        + "\n"
    )
    return page, summary, printed


_CAPTION = """\
Each statement of a paper once: its difference and 95 % interval, to the right what the paper claims. The unit is the
margin that counts as none, where a statement has one, else half of the interval. *In the small* means what a CPU core
can train: mostly 5,000 of the 50,000 images of CIFAR-10, and fewer epochs, blocks and channels than in the papers;
each study's file says which."""
_INTRODUCTION = """\
Written by `widemix study results` from the study files, the committed tables in `recipes/studies/results` and
`recipes/papers.yaml`; a test holds it to them. The words *supported*, *contradicted* and *undecided* are computed
by [the protocol](explanation/protocol.md); nobody writes one, nor *regime not reached*, of runs that do not meet a
condition without which they say nothing of the statement. They follow from p after Holm's correction over the
statements of a table, while an interval is that of one statement, so a word may be *undecided* though its interval
leaves out 0; the last column has the word and p over all statements of papers, each of which is counted once, at the
size listed first. A study whose rates were not searched for each line has none, nor has a statement about networks
that a linear baseline beats. Lines are those of the papers' texts, whose words the study files quote.
CIFAR-10 was trained on JPEGs of the official images: errors here compare with each other, not with published ones.
Hours at full size are those of a roofline on one H100, of all seeds together ([table](LINKS/full_size.csv))."""


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
        f"Of {len(printed)} statements of the papers, tried in the small: {_counted(printed)} (corrected over all of "
        f"them: {over_all}); of {len(own)} of ours: {_counted(own)}. {runs:,} runs of {len(trained)} studies are in "
        f"the tables{without}."
    )


def _counted(found: Sequence[Verdict], separator: str = ", ") -> str:
    """How many of each word, of those that there are."""
    counts = Counter(verdict.word for verdict in found)
    return separator.join(f"{counts[word]} {word}" for word in _WORDS if counts[word])


def _read(papers: Sequence[Paper], studies: Path, folder: Path) -> dict[str, Held]:
    names = dict.fromkeys(name for paper in papers for entry in paper.entries for name in entry.studies)
    paths = {name: studies / f"{name}.yaml" for name in names}
    return {
        name: Held(make_plan(path, read_study(path), Table(folder / f"{name}.jsonl")), folder)
        for name, path in paths.items()
    }


def _row(
    paper: Paper, entry: Entry, held: Sequence[Held], checked: Sequence[Verdict], hours: dict[str, float]
) -> str:
    found = [*(verdict for each in held for verdict in each.verdicts), *checked]
    ran = ", ".join(f"`{each.name}`" for each in held) or (
        f"`{' '.join(entry.command.split()[:3])}`" if entry.command else "nothing"
    )
    words = _counted(found, "; ")
    if not words:
        states = dict.fromkeys(_state(each) for each in held)
        words = "; ".join(states) or ("no statement to decide" if entry.command else "open")
    cost = sum(each.core_hours for each in held if each.ended)
    total = [hours[name] for name in entry.full if name in hours]
    author = paper.paper.partition(",")[0]
    return (
        f"| {author}: {entry.figure} | {ran} | {words} | {f'{cost:.2f}' if cost else ''} | "
        f"{f'{sum(total):,.0f}' if total else ''} |"
    )


def _state(held: Held) -> str:
    if not held.plan.study.measured:
        return "computed, no training"
    if not held.plan.study.by_protocol:
        return (
            "not under the protocol" if held.results and any(r.row for r in held.results) else "withdrawn, to be run"
        )
    return "ended" if held.ended else "its runs have not ended"


def _claim_of(entry: Entry, held: Sequence[Held], studies: Path) -> str:
    """The claim of the first of an entry's studies that has one, those of the paper's size first."""
    full = (read_study(studies / f"{name}.yaml") for name in entry.full)
    of_paper = (study.claim for study in itertools.chain(full, (each.plan.study for each in held)))
    return next(filter(None, of_paper), "")


def _section(
    entry: Entry,
    claim: str,
    held: Sequence[Held],
    checked: Sequence[Verdict],
    overall: Mapping[int, str],
    hours: dict[str, float],
    links: str,
) -> str:
    parts = [f"### {entry.figure[0].upper()}{entry.figure[1:]}"]
    if claim:
        parts.append(f"Claim: {escaped(claim)}")
    for each in held:
        parts += _study(each, overall, links)
    if entry.command:
        parts.append(f"`{entry.command}`")
    if checked:
        parts.append(claims_table(checked, overall))
    parts += [f"![{entry.figure}]({links}/{image})" for image in entry.images]
    parts.append(_open(entry, hours))
    return "\n\n".join(filter(None, parts))


def _study(held: Held, overall: Mapping[int, str], links: str) -> list[str]:
    study, name = held.plan.study, held.name
    parts = [f"**{escaped(study.title)}** (`widemix study run {name} --report recipes/studies/results`)"]
    if not study.measured:
        parts[0] = (
            f"**{escaped(study.title)}** (computed: `widemix study report {name} --report recipes/studies/results`)"
        )
    elif not study.by_protocol:
        parts.append(_OUTSIDE if held.ended else "No runs in the tables, so no result: they are open.")
    elif not held.ended:
        parts.append("By the protocol; its runs have not ended. No verdict yet.")
    if held.verdicts:
        parts.append(claims_table(held.verdicts, overall))
    if study.measured and not held.ended:
        return parts
    parts.append(f"![{escaped(study.title)}]({links}/{name}.png)")
    cost = ""
    if study.measured:
        parts += [*baseline_lines(held.results, held.folder), *train_loss_lines(held.results, study)]
        if held.at_edge:
            names = "; ".join(map(escaped, held.at_edge))
            parts.append(f"The best values are still at the edge of what was searched: {names}.")
        rows = held.plan.table.rows.values()
        lost = sum(row.state == "diverged" for row in rows)
        cost = f" {len(rows)} runs, trials included; {lost} diverged; {held.core_hours:.2f} core hours."
    published = "; ".join(
        " ".join(filter(None, [each.panel, each.line, each.text, _points(each.points)])) + f" [{each.source}]"
        for each in study.published
    )
    parts.append(
        f"[All numbers]({links}/{name}.md).{cost}" + (f" Published: {escaped(published)}." if published else "")
    )
    return parts


def _points(points: Sequence[Sequence[float]]) -> str:
    return ", ".join(f"{y:g}{f' ± {std[0]:g}' if std else ''}" for _, y, *std in points)


def _open(entry: Entry, hours: dict[str, float]) -> str:
    parts = [entry.open] if entry.open else []
    for name in entry.full:
        cost = f" ({hours[name]:,.0f} GPU hours)" if name in hours else ""
        parts.append(f"the paper's size, `widemix study run {name}`{cost}")
    return f"Open: {'; '.join(part.rstrip('.') for part in parts)}." if parts else ""
