"""What all commands share: exit codes, one-line errors, and recipe keys as options of the command line."""

import argparse
import difflib
import enum
import gc
import math
import os
import re
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.distributed.rank_status import write_rank_status
from pipeline.errors import InputError, RunError
from pipeline.recipe import SECTIONS, Recipe, fill_classes, keys, load_recipe, suggest, tables


class Exit(enum.IntEnum):
    """The exit code of a command."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2
    REQUEUE = 75  # stopped by a signal, after saving a checkpoint: the same command continues the run


def _local_path(text: str) -> Path:
    """The path; an error of argparse for a URL, of which Path would make a folder named `s3:`."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, where a path on this machine is needed; `widemix stage URL --to DIR` copies a "
            "prepared folder from a URL"
        )
    return Path(text)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `InputError` and does not accept abbreviated options."""

    def __init__(self, **options):
        super().__init__(**options, allow_abbrev=False)
        self.register("type", Path, _local_path)  # arguments of type=Path

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
        close = difflib.get_close_matches(option, self._option_string_actions, n=1)
        if close:
            return f"; did you mean {close[0]}?"
        takes_keys = any(action.dest == "recipe" for action in self._actions)
        return suggest(option.lstrip("-"), keys()) if takes_keys else ""


def run_command(
    parser: Parser,
    command: Callable[[argparse.Namespace], Exit] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Parse a command line, run its command and return the exit code.

    parser: sets `command` for each of its commands, unless the argument `command` is given.
    argv: the words after the program's name (default: those of this process).

    An `InputError` is printed as one line by rank 0, since all ranks make the same mistake; a `RunError` as one line
    by the rank that it happened on, and so is an OSError about a file. Any other exception is a bug: its traceback is
    printed, and given to torchrun.
    """
    try:
        words, overrides = _split(sys.argv[1:] if argv is None else argv)
        if command is None:  # typed by a person; the batch script passes empty values to its commands
            _check_filled(words)
        arguments = parser.parse_args(words)
        arguments.overrides = overrides
        if overrides and not hasattr(arguments, "recipe"):
            raise InputError(
                f"--{overrides[0][0]}: no such option; recipe keys are options only of commands that take a recipe"
            )
        _check_finite(arguments)
        _check_outputs(arguments)
        return write_rank_status(int((command or arguments.command)(arguments)))
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return write_rank_status(Exit.WRONG_INPUT, str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return write_rank_status(Exit.FAILED, "interrupted")
    except RunError as error:
        return _fail(str(error))
    except OSError as error:
        if error.filename is None:
            return _show_bug(error)
        return _fail(f"{error.filename}: {error.strerror}")  # of a file or folder: the disk's or the user's to mend
    except Exception as error:
        return _show_bug(error)


def check_least(arguments: argparse.Namespace, least: int, *names: str) -> None:
    """`InputError` where one of these options is below `least`. A list is checked by its smallest value."""
    for name in names:
        value = getattr(arguments, name, None)
        value = min(value) if isinstance(value, list) else value
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} {value:g}: must be at least {least}")


def _check_finite(arguments: argparse.Namespace) -> None:
    for name, value in vars(arguments).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"--{name.replace('_', '-')} {value}: must be a finite number")


def _check_filled(words: Sequence[str]) -> None:
    """`InputError` for an empty word: as a path it would be the working directory."""
    for before, word in zip(["", *words], words, strict=False):
        option = word[:-1] if re.fullmatch(r"--[\w-]+=", word) else before
        if not word.strip() or word == f"{option}=":
            subject = f"{option}:" if option.startswith("--") else "an argument"
            raise InputError(f"{subject} is empty; give a value (is a variable of the shell not set?)")


def _check_outputs(arguments: argparse.Namespace) -> None:
    """`InputError` where --json, --to, --report, --exclude or --tensorboard could not be written, before any work."""
    run = getattr(arguments, "tensorboard", None)
    if run is not None and not (run / "recipe.yaml").is_file():
        raise InputError(f"--tensorboard {run}: is no run folder; give one that `widemix train` wrote")
    for option, name in (("--json", "json"), ("--to", "to_file"), ("--exclude", "exclude")):
        if isinstance(getattr(arguments, name, None), Path):  # --exclude of submit has names of nodes
            _check_file(option, getattr(arguments, name))
    for option in ("to", "report"):
        if isinstance(getattr(arguments, option, None), Path):
            _check_folder(f"--{option}", getattr(arguments, option))


