"""Rows with their units, and tables that need no recipe: the cost of named networks, Mixers of equal connectivity."""

from collections.abc import Callable
from typing import Any, NamedTuple

from widemix.errors import InputError
from widemix.recipe import Recipe


class Row(NamedTuple):
    """A row of the table: a quantity, its text with the unit, and a remark."""

    name: str
    value: float
    text: str
    note: str = ""


def short(number: float) -> str:
    """Return three digits with a decimal prefix: 59880472 is `59.9 M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """Return bytes in MiB or GiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.2f} MiB"


def sample_of(recipe: Recipe) -> str:
    """The word for one sample."""
    return "pair" if recipe.data.kind == "text" else "image"


def show(rows: list[Row], title: str) -> None:
    """Print the rows as a table."""
    from rich.table import Table

    from widemix.progress_line import Console

    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in rows:
        table.add_row(row.name, row.text, row.note)
    Console().print(table)


_NAMED = ("name", "weights", "connections", "Omega", "width m", "max. width", "density p", "forward GFLOPs")
_PAIRS = ("C", "S", "width m = S C", "Omega")


def named_rows() -> list[dict[str, Any]]:
    """Return the cost of every named network, with 1,000 classes at 224 pixels and 10 at 32.

    Random-permuted networks are omitted: they cost the same as those without.
    """
    from widemix.models.cost import model_cost
    from widemix.models.families import named_networks

    rows = []
    for name, (section, side) in named_networks().items():
        if name.startswith("rp_"):
            continue
        cost = model_cost(section, side, 1000 if side == 224 else 10)
        widths = (cost.omega, cost.width, cost.max_width, cost.density)
        values = (name, cost.parameters, cost.connections, *widths, cost.forward_flops / 1e9)
        rows.append(dict(zip(_NAMED, values, strict=True)))
    return rows


def named_table() -> str:
    """Return `named_rows` as a Markdown table."""
    formats: tuple[Callable[[Any], str], ...] = (lambda name: f"`{name}`", "{:,}".format, short, "{:.3g}".format)
    formats += ("{:,.0f}".format, "{:,.0f}".format, "{:.3%}".format, "{:.3g}".format)
    lines = [f"| {' | '.join(_NAMED)} |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for row in named_rows():
        lines.append(f"| {' | '.join(f(value) for f, value in zip(formats, row.values(), strict=True))} |")
    return "\n".join(lines)


def pairs_rows(omega: float, gamma: float) -> list[dict[str, float]]:
    """Return Mixers of equal Omega, from few channels to few tokens, with the widest in the middle."""
    from widemix.models.layer_costs import pairs, tokens_of, widest

    if not (omega > 0 and gamma > 0):
        raise InputError(f"--omega {omega:g}, --gamma {gamma:g}: both must be above 0")
    best = widest(omega, gamma)
    if best > 1e6:
        raise InputError(
            f"--omega {omega:g}, --gamma {gamma:g}: the widest such Mixer has {best:.3g} channels, and tables end at "
            "1e+06; take a smaller Omega"
        )
    most = next(k for k in range(64) if tokens_of(best * 2 ** ((k + 1) / 2), omega, gamma) < 1)
    channels = sorted({max(1, round(best * 2 ** (k / 2))) for k in range(-most, most + 1)})
    rows = []
    for count, tokens in pairs(omega, gamma, channels):
        exact = gamma * (count * tokens**2 + count**2 * tokens) / 2
        rows.append(dict(zip(_PAIRS, (count, tokens, count * tokens, exact), strict=True)))
    return rows


def pairs_table(omega: float, gamma: float) -> str:
    """Return `pairs_rows` as a Markdown table."""
    from widemix.models.layer_costs import widest

    lines = [f"| {' | '.join(_PAIRS)} |", "|---:|---:|---:|---:|"]
    lines += [f"| {' | '.join(f'{value:,.0f}' for value in row.values())} |" for row in pairs_rows(omega, gamma)]
    return "\n".join([*lines, "", f"widest at C = S = (Omega / gamma)^(1/3) = {widest(omega, gamma):.1f}"])
