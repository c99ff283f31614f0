"""The figure of a study: a panel for each data set, a line with error bars for each entry, and published points."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from widemix.plots.style import save
from widemix.studies.quantity import is_number, label_of
from widemix.studies.results import Point, Result, lines_of
from widemix.studies.study import Study

_MARKERS = "osD^vP*X<>"


def plot(results: Sequence[Result], study: Study, paths: Sequence[Path]) -> None:
    """Plot the figure into files, each in the format of its suffix."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "widemix"  # the same results give the same file
    panels = list(dict.fromkeys(result.study_run.panel for result in results))
    rows = study.figure.y
    figure, axes = plt.subplots(
        len(rows),
        len(panels),
        figsize=(max(5.6, 3.9 * len(panels)), 3.7 * len(rows)),
        layout="constrained",
        squeeze=False,
    )
    for row, name in enumerate(rows):
        for column, panel in enumerate(panels):
            ax = axes[row][column]
            _plot_panel(ax, lines_of(results, panel, name, study.figure), study)
            if row == 0:
                _plot_published(ax, panel, study)
            ax.set(title=_shown(panel) if row == 0 else "", xlabel=label_of(study.figure.x), ylabel=label_of(name))
    _add_legend(figure, axes)
    save(figure, paths)
    plt.close(figure)


def _plot_panel(ax: Any, lines: dict[str, list[Point]], study: Study) -> None:
    curve = study.figure.x == "epoch"
    places = [p.x for points in lines.values() for p in points]
    names = [] if all(map(is_number, places)) else list(dict.fromkeys(map(str, places)))
    for number, (line, points) in enumerate(lines.items()):
        color, marker = f"C{number % 10}", _MARKERS[number % len(_MARKERS)]
        x = [names.index(str(p.x)) if names else float(p.x) for p in points]
        done = [(at, p) for at, p in zip(x, points, strict=True) if p.count]
        bars = [0.0 if math.isnan(p.std) else p.std for _, p in done]
        if curve:
            low = [p.mean - bar for (_, p), bar in zip(done, bars, strict=True)]
            high = [p.mean + bar for (_, p), bar in zip(done, bars, strict=True)]
            ax.plot([at for at, _ in done], [p.mean for _, p in done], color=color, label=_shown(line))
            ax.fill_between([at for at, _ in done], low, high, color=color, alpha=0.2, linewidth=0)
        else:
            ax.errorbar(
                [at for at, _ in done],
                [p.mean for _, p in done],
                yerr=bars if any(bars) else None,
                color=color,
                marker=marker,
                markersize=5,
                capsize=3,
                linestyle="none",
            )
            joined = "none" if names else "-"
            ax.plot(*_through(done), linestyle=joined, color=color, marker=marker, markersize=5, label=_shown(line))
        missing = [at for at, p in zip(x, points, strict=True) if not p.count]
        if missing:  # on the axis
            transform = ax.get_xaxis_transform()
            ax.plot(missing, [0.02 + 0.03 * number] * len(missing), "x", color=color, transform=transform, alpha=0.6)
    if names:
        ax.set_xticks(range(len(names)), map(_shown, names))
    elif study.figure.log_x:
        ax.set_xscale("log")
    else:
        _whole_ticks(ax, lines)
    if study.figure.log_y:
        ax.set_yscale("log")
    ax.grid(alpha=0.25)


def _shown(text: str) -> str:
    """A text as matplotlib shows it: no dollar begins a formula, and no underscore hides it from the legend."""
    return f" {text}".replace("$", r"\$") if text else ""


def _through(done: Sequence[tuple[float, Point]]) -> tuple[list[float], list[float]]:
    """The line: at an x that several points have, such as (C, S) and (S, C), through their mean."""
    at: dict[float, list[float]] = {}
    for x, point in done:
        at.setdefault(x, []).append(point.mean)
    return list(at), [sum(values) / len(values) for values in at.values()]


def _whole_ticks(ax: Any, lines: dict[str, list[Point]]) -> None:
    """Ticks at the points themselves where x is a few whole numbers, such as depths."""
    values = {p.x for points in lines.values() for p in points if is_number(p.x)}
    if 1 < len(values) <= 8 and all(float(value).is_integer() and float(value) < 100 for value in values):
        ax.set_xticks(sorted(values))


def _plot_published(ax: Any, panel: str, study: Study) -> None:
    for published in study.published:
        if published.points and published.panel in ("", panel):
            how = ", digitised" if published.digitised else ""
            x, y, *std = zip(*published.points, strict=True)
            label = _shown(f"{published.line} ({published.source}{how})".strip())
            ax.errorbar(x, y, yerr=std[0] if std else None, color="0.45", linestyle="--", marker="_", label=label)


def _add_legend(figure: Any, axes: Any) -> None:
    """One legend below all panels."""
    entries: dict[str, Any] = {}
    for ax in axes.flat:
        handles, labels = ax.get_legend_handles_labels()
        entries |= {label: handle for handle, label in zip(handles, labels, strict=True) if label not in entries}
    if len(entries) > 1:
        longest = max(map(len, entries)) + 6  # characters, with the line and the gap
        columns = max(1, min(len(entries), 4, int(13 * figure.get_figwidth() / longest)))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)