def _check_folder(option: str, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{option} {folder}: is a file; name a folder")
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        raise InputError(f"{option} {folder}: cannot be written to ({error.strerror})") from None


def _check_file(option: str, file: Path) -> None:
    if file.is_dir():
        raise InputError(f"{option} {file}: is a folder; name a file")
    if file.exists() and not file.is_file():  # writing would replace a device such as /dev/null by a file
        raise InputError(f"{option} {file}: is not an ordinary file; name another")
    if not file.parent.is_dir():
        raise InputError(f"{option} {file}: there is no folder {file.parent}")
    existed = file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise InputError(f"{option} {file}: cannot be written to ({error.strerror})") from None
    if not existed:
        file.unlink(missing_ok=True)  # another rank may have been faster


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return write_rank_status(Exit.FAILED, message)


def _show_bug(error: Exception) -> int:
    """Print the traceback, and write it where torchrun looks for it, as its `@record` does."""
    traceback.print_exception(error)
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    return write_rank_status(Exit.FAILED, f"{type(error).__name__}: {error}")


def tune_garbage_collector() -> None:
    """Collect garbage at every 100,000 new objects; for the start of a command.

    Importing torch and numba makes some hundred thousand objects that stay. Walking the new ones at every 700,
    Python's default, takes a sixth of a start, and in training ranks would pause for it at different steps.
    """
    if gc.isenabled() and gc.get_threshold()[0] < 100_000:
        gc.set_threshold(100_000, *gc.get_threshold()[1:])


def add_recipe_arguments(parser: Parser) -> None:
    """Add the argument RECIPE.yaml and `--help SECTION`; `parser.epilog` may have examples."""
    parser.add_argument(
        "recipe", metavar="RECIPE.yaml", nargs="?", help="recipe file, or a shipped recipe's name: digits/rp_mixer"
    )
    parser._optionals.conflict_handler = "resolve"  # in place of argparse's --help
    parser.add_argument(
        "-h", "--help", nargs="?", action=_Help, metavar="SECTION", help="print this, or the keys of a recipe section"
    )
    parser.epilog = (parser.epilog or "") + (
        "recipe keys: --section.key VALUE, with the value in YAML, overrides the recipe's. Their lists:\n"
        + textwrap.fill(
            ", ".join(f"{parser.prog} --help {section}" for section in SECTIONS[:2])
            + f"; also of {', '.join(SECTIONS[2:])}.",
            100,
            initial_indent="  ",
            subsequent_indent="  ",
        )
    )
    parser.description = textwrap.fill(parser.description, 100) if parser.description else None
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s RECIPE.yaml [options] [--section.key VALUE ...]"


class _Help(argparse.Action):
    """`--help` prints the help, `--help SECTION` the keys of a section."""

    def __call__(self, parser, namespace, values, option_string=None):
        if values is None:
            parser.print_help()
        elif values in SECTIONS:
            print(describe_section(str(values)))
        else:
            parser.error(f"--help {values}: no such section; choose from {', '.join(SECTIONS)}")
        parser.exit()


def describe_section(section: str) -> str:
    """Return the keys of a recipe section as text, one table for each family of networks."""
    rows = []
    for title, known in tables(section):
        rows.append(f"{title}:")
        for name, (values, default, text) in known.items():
            rows.append(f"  --{name} {values}")
            stated = text if default is ... else f"{text} (default: {yaml_value(default)})"
            rows.append(textwrap.fill(stated, 100, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(rows)


def load_from_arguments(arguments: argparse.Namespace) -> Recipe:
    """Load the recipe that a command line names, with its overrides applied and its number of classes filled in."""
    if arguments.recipe is None:
        raise InputError("give a recipe, such as recipes/digits/rp_mixer.yaml")
    return fill_classes(load_recipe(arguments.recipe, arguments.overrides))


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
        if value is None or (not match[2] and value.startswith("--")):
            raise InputError(f"--{match[1]}: needs a value")
        overrides.append((match[1], value))
    return words, overrides


def yaml_value(value: object) -> str:
    """Return the default of a key as YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(f'{part:.4g}' for part in value)}]"
    return str(value)
