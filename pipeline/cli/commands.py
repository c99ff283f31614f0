"""What every command shares: exit codes, one line for a mistake, recipe overrides on the command line."""

import argparse
import enum
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence

from pipeline.distributed.rank_status import write_rank_status
from pipeline.errors import InputError
from pipeline.recipe import Recipe, keys, load_recipe, suggest


class Exit(enum.IntEnum):
    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2
    REQUEUE = 75  # stopped on purpose with a checkpoint: start me again


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line, like all others."""

    def __init__(self, **options):
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str):
        unknown = re.search(r"unrecognized arguments: (--?\S+)", message)
        hint = suggest(unknown[1].lstrip("-"), keys()) if unknown else f"; `{self.prog} --help` explains"
        raise InputError(f"{message}{hint}")


def run_command(
    parser: Parser,
    command: Callable[[argparse.Namespace], Exit] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Parse, run, and turn what went wrong into a line and an exit code. Only rank 0 repeats a shared mistake."""
    try:
        words, overrides = _split(sys.argv[1:] if argv is None else argv)
        arguments = parser.parse_args(words)
        arguments.overrides = overrides
        if overrides and not hasattr(arguments, "recipe"):
            raise InputError(f"--{overrides[0][0]}: no such option; only recipes have keys to override")
        return write_rank_status(int((command or arguments.command)(arguments)))
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return write_rank_status(Exit.WRONG_INPUT, str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return write_rank_status(Exit.FAILED, "interrupted")
    except Exception as error:
        write_rank_status(Exit.FAILED, f"{type(error).__name__}: {error}")
        if not isinstance(error, OSError | RuntimeError) or os.environ.get("WIDEMIX_TRACEBACK"):
            raise
        print(f"error: {error} (WIDEMIX_TRACEBACK=1 shows where)", file=sys.stderr)
        return Exit.FAILED


def add_recipe_arguments(parser: Parser) -> None:
    """The recipe, and in the epilogue of --help every key that may be overridden."""
    parser.add_argument(
        "recipe", metavar="RECIPE.yaml", nargs="?", help="a recipe, such as recipes/digits/rp_mixer.yaml"
    )
    rows = []
    for name, (kind, default, text) in keys().items():
        stated = text if default is ... else f"{text} (default: {_yaml(default)})"
        rows.append(f"  --{name} {kind if '|' in kind else kind.upper()}")
        rows.append(textwrap.fill(stated, 100, initial_indent=" " * 6, subsequent_indent=" " * 6))
    parser.epilog = (
        "Any key of the recipe as --section.key VALUE, VALUE in YAML. Defaults are those of a silent recipe.\n"
        + "\n".join(rows)
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s RECIPE.yaml [options] [--section.key VALUE ...]"


def load_from_arguments(arguments: argparse.Namespace) -> Recipe:
    if arguments.recipe is None:
        raise InputError("a recipe is missing, such as recipes/digits/rp_mixer.yaml")
    return load_recipe(arguments.recipe, arguments.overrides)


def _split(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take `--section.key VALUE` and `--section.key=VALUE` out of a command line."""
    words: list[str] = []
    overrides: list[tuple[str, str]] = []
    rest = iter(argv)
    for word in rest:
        match = re.fullmatch(r"--(\w+\.\w+)(=(.*))?", word, re.DOTALL)
        if not match:
            words.append(word)
            continue
        value = match[3] if match[2] else next(rest, None)
        if value is None:
            raise InputError(f"--{match[1]}: needs a value")
        overrides.append((match[1], value))
    return words, overrides


def _yaml(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(f'{part:.4g}' for part in value)}]"
    return str(value)
