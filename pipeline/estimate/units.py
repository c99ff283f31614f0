"""Numbers with units, for people to read."""


def short(number: float) -> str:
    """Return three digits with a decimal prefix: 59880472 is `59.9 M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """Return bytes in MiB or GiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.2f} MiB"
