"""Rows of the table that `widemix cost` prints: numbers with units, for people to read."""

from typing import NamedTuple

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

    from widemix.tally import Console

    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in rows:
        table.add_row(row.name, row.text, row.note)
    Console().print(table)
