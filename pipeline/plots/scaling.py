"""The figure of `widemix bench scale`: throughput over ranks, and the parts of a step."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from widemix.plots.style import COLORS, new_figure, styled


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
