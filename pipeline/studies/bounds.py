"""Bounds on the separation rank of Mixers and transformers, as logarithms to base 3.

Navon & Bronstein 2023, section 5. p is the number of layers, m the width of a token, n the number of tokens, H the
number of heads (in the bound of Mixers a constant). The ranks themselves have up to 3^p digits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from widemix.errors import InputError
from widemix.files import csv_text
from widemix.plots.style import COLORS, new_figure, save, styled


@dataclass(frozen=True)
class Bounds:
    """Log3 of the bounds at one depth; `transformer_lower` is nan where theorem 5.7 does not hold."""

    depth: int
    mixer_upper: float
    transformer_lower: float
    transformer_upper: float

    @property
    def separated(self) -> bool:
        """Whether every Mixer is below some transformer of this depth: the lower bound exceeds the upper one."""
        return self.transformer_lower > self.mixer_upper


def mixer_upper(depth: int, width: int, tokens: int, heads: int = 1) -> float:
    """Theorem 5.5, equation 11: 2^p log3(2 H m^2 n^2)."""
    return 2.0**depth * _base(width, tokens, heads)


def transformer_upper(depth: int, width: int, tokens: int, heads: int = 1) -> float:
    """Theorem 5.6, equations 13 and 14: 3^p log3(2 H m^2 n^2)."""
    return 3.0**depth * _base(width, tokens, heads)


def transformer_lower(depth: int, width: int, heads: int = 1) -> float:
    """Theorem 5.7, equation 15: 3^(p-2) [log3(m - H) - p + 2 - log3 2] for p < log3 m; nan elsewhere."""
    if width <= heads or depth >= math.log(width, 3):
        return math.nan
    return 3.0 ** (depth - 2) * (math.log(width - heads, 3) - depth + 2 - math.log(2, 3))


def strictly_smaller(depth: int, width: int, tokens: int, heads: int = 1) -> bool:
    """Whether conclusion 5.9 applies: p < log3 m, n < m^2, H < m / 2, p >= 13.

    It also assumes p >> log3 log3 m, which is no number to compare with; at a width of 3^30 that is 3.1.
    """
    return 13 <= depth < math.log(width, 3) and tokens < width**2 and heads < width / 2


def bounds(depths: Sequence[int], width: int, tokens: int, heads: int) -> list[Bounds]:
    """Return all bounds at each depth; raises `InputError` for sizes that no network has."""
    for name, value in (("--width", width), ("--tokens", tokens), ("--heads", heads)):
        if value < 1:
            raise InputError(f"{name} {value}: must be at least 1")
    return [
        Bounds(
            depth,
            mixer_upper(depth, width, tokens, heads),
            transformer_lower(depth, width, heads),
            transformer_upper(depth, width, tokens, heads),
        )
        for depth in depths
    ]


def _base(width: int, tokens: int, heads: int) -> float:
    return math.log(2 * heads, 3) + 2 * math.log(width, 3) + 2 * math.log(tokens, 3)


def as_csv(rows: Sequence[Bounds]) -> str:
    """Return the table, one row a depth."""
    names = ["depth", "mixer_upper_log3", "transformer_lower_log3", "transformer_upper_log3", "separated"]
    lines: list[list[object]] = [[*names]]
    for row in rows:
        values = (row.mixer_upper, row.transformer_lower, row.transformer_upper)
        cells = ["" if math.isnan(value) else f"{value:.6g}" for value in values]
        lines.append([row.depth, *cells, str(row.separated).lower()])
    return csv_text(lines)


@styled
def plot(rows: Sequence[Bounds], title: str, paths: Sequence[Path]) -> None:
    """Plot the bounds over the depth into files, each in the format of its suffix."""
    figure, ax = new_figure(6.4, 4.2)
    mixers, transformers = COLORS[:2]
    depths = [row.depth for row in rows]
    upper = [row.transformer_upper for row in rows]
    ax.plot(depths, upper, "--", color=transformers, label="transformers, upper bound (5.6)")
    lower = [(row.depth, row.transformer_lower) for row in rows if row.transformer_lower > 0]
    ax.plot(
        [p for p, _ in lower],
        [y for _, y in lower],
        "o-",
        color=transformers,
        label="transformers, lower bound (5.7)",
    )
    ax.plot(depths, [row.mixer_upper for row in rows], "s-", color=mixers, label="Mixers, upper bound (5.5)")
    ax.set(xlabel="layers p", ylabel="log₃ of the separation rank", yscale="log", title=title)
    ax.grid(alpha=0.25)
    ax.legend()
    save(figure, paths)
