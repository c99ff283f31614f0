"""Writes the reference pages from the code: `python -m widemix.cli.reference docs/reference`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from widemix.cli.arguments import Parser, yaml_value
from widemix.cli.parser import make_parser
from widemix.files import atomic_write
from widemix.recipe import SECTIONS, tables
from widemix.terminal import print

ABOUT = "Made from the code, by `python -m widemix.cli.reference docs/reference`."


def commands_page() -> str:
    """Return the page of all commands, as Markdown."""
    parts = [f"# Commands\n\n{ABOUT}\n"]
    for parser in commands_of(make_parser()):
        parts.append(f"## {parser.prog}\n\n{_one_line(parser.description)}\n")
        rows = [f"| {_names(action)} | {_cell(_help(action))} |" for action in parser._actions if _is_shown(action)]
        if rows:
            parts.append("| argument | |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def keys_page() -> str:
    """Return the page of all recipe keys, as Markdown."""
    parts = [
        f"# Recipe keys\n\n{ABOUT}\n",
        "In a recipe a key is below its section; on the command line it is `--section.key VALUE`: numbers, lists and "
        "null as in YAML,\npaths and names as they are, or in YAML's quotes. A key without a default has to be "
        "given. `widemix train --help SECTION` prints the same.\n",
    ]
    for section in SECTIONS:
        for title, known in tables(section):
            parts.append(f"## {title}\n\n| key | values | default | |\n|---|---|---|---|")
            for name, (values, default, text) in known.items():
                stated = "" if default is ... else f"`{yaml_value(default)}`"
                spaced = _cell(values.replace("|", " | "))
                parts.append(f"| `{name}` | {spaced} | {stated} | {_cell(text)} |")
            parts.append("")
    return "\n".join(parts)


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands, depth first."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for child in group.choices.values():
            yield from commands_of(child)


def _is_shown(action: argparse.Action) -> bool:
    return action.help is not argparse.SUPPRESS and "--help" not in action.option_strings


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = "" if action.nargs == 0 else f" {_cell(_value(action))}"
    return ", ".join(f"`{name}{value}`" for name in action.option_strings)


def _value(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return ""
    if action.choices and not action.metavar:
        return ",".join(map(str, action.choices))
    return str(action.metavar or action.dest.upper())


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def main() -> None:
    """Write commands.md and keys.md into the folder that is given."""
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, page in (("commands.md", commands_page()), ("keys.md", keys_page())):
        atomic_write(folder / name, page)
        print(folder / name, file=sys.stderr)


if __name__ == "__main__":
    main()
