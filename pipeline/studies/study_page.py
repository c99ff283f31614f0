"""The report of a study: a CSV file, the figure as PNG and SVG, and a Markdown page about them."""

import math
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from urllib.parse import quote

from widemix.files import atomic_write
from widemix.markdown import code, escaped
from widemix.recipe.files import shipped_name
from widemix.studies.baselines import baseline_lines, points_below
from widemix.studies.claims import Verdict, verdicts
from widemix.studies.figure import plot
from widemix.studies.points import Point, Result, as_csv, ends_of, lines_of, measured_label
from widemix.studies.protocol import Statement
from widemix.studies.quantity import is_number, label_of
from widemix.studies.search import Arm, Trial, best
from widemix.studies.search import as_csv as trials_as_csv
from widemix.studies.study import Study

_NOT_SEARCHED = (
    "No values were searched for each line of this study (`docs/explanation/protocol.md` of widemix): what looks "
    "like a difference of networks may be one of settings."
)
_CLAIMS_HEAD = """\
| claim | source | expected | difference or slope | 95 % interval | p (Holm) | seeds | verdict |
|---|---|---|---:|---:|---:|---:|---|"""
Searched = Sequence[tuple[Arm, Sequence[Trial]]]


def write_report(
    results: Sequence[Result],
    study: Study,
    path: Path,
    folder: Path,
    searched: Searched = (),
    options: str = "",
) -> list[Path]:
    """Write NAME.csv, NAME.png, NAME.svg and NAME.md into a folder, NAME being the study file's, and the trials of
    its search, if it has one, into NAME_search.csv; returns their paths.

    path: of the study file. options: those of the command that make it another study, or a part of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table, png, svg, page, trials = (
        folder / f"{path.stem}{suffix}" for suffix in (".csv", ".png", ".svg", ".md", "_search.csv")
    )
    atomic_write(table, as_csv(results, study))
    plot(results, study, [png, svg])
    baselines, below = baseline_lines(results, folder), points_below(results, folder)
    atomic_write(page, as_page(results, study, path.name, searched, baselines, below, options))
    if searched:
        atomic_write(trials, trials_as_csv(searched))
    return [table, png, svg, page, *([trials] if searched else [])]


def as_page(
    results: Sequence[Result],
    study: Study,
    name: str,
    searched: Searched = (),
    baselines: Sequence[str] = (),
    below: Set[tuple] = frozenset(),
    options: str = "",
) -> str:
    """Return the Markdown page; the figure and the CSV file lie next to it.

    name: of the study file. baselines: lines about what knows nothing of networks. below: as of `verdicts`. options:
    as of `write_report`.
    """
    stem, title = quote(name.removesuffix(".yaml")), escaped(study.title)
    claim = f" Claim: {escaped(study.claim)}" if study.claim else ""
    parts = [f"# {title}", f"{escaped(study.source)}.{claim}"]
    if options:
        parts.append(f"**Not the study as its file has it**, but with `{options}`.")
    if study.claims:
        parts.append(claims_table(verdicts(results, study, below)))
    parts += filter(None, [f"![{title}]({stem}.png)", plot_caption(study), *_tables(results, study), *baselines])
    if study.published:
        parts.append(_published(study))
    if searched:
        parts.append(_search(searched, study, stem))
    parts += [*train_loss_lines(results, study), *_not_plotted(results, study)]
    missing = [result for result in results if result.row is None]
    if missing and study.measured:
        parts.append(f"Missing: {len(missing)} of {len(results)} runs, among them `{missing[0].study_run.name}`.")
    if study.measured and not study.by_protocol:
        parts.append(_NOT_SEARCHED)
    parts.append(_conditions(results, study, name, searched, f" {options}" if options else ""))
    return "\n\n".join(parts) + "\n"


def train_loss_lines(results: Sequence[Result], study: Study) -> list[str]:
    """Return the note on train losses that are means by the earlier rule, where the study shows them."""
    old = sum(result.row is not None and result.row.train_loss_over == "lines" for result in results)
    if not old or "train_loss" not in study.figure.y:
        return []
    return [
        f"Train losses of {old} of {len(results)} runs are means over the last epoch's lines, which count alike "
        "though the last may be of fewer than 50 steps; those of the others are means over its steps."
    ]


def _not_plotted(results: Sequence[Result], study: Study) -> list[str]:
    """A line for each result that has no place on a logarithmic axis."""
    if not study.figure.log_y:
        return []
    lost = [
        (result.study_run.name, name) for result in results for name in study.figure.y if result.y.get(name, 1) <= 0
    ]
    return [f"Not plotted, since a logarithmic axis has no 0: {name} of `{run}`." for run, name in lost]


def claims_table(found: Sequence[Verdict]) -> str:
    """A row for each claim, with what the runs say of it."""
    several = len({verdict.claim.panel for verdict in found}) > 1
    rows = [" | ".join(verdict_cells(verdict, several)) for verdict in found]
    return "\n".join([_CLAIMS_HEAD, *(f"| {row} |" for row in rows)])


def verdict_cells(verdict: Verdict, panel: bool) -> list[str]:
    """Return the cells of a table's row: claim, source, what is expected, difference, interval, p, seeds and word.

    panel: whether the claim begins with its panel's name.
    """
    claim, estimate = verdict.claim, verdict.estimate
    text = escaped(f"{claim.panel}: {claim.text}" if panel else claim.text)
    expected = claim.expect + (f" (± {claim.margin:g})" if claim.margin else "")
    numbers = ["", "", "", ""]
    if estimate is not None and estimate.exact:
        numbers = [f"{estimate.mean:+.6g}", "exact", "", ""]
    elif estimate is not None:
        low, high = estimate.interval
        p = "" if math.isnan(verdict.p) else f"{verdict.p:.2g}"
        seeds = f"{estimate.count}{'' if estimate.paired else ', unpaired'}"
        numbers = [f"{estimate.mean:+.3g}", f"{low:+.3g} to {high:+.3g}", p, seeds]
    return [text, source_cell(claim), expected, *numbers, _word(verdict)]


def plot_caption(study: Study) -> str:
    """Return the caption of a study's figure: what its marks and bars are."""
    if not study.measured:
        return ""
    mark, bar = ("Curves", "bands") if study.figure.x == "epoch" else ("Points", "bars")
    if len(study.seeds) < 2:
        return f"{mark} are of one run each."
    return f"{mark} are means of {len(study.seeds)} seeds, {bar} one standard deviation to each side."


