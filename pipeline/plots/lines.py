"""Lines over x with the spread of their points, what is missing of them, one legend for all panels, and scaling."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from widemix.plots.style import COLORS, literal, new_figure, styled

_MARKERS = "osD^vP*X<>"
# Places in COLORS of networks, by the words that the names of their lines begin with.
_NETWORKS = {"Normal": 0, "Mixer": 0, "S-Mixer": 0, "RP": 1, "Single RP": 1, "SW-MLP": 2, "ResNet": 3}
_GREY = "0.45"


class Line:
    """A line of a panel; its marker is that of its number, its name is in the legend."""

    def __init__(self, axes: Axes, number: int, name: str, color: str):
        self.axes, self.number, self.name, self.color = axes, number, legend_text(name), color
        self.marker = _MARKERS[number % len(_MARKERS)]

    def band(self, x: Sequence[float], y: Sequence[float], spread: Sequence[float]) -> None:
        """Plot a curve within y - spread and y + spread."""
        low, high = ([at + sign * by for at, by in zip(y, spread, strict=True)] for sign in (-1, 1))
        self.axes.plot(x, y, color=self.color, label=self.name)
        self.axes.fill_between(x, low, high, color=self.color, alpha=0.2, linewidth=0)

    def points(self, x: Sequence[float], y: Sequence[float], spread: Sequence[float], joined: bool) -> None:
        """Plot points with bars from y - spread to y + spread, joined through the mean of those of one x.

        Two are not joined: a line would say that it knows what is between them.
        """
        bars = spread if any(spread) else None
        style: dict[str, Any] = {"color": self.color, "marker": self.marker, "markersize": 5}
        self.axes.errorbar(x, y, yerr=bars, capsize=3, linestyle="none", **style)
        at: dict[float, list[float]] = {}
        for place, value in zip(x, y, strict=True):
            at.setdefault(place, []).append(value)
        means = [sum(values) / len(values) for values in at.values()]
        self.axes.plot(list(at), means, linestyle="-" if joined and len(at) > 2 else "none", label=self.name, **style)

    def values(self, x: Sequence[float], y: Sequence[float]) -> None:
        """Write the y of points above them, each line's in a row of its own."""
        above = (0, 5 + 9 * self.number)
        for at in zip(x, y, strict=True):
            text = f"{at[1]:,.4g}"
            options: dict[str, Any] = {"ha": "center", "fontsize": 7, "color": self.color}
            self.axes.annotate(text, at, above, textcoords="offset points", **options)

    def missing(self, x: Sequence[float]) -> None:
        """Mark on the axis where points are missing."""
        if x:
            height = [0.02 + 0.03 * self.number] * len(x)
            transform = self.axes.get_xaxis_transform()
            self.axes.plot(x, height, "x", color=self.color, transform=transform, alpha=0.6)


def line_colors(names: Sequence[str]) -> list[str]:
    """Return a colour for each line: that of its network, which is the same in all figures, else one of the rest."""
    known = [
        next((place for start, place in _NETWORKS.items() if re.match(rf"{start}(?![\w])", name)), None)
        for name in names
    ]
    rest = itertools.cycle([place for place in range(len(COLORS)) if place not in known])
    return [COLORS[next(rest) if place is None else place] for place in known]


def plot_reference(axes: Axes, points: Sequence[Sequence[float]], name: str) -> None:
    """Plot points of others, each (x, y) or (x, y, spread), in grey."""
    x, y = ([point[axis] for point in points] for axis in range(2))
    spread = [point[2] if len(point) > 2 else 0.0 for point in points]
    bars = spread if any(spread) else None
    axes.errorbar(
        x,
        y,
        yerr=bars,
        color=_GREY,
        linestyle="--" if len(points) > 2 else "none",
        marker="_",
        label=legend_text(name),
    )


def plot_pareto_hull(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Plot the convex hull of the points (x, y) from below, down to the lowest y, as a wide grey line behind them.

    Convex as the axes are, linear or logarithmic.
    """
    scaled = zip(points, axes.transScale.transform(points), strict=True)
    hull: list[tuple[tuple[float, float], Any]] = []
    for point, place in sorted(scaled, key=lambda pair: tuple(pair[1])):
        if hull and place[1] >= hull[-1][1][1]:
            continue
        while len(hull) > 1 and _turns_right(hull[-2][1], hull[-1][1], place):
            hull.pop()
        hull.append((point, place))
    style: dict[str, Any] = {"color": "0.85", "linewidth": 8, "solid_capstyle": "round", "zorder": 0.5}
    axes.plot(*zip(*(point for point, _ in hull), strict=True), label="Pareto hull", **style)


def _turns_right(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> bool:
    """Whether b is on or above the line from a to c, to the right of a."""
    return (b[0] - a[0]) * (c[1] - a[1]) <= (b[1] - a[1]) * (c[0] - a[0])


def legend_text(name: str, longest: int = 100) -> str:
    """A name as matplotlib shows it, in one line: no dollar begins a formula, no underscore hides it.

    One of more than `longest` characters is cut in its middle: where there is no room matplotlib gives up the layout.
    """
    line = " ".join(name.split())
    cut = line if len(line) <= longest else f"{line[: longest // 2]}…{line[-(longest // 2) :]}"
    return f" {literal(cut)}" if cut else ""


def add_legend_below(figure: Figure, axes: Sequence[Axes]) -> None:
    """Add one legend below all panels, if they have more than one line."""
    entries: dict[str, Any] = {}
    for each in axes:
        handles, labels = each.get_legend_handles_labels()
        entries |= {label: handle for handle, label in zip(handles, labels, strict=True) if label not in entries}
    if len(entries) > 1:
        longest = max(map(len, entries)) + 6  # characters, with the line and the gap
        columns = max(1, min(len(entries), 4, int(13 * figure.get_figwidth() / longest)))
        figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns)


@styled
def plot_scaling(rows: Sequence[dict[str, Any]], parts_of_step: Sequence[str]) -> Figure:
    """Return images/s next to ideal scaling from the fewest ranks, and the milliseconds of each part of a step."""
    figure, (speed, parts) = new_figure(9, 3.4, columns=2)
    ranks = [row["ranks"] for row in rows]
    rates = [row["images_per_s"] for row in rows]
    ideal = [rates[0] * count / ranks[0] for count in ranks]
    speed.plot(ranks, ideal, color="0.6", lw=1, ls=(0, (4, 3)), label="ideal")
    speed.plot(ranks, rates, color=COLORS[0], marker="o", label="measured")
    for row in rows[1:]:
        text = f"{row['efficiency']:.0%}"
        speed.annotate(text, (row["ranks"], row["images_per_s"]), (8, -10), textcoords="offset points", fontsize=8)
    speed.set(xscale="log", yscale="log", xlabel="ranks", ylabel="images/s")
    speed.set_xticks(ranks, [str(count) for count in ranks])
    speed.set_yticks(rates, [f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}" for rate in rates])
    speed.minorticks_off()
    speed.margins(0.14)
    speed.legend(loc="upper left")

    places = range(len(rows))
    below = [0.0] * len(rows)
    for part, colour in zip(parts_of_step, COLORS, strict=False):
        heights = [1e3 * row[part] for row in rows]
        parts.bar(places, heights, 0.6, bottom=below, color=colour, label=part)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    parts.set_xticks(places, [str(count) for count in ranks])
    parts.set(xlabel="ranks", ylabel="a step, ms", ylim=(0, 1.35 * max(below)))
    parts.legend(ncols=2, loc="upper left")
    return figure
