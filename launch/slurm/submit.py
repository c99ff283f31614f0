"""Hand a recipe, or a study of its variations, to Slurm: one sbatch command, shown before it is run."""

import argparse
import getpass
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.slurm.cells import TABLE, cross, merge, ranges, unfinished
from pipeline.cli.commands import Exit, load_from_arguments
from pipeline.errors import InputError
from pipeline.files import atomic_write
from pipeline.formats.manifest import read_manifest
from pipeline.recipe import check_world, load_recipe

SCRIPT = Path(__file__).with_name("train.sbatch")
_PASSED = ("partition", "account", "qos", "time", "constraint", "exclude")  # to sbatch, under the same names
_OURS = ("--array", "--nodes", "--output", "--wrap")  # what is started and where its words go follows from these


@dataclass(frozen=True)
class Submission:
    """A command that sbatch understands, the folder that it is about, and the lines of the study's table."""

    command: list[str]
    folder: Path
    cells: list[str]
    numbers: list[int]  # lines of those that are submitted; empty for a single run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", metavar="RECIPE.yaml", nargs="?")
    add(
        "--run-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="on a disk that all nodes share; of a study: of its cells",
    )
    add("--nodes", type=int, default=1, metavar="N", help="(default: 1)")
    add("--gpus-per-node", type=int, default=4, metavar="N", help="0 trains on CPUs (default: 4)")
    add("--ranks-per-node", type=int, metavar="N", help="(default: one a GPU, or 1)")
    add("--cpus-per-node", type=int, metavar="N", help="share the node with others (default: all of it)")
    for name in _PASSED:
        add(f"--{name}", help="as sbatch has it")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="any other of sbatch's: --sbatch=--mem=64G")
    add("--container", type=Path, metavar="IMAGE", help="run in this Apptainer image")
    add(
        "--stage-to", default="", metavar="DIR", help="copy the data to each node's own disk first, such as '$TMPDIR'"
    )
    add("--restarts", type=int, default=2, metavar="N", help="of crashed ranks within a job (default: 2)")
    known = "run `widemix doctor --cluster` on all ranks first; exclude: start again without sick nodes (default: no)"
    add("--preflight", choices=("no", "report", "exclude"), default="no", help=known)
    add("--vary", action="append", default=[], metavar="KEY=A,B", help="a study: an array job, a cell a combination")
    add("--at-once", type=int, metavar="N", help="cells of a study that run at the same time (default: all)")
    add("--script", type=Path, default=SCRIPT, metavar="FILE", help="a changed copy of launch/slurm/train.sbatch")
    add("--dry-run", action="store_true", help="print the command and the script, and do nothing")


def plan(arguments: argparse.Namespace) -> Submission:
    """Check what can be checked on the login node, and put the command together."""
    _check(arguments)
    ranks = arguments.ranks_per_node or arguments.gpus_per_node or 1
    recipe = load_from_arguments(arguments)
    check_world(recipe, arguments.nodes * ranks)
    read_manifest(Path(recipe.data.path))
    folder = _folder(arguments)
    lines, numbers = _cells(arguments, folder, arguments.nodes * ranks)
    options = ["--job-name", f"widemix-{folder.name}", "--nodes", str(arguments.nodes)]
    options += ["--output", f"{folder}/slurm/{'%A_%a' if numbers else '%j'}.log"]
    options += ["--gpus-per-node", str(arguments.gpus_per_node)] if arguments.gpus_per_node else []
    shared = arguments.cpus_per_node
    options += ["--cpus-per-task", str(shared)] if shared else ["--exclusive", "--mem", "0"]
    for name in _PASSED:
        if value := getattr(arguments, name):
            options += [f"--{name}", value]
    if numbers:
        options += ["--array", ranges(numbers) + (f"%{arguments.at_once}" if arguments.at_once else "")]
    python = _python(arguments, folder, Path(recipe.data.path))
    train = [arguments.recipe, *(f"--{name}={value}" for name, value in arguments.overrides)]
    words = [
        str(folder),
        str(ranks),
        str(arguments.restarts),
        arguments.preflight,
        arguments.stage_to,
        *python,
        "--",
        *train,
    ]
    command = ["sbatch", "--parsable", *options, *arguments.sbatch, str(arguments.script), *words]
    return Submission(command, folder, lines, numbers)


