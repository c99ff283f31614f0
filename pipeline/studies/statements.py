"""The statements of a page of results: a table for each paper, and the findings that it begins with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from widemix.markdown import escaped
from widemix.studies.baselines import points_below
from widemix.studies.claims import Verdict, verdicts
from widemix.studies.plan import Plan, make_plan, open_trials
from widemix.studies.points import Result
from widemix.studies.rows import Table
from widemix.studies.study import read_study
from widemix.studies.study_page import Searched, source_cell, verdict_cells

MOST = 5
_AGAINST = 2  # of these at most, where there are others
_SEEDS = 5


@dataclass(frozen=True)
class Held:
    """A study of the catalogue with its committed table."""

    plan: Plan
    folder: Path  # of the tables

    @cached_property
    def results(self) -> list[Result]:
        """Results of all its runs."""
        return self.plan.results()

    @property
    def name(self) -> str:
        """Name of its file."""
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

    @property
    def state(self) -> str:
        """How far it is, in words."""
        if not self.plan.study.measured:
            return "computed, no training"
        if not self.plan.study.by_protocol:
            return "not under the protocol" if any(result.row for result in self.results) else "withdrawn, to be run"
        return "ended" if self.ended else "its runs have not ended"

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on its claims; none where it does not follow the protocol."""
        study = self.plan.study
        decided = self.ended if study.by_protocol else not study.measured
        return verdicts(self.results, study, points_below(self.results, self.folder)) if decided else []

    @property
    def core_hours(self) -> float:
        """Core hours of all its rows, trials included; wall clock where cores were not counted yet."""
        rows = self.plan.table.rows.values()
        return sum(row.core_seconds if row.core_seconds is not None else row.seconds or 0 for row in rows) / 3600


def read_held(path: Path, folder: Path) -> Held:
    """A study's file with its table in the folder of the tables."""
    return Held(make_plan(path, read_study(path), Table(folder / f"{path.stem}.jsonl")), folder)


@dataclass(frozen=True)
class Stated:
    """A statement with what decides it.

    figure: of the paper. quantity: what is compared. theirs, ours: what was trained, in words. rows: a link to what
    was measured, and its cost.
    """

    verdict: Verdict
    figure: str
    quantity: str = ""
    theirs: str = ""
    ours: str = ""
    rows: str = ""
    several: bool = False  # whether its study has other panels too


def statements_table(stated: Sequence[Stated], overall: Mapping[int, str] | None = None) -> list[str]:
    """A row for each statement that has numbers, and a sentence about the others.

    overall: what to say of verdicts on statements of papers, by their identity.
    """
    names = ["statement", "word", "difference", "95 % interval", "p", "seeds", "trained here", "trained in the paper"]
    names += ["place", "expected", "all papers", "rows, core hours"]
    kept = [name for name in names if overall is not None or name not in ("trained in the paper", "all papers")]
    right = {"difference", "95 % interval", "p", "seeds"}
    rows, without = [], dict[tuple[str, str], int]()
    for one in stated:
        if one.verdict.estimate is None:
            key = (one.rows.partition(",")[0], one.verdict.word)
            without[key] = without.get(key, 0) + 1
            continue
        text, place, expected, difference, *numbers, word = verdict_cells(one.verdict, one.several)
        if sides := one.verdict.estimate.sides:
            difference = f"{escaped(one.quantity)}: {sides[0]:#.4g} - {sides[1]:#.4g} = {difference}"
        last = (overall or {}).get(id(one.verdict), "")
        cells = [text, word, difference, *numbers, one.ours, one.theirs, place, expected, last, one.rows]
        rows.append([cell for name, cell in zip(names, cells, strict=True) if name in kept])
    lines = [f"| {' | '.join(row)} |" for row in [kept, *rows]]
    lines.insert(1, f"|{'|'.join('---:' if name in right else '---' for name in kept)}|")
    table = ["\n".join(lines)] if rows else []
    left = "; ".join(f"{count} of {link} ({word})" for (link, word), count in without.items())
    return [*table, *([f"Statements without numbers: {left}."] if left else [])]


def findings(found: Sequence[Stated], overall: Mapping[int, str]) -> str:
    """Return a numbered list of the clearest statements, one of each figure and word: five, at most two contradicted.

    Of a paper, and decided also over the statements of all papers; what a margin alone decides is none. Those of
    five seeds and more come before others, then the greatest difference (`Verdict.size`).

    found: in the order of the page. overall: as of `statements_table`.
    """
    ranked = sorted(found, key=_rank)
    first: dict[str, dict[str, Stated]] = {"contradicted": {}, "supported": {}}
    for one in ranked:
        verdict = one.verdict
        if not verdict.by_margin and overall.get(id(verdict), "").startswith(f"{verdict.word},"):
            first.get(verdict.word, {}).setdefault(one.figure, one)
    against, held = (list(of_word.values()) for of_word in first.values())
    chosen = [*against[: max(_AGAINST, MOST - len(held))], *held][:MOST]
    lines = map(_words, sorted(chosen, key=_rank))
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, start=1)) or (
        "None yet: no statement is decided."
    )


def _rank(one: Stated) -> tuple[bool, float]:
    few = one.verdict.estimate is None or one.verdict.estimate.count < _SEEDS
    return (few, -abs(one.verdict.size))


def _words(one: Stated) -> str:
    claim, estimate = one.verdict.claim, one.verdict.estimate
    assert estimate is not None
    panel = f"{claim.panel}: " if claim.panel else ""
    sizes = "".join(f"; {who}: {what}" for who, what in (("here", one.ours), ("in the paper", one.theirs)) if what)
    quantity = f" of {escaped(one.quantity)}" if one.quantity else ""
    text = f"**{one.verdict.word}**: {escaped(panel + claim.text)} [{source_cell(claim)}]: difference{quantity} "
    text += f"{estimate.mean:+.4g}, "
    if estimate.exact:
        return f"{text}exact ({one.figure}{sizes})"
    low, high = one.verdict.interval
    text += f"95 % interval {low:+.4g} to {high:+.4g}, p = {one.verdict.p:.2g}, n = {estimate.count}"
    return f"{text} ({one.figure}{sizes})"
