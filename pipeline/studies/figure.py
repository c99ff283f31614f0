"""Figures: of a study, a panel for each data set and a line for each entry; of all statements, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes

from widemix.plots.lines import (
    Line,
    add_legend_below,
    legend_text,
    line_colors,
    plot_pareto_hull,
    plot_reference,
)
from widemix.plots.style import COLORS, log_axis, new_figure, save, styled
from widemix.studies.claims import Verdict
from widemix.studies.points import Point, Result, lines_of, measured_label
from widemix.studies.protocol import Published
from widemix.studies.quantity import is_number, label_of
from widemix.studies.study import Study

_ABREAST = 3  # panels in a row: of more no page shows the text, unless rows are other quantities
_SIDE = 0.5  # of the distance of two names: how far the lines of one are apart


@styled
def plot(results: Sequence[Result], study: Study, paths: Sequence[Path]) -> None:
    """Plot the figure into files, each in the format of its suffix."""
    panels = list(dict.fromkeys(result.study_run.panel for result in results))
    cells = [(name, panel) for name in study.figure.y for panel in panels]
    columns = len(panels) if len(panels) > 1 else min(len(cells), _ABREAST)  # quantities below each other, or abreast
    if len(cells) == columns > _ABREAST:
        columns = math.ceil(columns / math.ceil(columns / _ABREAST))
    rows = math.ceil(len(cells) / columns)
    figure, axes = new_figure(max(5.6, 3.9 * columns), 3.7 * rows, columns, rows, squeeze=False)
    for (name, panel), ax in zip(cells, axes.flat, strict=False):
        first = name == study.figure.y[0]
        published = [one for one in study.published if first and one.points and one.panel in ("", panel)]
        lines = lines_of(results, panel, name, study.figure)
        below = legend_text(study.figure.x_label).strip() or label_of(study.figure.x)
        if study.measured and len(lines) > 1 and len(places := {p.x for line in lines.values() for p in line}) == 1:
            below = f"{below} {places.pop()}"  # one x is no axis: the lines are
            lines = {name: [replace(p, x=name) for p in points] for name, points in lines.items()}
        _plot_panel(ax, lines, published, study)
        title = legend_text(panel) if first or ax in axes[0] else ""
        ax.set(title=title, xlabel=below, ylabel=measured_label(name, results))
    for ax in axes.flat[len(cells) :]:
        ax.remove()
    add_legend_below(figure, axes.flat)
    save(figure, paths)


def _plot_panel(ax: Axes, lines: dict[str, list[Point]], published: Sequence[Published], study: Study) -> None:
    places = [p.x for points in lines.values() for p in points]
    names = [] if all(map(is_number, places)) else list(dict.fromkeys(map(str, places)))
    everywhere: list[tuple[float, float]] = []
    for number, (color, (name, points)) in enumerate(zip(line_colors(list(lines)), lines.items(), strict=True)):
        line = Line(ax, number, name, color)
        x = [_place(str(p.x), names, name, lines) if names else float(p.x) for p in points]
        done = [(at, p.mean, 0.0 if math.isnan(p.std) else p.std) for at, p in zip(x, points, strict=True) if p.count]
        at, means, spread = map(list, zip(*done, strict=True)) if done else ([], [], [])
        if study.figure.x == "epoch":
            line.band(at, means, spread)
        else:
            line.points(at, means, spread, joined=study.figure.joined and not names)
        if names and not study.measured:
            line.values(at, means)
            ax.margins(y=0.15)
        everywhere += zip(at, means, strict=True)
        line.missing([at for at, p in zip(x, points, strict=True) if not p.count])
    for one in published:
        how = ", digitised" if one.digitised else ""
        plot_reference(ax, one.points, f"{one.line} ({one.source}{how})".strip())
    positive_x, positive_y = map(
        math.isfinite, (ax.dataLim.minposx, ax.dataLim.minposy)
    )  # else there is no such axis
    if names:
        ax.set_xticks(range(len(names)), [legend_text(study.figure.names.get(name, name), 40) for name in names])
        ax.set_xlim(-0.5, len(names) - 0.5)
    elif not study.figure.log_x:
        _whole_ticks(ax, lines)
    elif positive_x:
        log_axis(ax, "x")
    if study.figure.log_y:
        if positive_y:
            log_axis(ax, "y")
    elif ax.dataLim.y0 < 0 <= min([y for _, y in everywhere] + [y for one in published for _, y, *_ in one.points]):
        ax.set_ylim(bottom=0)  # below it are bars alone, of an error that is never there
    if study.figure.pareto_hull and everywhere and not names:
        plot_pareto_hull(ax, everywhere)
    ax.grid(alpha=0.25)


def _place(x: str, names: list[str], line: str, lines: dict[str, list[Point]]) -> float:
    """Where a line has its point of a name: next to the other lines that have one, so that none is hidden."""
    there = [other for other, points in lines.items() if any(str(p.x) == x for p in points)]
    return names.index(x) + _SIDE * ((there.index(line) + 0.5) / len(there) - 0.5)


def _whole_ticks(ax: Axes, lines: dict[str, list[Point]]) -> None:
    """Ticks at the points themselves where x is a few whole numbers, such as depths."""
    values = {float(p.x) for points in lines.values() for p in points if is_number(p.x)}
    if 1 < len(values) <= 8 and all(value.is_integer() and value < 100 for value in values):
        ax.set_xticks(sorted(values))


_LOOKS = {  # colour and marker by word
    "supported": (COLORS[0], "o"),
    "contradicted": (COLORS[1], "s"),
    "undecided": ("0.35", "D"),
    "regime not reached": ("0.7", "x"),
}
_LONGEST, _LINEAR = 84, 2  # characters of a text; units around 0 that are shown on a linear scale


@styled
def plot_statements(found: Sequence[Verdict], paths: Sequence[Path]) -> None:
    """Plot those that have an interval and one of the four words, from the top, into files.

    x is `Verdict.size`; to the right is what is claimed (of equal: the difference as it is).
    """
    shown = [one for one in found if one.word in _LOOKS and 0 < abs(one.size) < math.inf]
    figure, ax = new_figure(8.6, 1.1 + 0.2 * len(shown))
    named: set[str] = set()
    for place, one in enumerate(shown):
        assert one.estimate is not None
        sign = -1 if one.claim.expect in ("less", "not greater") else 1
        scale = sign * one.size / one.estimate.mean
        low, high = (value * scale for value in one.interval)
        colour, marker = _LOOKS[one.word]
        ax.plot([low, high], [place, place], color=colour, linewidth=1)
        ax.plot(
            sign * one.size, place, marker, color=colour, linestyle="", label="" if one.word in named else one.word
        )
        named.add(one.word)
    ax.axvspan(-1, 1, color="0.93", linewidth=0, label="within the margin")
    ax.axvline(0, color="0.5", linewidth=0.8)
    ax.set_xscale("symlog", linthresh=_LINEAR)
    ticks = [-20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_yticks(range(len(shown)), [legend_text(one.claim.text, _LONGEST) for one in shown], fontsize=7)
    ax.set_ylim(max(1, len(shown)) - 0.5, -0.5)
    ax.set_xlabel("difference in units of its margin; to the right: as claimed")
    ax.grid(alpha=0.25, axis="x")
    figure.legend(loc="outside lower center", ncols=5)
    save(figure, paths)