def _check(arguments: argparse.Namespace) -> None:
    """What can be wrong with the options by themselves."""
    least = {"nodes": 1, "ranks_per_node": 1, "cpus_per_node": 1, "at_once": 1, "gpus_per_node": 0, "restarts": 0}
    for name, lowest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < lowest:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be at least {lowest}")
    for path in (arguments.script, arguments.container):
        if path is not None and not path.is_file():
            raise InputError(f"{path}: there is no such file")
    if arguments.stage_to and arguments.stage_to[0] not in "/$":
        raise InputError(
            f"--stage-to {arguments.stage_to}: should begin with / or a variable of the nodes, as '$TMPDIR'"
        )
    for option in arguments.sbatch:
        if not option.startswith("-"):
            raise InputError(f"--sbatch={option}: should be an option of sbatch's, such as --sbatch=--mem=64G")
        if option.partition("=")[0] in _OURS:
            raise InputError(f"--sbatch={option}: is set by submit itself; `widemix submit --help` says by what")
    if arguments.at_once and not arguments.vary:
        raise InputError("--at-once is about the cells of a study: give it with --vary")


def _folder(arguments: argparse.Namespace) -> Path:
    """The run folder's whole path, which Slurm and a new run can take."""
    folder: Path = arguments.run_dir.resolve()
    if any(letter in "%\\" or not letter.isprintable() for letter in str(folder)):
        raise InputError(
            f"{str(folder)!r}: sbatch can't write a log there, for %, \\ or the like in it; name another"
        )
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise InputError(f"{place}: is a file; name a folder with --run-dir")
    present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if arguments.vary and "recipe.yaml" in present:
        raise InputError(f"{folder}: is a run folder; name another with --run-dir for the folders of a study's cells")
    if not arguments.vary and present - {".lock", "slurm"} and "recipe.yaml" not in present:
        raise InputError(f"{folder}: is not empty and not a run folder; name another with --run-dir")
    return folder


def _cells(arguments: argparse.Namespace, folder: Path, world: int) -> tuple[list[str], list[int]]:
    """The study's table and the lines of it to submit: neither finished nor with Slurm already."""
    with_slurm = [job.partition("_")[::2] for job in queued(folder)]
    for job, index in with_slurm:
        if not (arguments.vary and index.isdigit()):
            raise InputError(f"{folder}: job {job} is queued or running there")
    if not arguments.vary:
        return [], []
    cells = cross(arguments.vary)
    for cell in cells:
        recipe = load_recipe(arguments.recipe, [*arguments.overrides, *cell.overrides])
        check_world(recipe, world)
        read_manifest(Path(recipe.data.path))
    lines = merge(folder, cells)
    missing = unfinished(folder, lines, cells)
    numbers = [number for number in missing if str(number) not in {index for _, index in with_slurm}]
    if not numbers:
        raise InputError(f"{folder}: of {len(cells)} cells {len(missing)} are with Slurm, the others done")
    return lines, numbers


def _python(arguments: argparse.Namespace, folder: Path, data: Path) -> list[str]:
    """What starts Python on the nodes: this one, or the container's with the folders that it needs."""
    if arguments.container is None:
        return [sys.executable]
    binds = ",".join(sorted({str(Path.cwd()), str(folder.parent), str(data.resolve())}))
    return ["apptainer", "exec", "--nv", "--bind", binds, str(arguments.container.resolve()), "python3"]


def queued(folder: Path) -> list[str]:
    """Jobs of earlier submissions to this folder that Slurm still has: `12_3`, array and index, or `12_N/A`."""
    record = folder / "slurm" / "jobs.jsonl"
    if not record.exists():
        return []
    jobs = {json.loads(line)["job"] for line in record.read_text().splitlines()}
    command = ["squeue", "--noheader", "--array", "--user", getpass.getuser(), "--format", "%F_%K"]
    return [job for job in _ask(command).split() if job.partition("_")[0] in jobs]


def _ask(command: list[str]) -> str:
    """What a command of Slurm's prints, or its complaint as ours."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise InputError(f"{command[0]} is not here: submit on a machine that has Slurm's commands") from None
    except subprocess.CalledProcessError as error:
        complaint = error.stderr.strip().splitlines() or ["no word why"]
        said = re.sub(rf"^{command[0]}: (error: )?", "", complaint[-1])
        raise InputError(f"{command[0]} refused: {said}") from None


def submit(arguments: argparse.Namespace) -> Exit:
    submission = plan(arguments)
    text = shlex.join(submission.command)
    if arguments.dry_run:
        print(text, *([f"# {TABLE}", *submission.cells] if submission.cells else []), sep="\n")
        print(f"# {arguments.script}", arguments.script.read_text(), sep="\n", end="")
        return Exit.DONE
    notes = submission.folder / "slurm"
    notes.mkdir(parents=True, exist_ok=True)
    if submission.cells:
        # Cells that run already read the table.
        atomic_write(submission.folder / TABLE, "".join(f"{line}\n" for line in submission.cells))
    print(text)
    job = _ask(submission.command).strip().partition(";")[0]
    with (notes / "jobs.jsonl").open("a") as record:
        record.write(json.dumps({"job": job, "command": submission.command}) + "\n")
    cells = f", {len(submission.numbers)} cells" if submission.numbers else ""
    print(f"job {job}{cells}; its word on what happens is in {notes}")
    return Exit.DONE
