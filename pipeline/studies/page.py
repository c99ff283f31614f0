"""The report of a study: a CSV file, the figure as PNG and SVG, and a Markdown page about them."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.files import atomic_write
from pipeline.studies.figure import draw
from pipeline.studies.quantity import is_number, label_of
from pipeline.studies.results import Point, Result, as_csv, lines_of
from pipeline.studies.study import Study


def write_report(results: Sequence[Result], study: Study, path: Path, folder: Path) -> list[Path]:
    """Write NAME.csv, NAME.png, NAME.svg and NAME.md into a folder, NAME being the study file's; returns their paths.

    path: of the study file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table, png, svg, page = (folder / f"{path.stem}.{suffix}" for suffix in ("csv", "png", "svg", "md"))
    atomic_write(table, as_csv(results, study))
    draw(results, study, [png, svg])
    atomic_write(page, as_page(results, study, path.name))
    return [table, png, svg, page]


def as_page(results: Sequence[Result], study: Study, name: str) -> str:
    """Return the Markdown page; the figure and the CSV file lie next to it.

    name: of the study file.
    """
    stem = name.removesuffix(".yaml")
    claim = f" The paper's claim: {study.claim}" if study.claim else ""
    parts = [f"# {study.title}", f"{study.source}.{claim}"]
    if study.verdict:
        parts.append(f"**Here:** {study.verdict}")
    parts += [f"![{study.title}]({stem}.png)", *_tables(results, study)]
    if study.published:
        parts.append(_published(study))
    missing = [result for result in results if not result.done]
    if missing:
        parts.append(f"Missing: {len(missing)} of {len(results)} cells, among them `{missing[0].cell.name}`.")
    parts.append(_conditions(results, study, name))
    return "\n\n".join(parts) + "\n"


def _tables(results: Sequence[Result], study: Study) -> list[str]:
    """A table for each panel and y: a row for each x, a column for each line. Of learning curves only the end."""
    tables = []
    for panel in dict.fromkeys(result.cell.panel for result in results):
        for name in study.figure.y:
            lines = lines_of(results, panel, name, study.figure)
            head = f"{panel}: {label_of(name)}" + (", mean ± standard deviation (seeds)" if study.measured else "")
            rows = _end_rows(lines) if study.figure.x == "epoch" else _rows(lines)
            first = "last epoch" if study.figure.x == "epoch" else label_of(study.figure.x)
            table = [f"| {first} | {' | '.join(lines)} |", f"|---:|{'---:|' * len(lines)}", *rows]
            tables.append("\n".join([head, "", *table]))
    return tables


def _rows(lines: dict[str, list[Point]]) -> list[str]:
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
        f"| {f'{key[0]:,.5g}' if numeric else key[0]} | "
        + " | ".join(_text(keyed[key].get(line)) for line in lines)
        + " |"
        for key in order
    ]


def _end_rows(lines: dict[str, list[Point]]) -> list[str]:
    ends = {line: points[-1] if points else None for line, points in lines.items()}
    epochs = max((point.x for point in ends.values() if point and is_number(point.x)), default=math.nan)
    return [f"| {epochs:g} | {' | '.join(_text(ends[line]) for line in lines)} |"]


def _text(point: Point | None) -> str:
    if point is None:
        return ""
    if not point.count:
        return "missing"
    value = f"{point.mean:,.4g}"
    if point.std > 0:  # not of one seed, nor of a size that has none
        value = f"{point.mean:.2f} ± {point.std:.2f}"
    short = f" ({point.count} of {point.wanted})" if point.count < point.wanted else f" ({point.count})"
    return value + (short if point.wanted > 1 else "")


def _published(study: Study) -> str:
    rows = ["Published:", ""]
    for published in study.published:
        where = ", ".join(filter(None, [published.panel, published.line]))
        points = "; ".join(f"{x:g}: {y:g}{f' ± {std[0]:g}' if std else ''}" for x, y, *std in published.points)
        how = " (digitised)" if published.digitised else ""
        text = " ".join(filter(None, [published.text, points]))
        rows.append(f"- {f'{where}: ' if where else ''}{text} [{published.source}{how}]")
    return "\n".join(rows)


def _conditions(results: Sequence[Result], study: Study, name: str) -> str:
    """Date, number of runs, commits, machines, hours, and the command."""
    date = time.strftime("%Y-%m-%d")
    if not study.measured:
        return f"Computed on {date} with `widemix study report recipes/studies/{name}`, without training."
    done = [result for result in results if result.done]
    runs = list({result.cell.name: result for result in done}.values())
    commits = sorted({(result.environment.get("commit") or "unknown")[:12] for result in runs})
    machines = sorted({result.environment.get("machine") or "unknown device" for result in runs})
    hours = sum(result.seconds for result in runs) / 3600
    epochs = sorted({result.cell.recipe.train.epochs for result in results})
    data = sorted({Path(result.cell.recipe.data.path).name for result in results})
    return "\n".join(
        [
            f"Drawn on {date}: {len(runs)} of {len({result.cell.name for result in results})} runs are done, "
            f"of {', '.join(map(str, epochs))} epochs on {', '.join(f'`{path}`' for path in data)}; "
            f"{hours:.2f} hours of training in all (wall clock) on {', '.join(machines) or 'no machine'}, "
            f"commit {', '.join(commits) or 'none'}. Every run is a row of [{name.removesuffix('.yaml')}.csv]"
            f"({name.removesuffix('.yaml')}.csv).",
        ]
    )
