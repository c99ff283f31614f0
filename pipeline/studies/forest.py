"""One figure of all statements: each difference with its interval, in units of what would count."""

import math
from collections.abc import Sequence
from pathlib import Path

from widemix.plots.lines import legend_text
from widemix.plots.style import COLORS, new_figure, save, styled
from widemix.studies.claims import Verdict

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