def source_cell(claim: Statement) -> str:
    """Where a claim is from, and what of it is younger than its runs."""
    line = claim.place.rpartition(":")[2]
    late = f"{' and '.join(claim.after_runs)} stated after the runs" if claim.after_runs else ""
    return escaped("; ".join(filter(None, [claim.source or "ours", f"line {line}" if line else "", late])))


def _word(verdict: Verdict) -> str:
    """The word of a verdict, and what has to be known with it."""
    if verdict.estimate is None:
        return verdict.word
    notes = [escaped(verdict.note)]
    if verdict.word == "undecided":
        border = 0.0 if verdict.claim.expect in ("greater", "less") else verdict.claim.margin
        shown = f"a difference of {border + verdict.detectable:.2g} or more would have shown"
        notes.insert(0, shown if verdict.estimate.error else "all seeds have the same difference")
    word = f"**{verdict.word}{', by the margin alone' if verdict.by_margin else ''}**"
    return ": ".join(filter(None, [word, "; ".join(filter(None, notes))]))


def _search(searched: Searched, study: Study, stem: str) -> str:
    """Return the table of chosen values: from how many trials, and whether they lie at the edge of what was tried."""
    assert study.search is not None
    names = list(dict.fromkeys(name for arm, _ in searched for name in arm.ranges))
    rows = [
        f"Values with the best top-1 on the split `{study.search.split}`, of single runs with seed "
        f"{study.search.seed} that are no results ([{stem}_search.csv]({stem}_search.csv)):",
        "",
        f"| point | {' | '.join(names)} | top-1 (%) | trials | diverged | |",
        f"|---|{'---:|' * (len(names) + 3)}---|",
    ]
    for arm, trials in searched:
        winner = best(trials, arm.search.ties)
        values = [f"{winner.values[name]:g}" if winner and name in winner.values else "" for name in names]
        top1 = f"{winner.top1:.2f}" if winner and winner.top1 is not None else ""
        ended = [trial for trial in trials if trial.top1 is not None]
        diverged = sum(math.isnan(trial.top1) for trial in ended if trial.top1 is not None)
        note = "not complete" if len(ended) < len(trials) else "at the edge" if arm.at_edge(trials) else ""
        rows.append(f"| {escaped(arm.name)} | {' | '.join(values)} | {top1} | {len(ended)} | {diverged} | {note} |")
    return "\n".join(rows)


