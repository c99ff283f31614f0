"""The options of `widemix submit`, and their checks, apart from the recipe."""

import argparse
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from widemix.cli.arguments import Parser
from widemix.cli.commands import check_least
from widemix.errors import InputError
from widemix.launch.slurm.finish import NOTICE_MIN
from widemix.recipe import Recipe, check_world

SCRIPT = Path(__file__).resolve().with_name("train.sbatch")
PASSED = ("partition", "account", "qos", "time", "constraint", "exclude")  # to sbatch, under the same names
# Options of sbatch that submit sets itself; a value may follow a short one at once.
_RESERVED, _RESERVED_SHORT = ("--array", "--nodes", "--output", "--wrap"), ("-a", "-N", "-o")


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `widemix submit`."""
    add = parser.add_argument
    add("recipe", metavar="FILE.yaml", nargs="?", help="recipe or study: a file, or a shipped one's name")
    folder = "run folder, on a disk that all nodes share; of a study, the folder of its run folders"
    add("--run-dir", type=Path, required=True, metavar="DIR", help=folder)
    add("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    gpus = "0: train on CPUs (default: those of --sbatch=--gres=gpu:N, which takes this option's place, or 4)"
    add("--gpus-per-node", type=int, metavar="N", help=gpus)
    add("--ranks-per-node", type=int, metavar="N", help="processes on each node (default: one per GPU, or 1)")
    add("--time", metavar="TIME", help="time limit of the job, as sbatch's: 24:00:00")
    add("--dry-run", action="store_true", help="print the sbatch command and the script, and submit nothing")
    _add_studies(parser.add_section("studies", "a study, or a recipe with some keys varied").add_argument)
    _add_slurm(parser.add_section("slurm", "options of sbatch, and the batch script").add_argument)
    _add_environment(parser.add_section("environment", "the software and data on the nodes").add_argument)
    _add_faults(parser.add_section("faults", "restarts, requeues and faulty nodes").add_argument)
    parser.take_keys()


def _add_studies(add: Callable) -> None:
    vary = (
        "train a recipe once for every combination of the values of all --vary, such as --vary train.seed=0,1,2: "
        "a study without a file, as an array job"
    )
    add("--vary", action="append", default=[], metavar="KEY=A,B", help=vary)
    add("--at-once", type=int, metavar="N", help="of a study: most runs at the same time (default: all)")


def _add_slurm(add: Callable) -> None:
    for name in PASSED:
        if name != "time":
            add(f"--{name}", metavar="VALUE", help=f"sbatch's --{name}")
    add("--cpus-per-node", type=int, metavar="N", help="CPUs of each node to request (default: whole nodes)")
    other = "another option of sbatch: --sbatch=--mem=64G"
    add("--sbatch", action="append", default=[], metavar="OPTION", help=other)
    script = "batch script, if not launch/slurm/train.sbatch: a copy of it that you have changed"
    add("--script", type=Path, default=SCRIPT, metavar="FILE", help=script)


def _add_environment(add: Callable) -> None:
    environment = "archive of `widemix stage --environment`: nodes unpack it to --stage-to and run that Python"
    add("--environment", type=Path, metavar="FILE.tar", help=environment)
    add("--setup", default="", metavar="COMMANDS", help="shell commands to run first: 'module load cuda/12.4'")
    add("--container", type=Path, metavar="IMAGE.sif", help="run in this Apptainer image")
    pyxis = "run in this image by Pyxis: nvcr.io#nvidia/pytorch:25.01-py3, or a file of Enroot's, IMAGE.sqsh"
    add("--container-image", type=container_image, metavar="IMAGE", help=pyxis)
    stage = "first copy the data to this folder on each node's own disk, such as '$TMPDIR'"
    add("--stage-to", default="", metavar="DIR", help=stage)


def _add_faults(add: Callable) -> None:
    restarts = "how often torchrun restarts all ranks within a job after one has crashed (default: 2)"
    add("--restarts", type=int, default=2, metavar="N", help=restarts)
    requeues = "how often the job is requeued after a signal or a failure that cost no progress (default: 100)"
    add("--requeues", type=int, default=100, metavar="N", help=requeues)
    elastic = "go on with fewer nodes, at least MIN, after some have failed: the most by which the batch divides"
    add("--elastic", type=int, metavar="MIN", help=elastic)
    preflight = (
        "run `widemix doctor --cluster` on all ranks first. report: print its table; exclude: if it finds faulty "
        "nodes, also requeue the job without them (default: no)"
    )
    add("--preflight", choices=("no", "report", "exclude"), default="no", help=preflight)


def requested_gpus(arguments: argparse.Namespace) -> tuple[int, bool]:
    """Return the GPUs of each node, and whether a --gres requests them, the only way on some clusters."""
    given = arguments.gpus_per_node
    for option in arguments.sbatch:
        if found := re.match(r"--gres=(?:.*,)?gpu(?::[^:,]*[^:,\d][^:,]*)?(?::(\d+))?(?=[,(]|$)", option):
            count = int(found[1] or 1)
            if given not in (None, count):
                raise InputError(f"--sbatch={option}: --gpus-per-node is {given}; leave that out")
            return count, True
    return 4 if given is None else given, False


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


def limit_minutes(text: str) -> float:
    """Return the minutes of a time limit in one of sbatch's forms; raises `InputError` for another."""
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
