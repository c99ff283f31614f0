"""The parser of commands: errors of one line, help of one screen with sections on request, recipe keys."""

import argparse
import difflib
import re
import shutil
import sys
import textwrap
from pathlib import Path

from widemix.errors import InputError
from widemix.recipe import SECTIONS, key_names, other_name, suggest, tables
from widemix.terminal import print


def _local_path(text: str) -> Path:
    """The path; an error of argparse for a URL, of which Path would make a folder named `s3:`."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, where a path on this machine is needed; `widemix stage URL --to DIR` copies a "
            "prepared folder from a URL"
        )
    return Path(text)


class _Formatter(argparse.HelpFormatter):
    """Fills the paragraphs of a text, and of indented lines the second column."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for line in text.splitlines():
            column = re.match(r"( +\S+  +)?", line)
            assert column
            inner = indent + " " * column.end()
            filled.append(textwrap.fill(line, width, initial_indent=indent, subsequent_indent=inner))
        return "\n".join(filled)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `InputError` and does not accept abbreviated options.

    Its help ends with `examples`, one command a line, and names the sections of `add_section`.
    """

    def __init__(self, *, examples: str = "", **options):
        super().__init__(**{"formatter_class": _Formatter, **options}, allow_abbrev=False)
        self.register("type", Path, _local_path)  # arguments of type=Path
        self._examples = examples
        self._sections: dict[str, argparse._ArgumentGroup] = {}
        self._takes_keys = False

    def add_section(self, name: str, about: str, text: str | None = None) -> argparse._ArgumentGroup:
        """Return a group of options that `--help NAME` prints, below `text`; `--help` has only its name."""
        group = self._sections[name] = self.add_argument_group(about, text)
        self._action_groups.remove(group)
        self._add_help()
        return group

    def take_keys(self) -> None:
        """Let `--help SECTION` print the recipe keys of a section."""
        self._takes_keys = True
        self._add_help()

    def _add_help(self) -> None:
        self._optionals.conflict_handler = "resolve"  # in place of argparse's --help
        text = "print this, or a section of those below"
        self.add_argument("-h", "--help", nargs="?", action=_Help, metavar="SECTION", help=text)

    def format_help(self) -> str:
        """Return the help, without the options of sections."""
        parts = [super().format_help()]
        if self._examples:
            parts.append("examples:\n" + textwrap.indent(self._examples, "  ") + "\n")
        if self._sections:
            rows = (f"  {name:<11} {group.title}\n" for name, group in self._sections.items())
            parts.append(f"sections, printed by `{self.prog} --help SECTION`:\n" + "".join(rows))
        if self._takes_keys:
            text = f"--help SECTION lists those of {', '.join(SECTIONS[:-1])} or {SECTIONS[-1]}."
            parts.append(
                "recipe keys: --section.key VALUE overrides the recipe's.\n"
                + textwrap.fill(text, 80, initial_indent="  ", subsequent_indent="  ")
                + "\n"
            )
        return "\n".join(parts)

    def format_section(self, name: str) -> str:
        """Return the options of a section of `add_section`, or the recipe keys of one."""
        known = [*self._sections, *(SECTIONS if self._takes_keys else ())]
        if name not in known:
            self.error(f"--help {name}: no such section; choose from {', '.join(known)}")
        if name not in self._sections:
            return describe_section(name) + "\n"
        group = self._sections[name]
        formatter = self._get_formatter()
        formatter.start_section(group.title)
        formatter.add_text(group.description)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
        return formatter.format_help()

    def error(self, message: str):
        """Raise `InputError` with the message and the nearest recipe key, where argparse would print its usage."""
        wrong = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message)
        if wrong:
            close = difflib.get_close_matches(wrong[1], re.findall(r"'(.+?)'", wrong[2]), n=1, cutoff=0.5)
            message += f"; did you mean {close[0]}?" if close else ""
        mistyped = [] if "required" not in message else [word for word in self._words if self._is_unknown(word)]
        if mistyped:  # what is missing may be what was mistyped
            message = f"unrecognized arguments: {' '.join(mistyped)}"
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        hint = self._nearest(unknown[1]) if unknown else ""
        raise InputError(f"{message}{hint or f'; see `{self.prog} --help`'}")

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's, but a command refuses what it does not know itself: it knows the nearest option."""
        self._words = list(sys.argv[1:] if args is None else args)
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return namespace, rest

    def _is_unknown(self, word: str) -> bool:
        return bool(re.match(r"--?[a-z]", word)) and word.partition("=")[0] not in self._option_string_actions

    def _nearest(self, option: str) -> str:
        takes_keys = any(action.dest == "recipe" for action in self._actions)
        name, keys = option.lstrip("-"), key_names() if takes_keys else ()
        meant = other_name(name) or next((key for key in keys if key.endswith(f".{name}")), "")
        known = {*self._option_string_actions, *keys}
        close = [meant] if meant in known else difflib.get_close_matches(option, self._option_string_actions, n=1)
        if close:
            return f"; did you mean --{close[0].lstrip('-')}?"
        hint = suggest(option.lstrip("-"), key_names(), "--") if takes_keys else ""
        return "" if "lists them" in hint else hint  # the help of the command lists its options


def accept_local_rank(parser: Parser) -> None:
    """Accept what DeepSpeed's launcher and torch.distributed.launch pass before all words; LOCAL_RANK is used."""
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)


def add_recipe_arguments(parser: Parser) -> None:
    """Add the argument RECIPE.yaml, and `--help SECTION` for its keys."""
    parser.add_argument(
        "recipe", metavar="RECIPE.yaml", nargs="?", help="recipe file, or a shipped recipe's name: digits/rp_mixer"
    )
    parser.take_keys()
    parser.usage = "%(prog)s RECIPE.yaml [options] [--section.key VALUE ...]"


class _Help(argparse.Action):
    """`--help` prints the help, `--help SECTION` a section."""

    def __call__(self, parser, namespace, values, option_string=None):
        print(parser.format_help() if values is None else parser.format_section(values), end="")
        parser.exit()


def describe_section(section: str) -> str:
    """Return the keys of a recipe section as text, one table for each family of networks."""
    rows = []
    width = min(100, shutil.get_terminal_size().columns)
    for title, known in tables(section):
        rows.append(f"{title}:")
        for name, (values, default, text) in known.items():
            rows.append(f"  --{name} {values}")
            stated = text if default is ... else f"{text} (default: {yaml_value(default)})"
            rows.append(textwrap.fill(stated, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(rows)


def yaml_value(value: object) -> str:
    """Return the default of a key as YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(f'{part:.4g}' for part in value)}]"
    return str(value)