def _tables(results: Sequence[Result], study: Study) -> list[str]:
    """A table for each panel and y: a row for each x, a column for each line. Of learning curves only the end."""
    tables = []
    for panel in dict.fromkeys(result.study_run.panel for result in results):
        for name in study.figure.y:
            curves = study.figure.x == "epoch"
            lines = ends_of(results, panel, name) if curves else lines_of(results, panel, name, study.figure)
            spread = ", mean ± standard deviation (seeds)" if study.measured else ""
            head = f"{escaped(panel)}: {measured_label(name, results)}{spread}"
            first = "last epoch" if curves else study.figure.x_label or label_of(study.figure.x)
            table = [
                f"| {escaped(first)} | {' | '.join(map(escaped, lines))} |",
                f"|---:|{'---:|' * len(lines)}",
                *_rows(lines, study.figure.names),
            ]
            tables.append("\n".join([head, "", *table]))
    return tables


def _rows(lines: dict[str, list[Point]], names: Mapping[str, str]) -> list[str]:
    """One row for each x; of several points of a line at one x, each gets a row."""
    keyed: dict[tuple, dict[str, Point]] = {}
    for line, points in lines.items():
        count: dict[float | str, int] = {}
        for point in points:
            count[point.x] = count.get(point.x, 0) + 1
            keyed.setdefault((point.x, count[point.x]), {})[line] = point
    numeric = all(is_number(x) for x, _ in keyed)
    order = sorted(keyed) if numeric else list(keyed)
    return [
        f"| {f'{key[0]:,.5g}' if numeric else escaped(names.get(str(key[0]), str(key[0])))} | "
        + " | ".join(_text(keyed[key].get(line)) for line in lines)
        + " |"
        for key in order
    ]


def _text(point: Point | None) -> str:
    if point is None:
        return ""
    lost = f", {point.diverged} diverged" if point.diverged else ""
    if not point.count:
        return f"missing{lost}"
    value = f"{point.mean:,.4g}"
    if point.std > 0:  # not of one seed, nor of a size that has none
        digits = max(2, -math.floor(math.log10(point.std)))
        value = f"{point.mean:.{digits}f} ± {point.std:.{digits}f}"
    short = f" ({point.count} of {point.wanted}{lost})" if point.count < point.wanted else f" ({point.count})"
    return value + (short if point.wanted > 1 else "")


def _published(study: Study) -> str:
    rows = ["Published:", ""]
    for published in study.published:
        where = escaped(", ".join(filter(None, [published.panel, published.line])))
        points = "; ".join(f"{x:g}: {y:g}{f' ± {std[0]:g}' if std else ''}" for x, y, *std in published.points)
        how = " (digitised)" if published.digitised else ""
        text = escaped(" ".join(filter(None, [published.text, points])))
        rows.append(f"- {f'{where}: ' if where else ''}{text} [{escaped(published.source)}{how}]")
    return "\n".join(rows)


def _conditions(results: Sequence[Result], study: Study, name: str, searched: Searched, options: str) -> str:
    """Date, number of runs, commits, machines, hours, and the command."""
    date, stem = time.strftime("%Y-%m-%d"), name.removesuffix(".yaml")
    if not study.measured:
        return f"Computed on {date} with `widemix study report recipes/studies/{name}{options}`, without training."
    rows = {result.row.run: result.row for result in results if result.row}
    wanted = {result.study_run.name for result in results}
    commits = sorted({escaped(row.commit) for row in rows.values()})
    machines = sorted({escaped(row.machine) for row in rows.values()})
    hours = sum(row.seconds or 0 for row in rows.values()) / 3600
    took = f"{hours:.2f} hours" if hours >= 0.05 else f"{60 * hours:.1f} minutes"
    cores = [row.core_seconds for row in rows.values() if row.core_seconds is not None]
    speeds = [row.images_per_s for row in rows.values() if row.images_per_s is not None]
    epochs = sorted({result.study_run.recipe.train.epochs for result in results})
    data = sorted({Path(result.study_run.recipe.data.path).name for result in results})
    diverged = sum(row.state == "diverged" for row in rows.values())
    trials = sum(trial.top1 is not None for _, trials in searched for trial in trials)
    return (
        f"Plotted on {date}: {len(rows)} of {len(wanted)} runs have ended, {diverged} of them diverged, "
        f"of {', '.join(map(str, epochs))} epochs on {', '.join(map(code, data))}; "
        + (f"{trials} trials of the search; " if searched else "")
        + f"{took} of training (wall clock) on {', '.join(machines) or 'no machine'}"
        + (f", {sum(cores) / 3600:.2f} core hours of {len(cores)} runs" if cores else "")
        + (f", {min(speeds):,.0f} to {max(speeds):,.0f} images/s" if speeds else "")
        + f"; commit {', '.join(commits) or 'none'}. Every run is a row of [{stem}.csv]({quote(stem)}.csv)"
        + f" and a line of [{stem}.jsonl]({quote(stem)}.jsonl); "
        + f"`widemix study run {shipped_name(stem)}{options}` trains those that are missing."
    )
