"""Text in Markdown: names of data, classes and machines may come from strangers, and show as they are."""

import re

# What not every reader of Markdown takes as it is after a backslash; a pair of dollars is a formula.
_ENTITIES = str.maketrans({"<": "&lt;", "$": "&#36;", "~": "&#126;"})


def escaped(text: str) -> str:
    """Return a text that Markdown shows as it is, in one line, within a table too."""
    line = re.sub(r"([\\`*_|\[\]]|&(?=#?\w+;))", r"\\\1", " ".join(text.split()))
    return re.sub(r"^(\d*)([#>+.)-])", r"\1\\\2", line).translate(_ENTITIES)  # no heading, quotation or list


def code(text: str) -> str:
    """Return a text in the type of code, in one line."""
    line, fence = " ".join(text.split()), _fence(text, 1)
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"


def fenced(text: str, language: str) -> str:
    """Return lines of code, such as a recipe's, of which none ends the block."""
    fence = _fence(text, 3)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _fence(text: str, least: int) -> str:
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))
