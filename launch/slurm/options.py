"""Checks of `widemix submit`'s options, apart from the recipe."""

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from widemix.command_line.commands import check_least
from widemix.errors import InputError
from widemix.launch.slurm.finish import NOTICE_MIN
from widemix.recipe import Recipe, check_world
from widemix.recipe.files import find_study
from widemix.studies.study import is_study

# Options of sbatch that submit sets itself; a value may follow a short one at once.
_RESERVED, _RESERVED_SHORT = ("--array", "--nodes", "--output", "--wrap"), ("-a", "-N", "-o")


def elastic_sizes(arguments: argparse.Namespace, recipes: Sequence[Recipe], ranks: int) -> str:
    """Return the numbers of nodes that may train, the largest first, with commas; empty without --elastic."""
    if arguments.elastic is None:
        return ""
    sizes = []
    for size in range(arguments.nodes, arguments.elastic - 1, -1):
        with suppress(InputError):
            for recipe in recipes:
                check_world(recipe, size * ranks)
            sizes.append(str(size))
    if len(sizes) == 1:
        raise InputError(
            f"--elastic {arguments.elastic}: the batch divides by the ranks of no number of nodes from "
            f"{arguments.elastic} to {arguments.nodes - 1}; allow fewer, or change train.global_batch"
        )
    return ",".join(sizes)


def container_image(text: str) -> Path | str:
    """Return the image of --container-image: the path of a file, or a name in a registry."""
    return Path(text).resolve() if text.startswith((".", "/")) or text.endswith(".sqsh") else text


def run_folder(path: Path, study: bool) -> Path:
    """Return the absolute path of --run-dir; raises `InputError` if Slurm or a new run could not use it."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a loop of links, of which resolve() makes a RuntimeError
        raise InputError(f"{path}: cannot be read ({error.strerror}); name another folder with --run-dir") from None
    folder = path.resolve()
    if any(character in "%\\" or not character.isprintable() for character in str(folder)):
        raise InputError(
            f"{str(folder)!r}: has %, \\ or an unprintable character, so sbatch can't write a log there; name "
            "another folder with --run-dir"
        )
    for above in (folder, *folder.parents):
        if above.exists() and not above.is_dir():
            raise InputError(f"{above}: is a file; name a folder with --run-dir")
    present = {each.name for each in folder.iterdir()} if folder.exists() else set()
    if study and "recipe.yaml" in present:
        raise InputError(f"{folder}: is a run folder; name another with --run-dir for a study")
    if not study and present - {".lock", "slurm"} and "recipe.yaml" not in present:
        raise InputError(f"{folder}: is not empty and not a run folder; name another with --run-dir")
    return folder


def check_options(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for options that are wrong whatever the recipe is."""
    check_least(arguments, 1, "nodes", "ranks_per_node", "cpus_per_node", "at_once", "elastic")
    check_least(arguments, 0, "gpus_per_node", "restarts", "requeues")
    if arguments.time and (minutes := limit_minutes(arguments.time)) <= NOTICE_MIN:
        raise InputError(
            f"--time {arguments.time}: is {minutes:g} minutes, and {NOTICE_MIN} minutes before its end a job is told "
            "to save: ask for more"
        )
    if arguments.elastic is not None and arguments.elastic >= arguments.nodes:
        raise InputError(f"--elastic {arguments.elastic}: should be less than --nodes, which is {arguments.nodes}")
    if arguments.elastic is not None and arguments.preflight != "no":
        raise InputError("--elastic: cannot be combined with --preflight, which needs all nodes")
    if arguments.container and arguments.container_image:
        raise InputError("--container, of Apptainer, and --container-image, of Pyxis: give one of them")
    if arguments.environment and (arguments.container or arguments.container_image or not arguments.stage_to):
        raise InputError("--environment: needs --stage-to, where nodes unpack it, and goes without a container")
    for path in (arguments.script, arguments.container, arguments.container_image, arguments.environment):
        if isinstance(path, Path) and not path.is_file():
            raise InputError(f"{path}: no such file")
    if arguments.stage_to and arguments.stage_to[0] not in "/$":
        raise InputError(
            f"--stage-to {arguments.stage_to}: should begin with / or a variable of the nodes, such as '$TMPDIR'"
        )
    for option in arguments.sbatch:
        if not option.startswith("-"):
            raise InputError(f"--sbatch={option}: should be an option of sbatch, such as --sbatch=--mem=64G")
        if option.partition("=")[0] in _RESERVED or option.startswith(_RESERVED_SHORT):
            raise InputError(f"--sbatch={option}: is set by submit itself; see `widemix submit --help`")
    study = arguments.recipe is not None and is_study(find_study(arguments.recipe))
    if arguments.at_once and not arguments.vary and not study:
        raise InputError("--at-once limits the runs of a study: give it with a study file or --vary")
    if arguments.vary and study:
        raise InputError(f"--vary {arguments.vary[0]}: {arguments.recipe} is a study, which has axes of its own")


def limit_minutes(text: str) -> float:
    """Minutes of a time limit in one of sbatch's forms; raises `InputError` for another."""
    days = r"(?:(?P<d>\d+)-)?"
    clock = r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)" if "-" not in text else r"(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?"
    match = re.fullmatch(days + clock, text) or re.fullmatch(r"(?P<m>\d+)(?::(?P<s>\d+))?", text)
    if match is None:
        forms = "minutes, minutes:seconds, hours:minutes:seconds, days-hours or days-hours:minutes:seconds"
        raise InputError(f"--time {text}: should be {forms}, such as 24:00:00 or 1-12")
    given = [(unit, int(number)) for unit in "dhms" if (number := match.groupdict().get(unit))]
    for unit, number in given[1:]:  # the first may be any number
        name, most = {"h": ("hours", 23), "m": ("minutes", 59), "s": ("seconds", 59)}[unit]
        if number > most:
            raise InputError(f"--time {text}: has {number} {name}, where at most {most} are written")
    parts = dict(given)
    d, h, m, s = (parts.get(unit, 0) for unit in "dhms")
    return 60 * (24 * d + h) + m + s / 60
