"""widemix submit."""

import argparse
from typing import TYPE_CHECKING

from widemix.errors import Exit, InputError

if TYPE_CHECKING:
    from widemix.studies.study_run import StudyRun


def add_submit(commands) -> None:
    """Add `widemix submit`."""
    from widemix.launch.slurm.options import add_arguments

    parser = commands.add_parser(
        "submit",
        help="submit a recipe or a study to Slurm",
        examples="widemix submit imagenet/mixer_b16 --run-dir /nfs/a --nodes 8 --time 24:00:00\n"
        "widemix submit figure7 --run-dir /nfs/b --at-once 8\n"
        "widemix submit digits/mixer --run-dir /nfs/c --vary train.seed=0,1,2",
        usage="%(prog)s FILE.yaml --run-dir DIR [options] [--section.key VALUE]",
        description="Submit a recipe to Slurm by one sbatch command; a study, or a recipe with --vary, as an array "
        "job. Runs of a study that are done, queued or running are skipped: the same command again submits "
        "those that have failed.",
    )
    add_arguments(parser)
    parser.set_defaults(command=submit_runs)


def submit_runs(arguments: argparse.Namespace) -> Exit:
    """Submit a recipe, or the runs of a study or of --vary."""
    from widemix.launch.slurm.options import check_options
    from widemix.launch.slurm.submit import submit

    check_options(arguments)
    return submit(arguments, _runs(arguments))


def _runs(arguments: argparse.Namespace) -> "list[StudyRun]":
    """Return the runs of the study file or of --vary; none of a recipe that is to be trained once."""
    from widemix.recipe.files import find_study
    from widemix.studies.study import is_study, read_study, study_runs_of
    from widemix.studies.study_run import cross, unique

    path = None if arguments.recipe is None else find_study(arguments.recipe)
    is_of_study = path is not None and is_study(path)
    if arguments.at_once and not arguments.vary and not is_of_study:
        raise InputError("--at-once limits the runs of a study: give it with a study file or --vary")
    if arguments.vary and is_of_study:
        raise InputError(f"--vary {arguments.vary[0]}: {arguments.recipe} is a study, which has axes of its own")
    if path is None or not is_of_study:
        return cross(path, arguments.vary, arguments.overrides) if path and arguments.vary else []
    study = read_study(path)
    if not study.measured:
        raise InputError(f"{path}: shows sizes of networks alone; `widemix study report` plots it")
    return unique(study_runs_of(path, study, arguments.overrides))
