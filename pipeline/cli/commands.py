"""Shared by all commands: exit codes, one-line errors, checks of options, and loading the recipe that one names."""

import argparse
import atexit
import contextlib
import gc
import math
import os
import re
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from widemix.cli.arguments import Parser
from widemix.distributed.rank_status import write_rank_status
from widemix.errors import Exit, InputError, LauncherError, RunError, cure_of, is_of_disk
from widemix.processes import end_with_torchrun, keep_current_folder_off_path
from widemix.recipe import Recipe, fill_classes, load_recipe
from widemix.terminal import print


def run_command(
    parser: Parser,
    command: Callable[[argparse.Namespace], Exit] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Parse a command line, run its command and return the exit code.

    parser: sets `command` for each of its commands, unless the argument `command` is given.
    argv: the words after the program's name (default: those of this process).

    An `InputError` is printed as one line by rank 0, since all ranks make the same mistake; a `LauncherError` or a
    `RunError` as one line by the rank that it happened on, and so is an OSError about a file. Any other exception is
    a bug: its traceback is printed, and given to torchrun. Control characters of what is printed are shown.
    """
    keep_current_folder_off_path()
    end_with_torchrun()
    try:
        words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
        if command is None:  # typed by a person; the batch script passes empty values to its commands
            _check_filled(words)
        arguments = parser.parse_args([_in_home(word) for word in words])
        arguments.overrides = overrides
        if overrides and not hasattr(arguments, "recipe"):
            raise InputError(
                f"--{overrides[0][0]}: no such option; recipe keys are options only of commands that take a recipe; "
                f"see `{' '.join([parser.prog, *words[:1]])} --help`"
            )
        _check_finite(arguments)
        _check_outputs(arguments)
        code = int((command or arguments.command)(arguments))
        sys.stdout.flush()
        return write_rank_status(code)
    except InputError as error:
        message = _one_line(str(error))
        if isinstance(error, LauncherError) or os.environ.get("RANK", "0") == "0":
            print(f"error: {message}", file=sys.stderr)
        return write_rank_status(Exit.WRONG_INPUT, message)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return write_rank_status(Exit.FAILED, "interrupted")
    except RunError as error:
        return _fail(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_closed(sys.stdout):  # `widemix runs | head -1`
            _drop_unwritten()
            return write_rank_status(128 + signal.SIGPIPE, "nothing reads its output")
        if error.filename is None and is_of_disk(error):
            _drop_unwritten()
            return _fail(f"the output could not be written: {error.strerror}; {cure_of(error)}")
        if error.filename is None:
            return _show_bug(error)
        cure = f"; {cure_of(error)}" if is_of_disk(error) else ""
        return _fail(f"{error.filename}: {error.strerror}{cure}")  # the disk's or the user's to mend
    except Exception as error:
        return _show_bug(error)


def _drop_unwritten() -> None:
    """Drop what stdout could not write: Python tries again at the end of the process, and exits with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_least(arguments: argparse.Namespace, least: int, *names: str) -> None:
    """`InputError` where one of these options is below `least`. A list is checked by its smallest value."""
    for name in names:
        value = getattr(arguments, name, None)
        value = min(value) if isinstance(value, list) else value
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} {value:g}: must be at least {least}")


def check_most(arguments: argparse.Namespace, most: float, *names: str) -> None:
    """`InputError` where one of these options is above `most`: of sizes for which no machine has the memory."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value > most:
            raise InputError(f"--{name.replace('_', '-')} {value:g}: must be at most {most:g}")


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


def _in_home(word: str) -> str:
    """The word with `~` at its start, or that of its value, replaced by the home folder: shells leave --to=~/a."""
    return re.sub(r"^([\w-]+=)?~(?=/|$)", lambda found: (found[1] or "") + os.path.expanduser("~"), word)


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
    if folder.is_symlink() and not folder.exists():
        raise InputError(f"{option} {folder}: is a link to nothing; name a folder")
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
    if file.is_symlink():
        raise InputError(f"{option} {file}: is a link to {os.readlink(file)}; name that itself")
    if not file.parent.is_dir():
        raise InputError(f"{option} {file}: there is no folder {file.parent}")
    existed = file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise InputError(f"{option} {file}: cannot be written to ({error.strerror})") from None
    if not existed:
        file.unlink(missing_ok=True)  # another rank may have been faster


def _is_closed(output: TextIO) -> bool:
    """Whether the reader of a pipe has closed it."""
    poll = select.poll()
    poll.register(output, select.POLLERR)
    return bool(poll.poll(0))


def _one_line(message: str) -> str:
    """A message in one line, also where it names a file of which the name has several."""
    return message.replace("\n", r"\n")


def _fail(message: str) -> int:
    message = _one_line(message)
    print(f"error: {message}", file=sys.stderr)
    return write_rank_status(Exit.FAILED, message)


def _show_bug(error: Exception) -> int:
    """Print the traceback, and write it where torchrun looks for it, as its `@record` does."""
    print("".join(traceback.format_exception(error)), end="", file=sys.stderr)
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    return write_rank_status(Exit.FAILED, f"{type(error).__name__}: {error}")


def exit_rank(code: int) -> NoReturn:
    """End the process after the exit handlers, without finalising the interpreter.

    Background threads of the collectives sometimes abort during finalisation, and a finished run then exits with 134:
    seen once in about thirty runs of two ranks, with FSDP on gloo. And it takes seconds on a busy machine, where a
    launcher may wait for a rank that was to stop.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_process(code: int | str | None) -> NoReturn:
    """End the process as Python does, but without finalising the interpreter: 1.5 s once torch is imported.

    Where stdout takes no more, Python says so and exits with 120.
    """
    with contextlib.suppress(KeyboardInterrupt, OSError):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        if isinstance(code, int):
            exit_rank(code)
    sys.exit(code)


def tune_garbage_collector() -> None:
    """Collect garbage at every 100,000 new objects; for the start of a command.

    Importing torch and numba makes some hundred thousand objects that stay. Walking the new ones at every 700,
    Python's default, takes a sixth of a start, and in training ranks would pause for it at different steps.
    """
    if gc.isenabled() and gc.get_threshold()[0] < 100_000:
        gc.set_threshold(100_000, *gc.get_threshold()[1:])


def load_from_arguments(arguments: argparse.Namespace, needs_folder: bool = False) -> Recipe:
    """Load the recipe that a command line names, with its overrides applied and its number of classes filled in.

    needs_folder: whether its prepared folder is needed, which `match_folder` then reads.
    """
    if arguments.recipe is None:
        raise InputError("give a recipe, such as digits/rp_mixer")
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    return recipe if needs_folder else fill_classes(recipe)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
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
