"""`widemix submit`: a recipe, a study file, or a recipe with some keys varied, as one sbatch command."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from widemix.command_line.arguments import Parser
from widemix.command_line.commands import load_from_arguments
from widemix.errors import Exit, InputError
from widemix.files import atomic_write, open_to_write, refuse_link
from widemix.formats.manifest import read_manifest
from widemix.launch.slurm.commands import check_array, check_pyxis, queued, run, waits_for
from widemix.launch.slurm.options import check_options, container_image, elastic_sizes, run_folder
from widemix.launch.slurm.study_runs import TABLE, cross, kept_path, merge, ranges, unfinished
from widemix.launch.torchrun import check_torch
from widemix.recipe import Recipe, check_world, dump_recipe
from widemix.recipe.files import find_study
from widemix.studies.study import is_study, read_study, study_runs_of
from widemix.studies.study_run import StudyRun, unique
from widemix.terminal import print

SCRIPT = Path(__file__).resolve().with_name("train.sbatch")
_PASSED = ("partition", "account", "qos", "time", "constraint", "exclude")  # to sbatch, under the same names
_CLOSED = ("PartitionDown", "PartitionInactive")


@dataclass(frozen=True)
class Submission:
    """What is to be submitted.

    command: sbatch and its arguments.
    folder: the run folder, or the study's folder.
    table: the lines of the study's cells.tsv; empty for a single run.
    numbers: the lines, from 1, of the runs that are submitted; empty for a single run.
    recipes: the recipes to keep in the folder, of all runs.
    """

    command: list[str]
    folder: Path
    table: list[str]
    numbers: list[int]
    recipes: list[Recipe]


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `widemix submit`."""
    add = parser.add_argument
    add("recipe", metavar="FILE.yaml", nargs="?", help="recipe or study: a file, or a shipped one's name")
    folder = "run folder, on a disk that all nodes share; of a study, the folder of its run folders"
    add("--run-dir", type=Path, required=True, metavar="DIR", help=folder)
    add("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--gpus-per-node", type=int, default=4, metavar="N", help="0: train on CPUs (default: 4)")
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
    for name in _PASSED:
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


def plan(arguments: argparse.Namespace) -> Submission:
    """Check options, recipe and data, and return the sbatch command; raises `InputError`."""
    check_options(arguments)
    ranks = arguments.ranks_per_node or arguments.gpus_per_node or 1
    study_runs = _study_runs(arguments)
    folder = run_folder(arguments.run_dir, bool(study_runs))
    recipes = [study_run.recipe for study_run in study_runs] if study_runs else [load_from_arguments(arguments)]
    for recipe in recipes:
        check_world(recipe, arguments.nodes * ranks)
    data = {Path(recipe.data.path) for recipe in recipes}
    for path in sorted(data):
        read_manifest(path)
    table, numbers = _open_runs(study_runs, folder)
    command = ["sbatch", "--parsable", *_sbatch_options(arguments, folder, numbers), str(arguments.script)]
    command += [str(folder), str(ranks), str(arguments.restarts), str(arguments.requeues)]
    command += [arguments.preflight, arguments.stage_to, elastic_sizes(arguments, recipes, ranks)]
    command += [str(arguments.environment.resolve()) if arguments.environment else "", arguments.setup]
    command += [*_python(arguments, folder, data), "--"]
    if not study_runs:
        command += [str(kept_path(folder, recipes[0])), *(f"--{name}={value}" for name, value in arguments.overrides)]
    return Submission(command, folder, table, numbers, recipes)


def _sbatch_options(arguments: argparse.Namespace, folder: Path, numbers: list[int]) -> list[str]:
    options = ["--job-name", f"widemix-{folder.name}", "--nodes", str(arguments.nodes)]
    options += ["--output", f"{folder}/slurm/{'%A_%a' if numbers else '%j'}.log"]
    options += ["--no-kill"] if arguments.elastic else []
    options += ["--gpus-per-node", str(arguments.gpus_per_node)] if arguments.gpus_per_node else []
    cpus = arguments.cpus_per_node
    options += ["--cpus-per-task", str(cpus)] if cpus else ["--exclusive", "--mem", "0"]
    for name in _PASSED:
        if value := getattr(arguments, name):
            options += [f"--{name}", value]
    if numbers:
        options += ["--array", ranges(numbers) + (f"%{arguments.at_once}" if arguments.at_once else "")]
    return [*options, *arguments.sbatch]


def _study_runs(arguments: argparse.Namespace) -> list[StudyRun]:
    """Return the runs of the study file or of --vary; none of a recipe that is to be trained once."""
    if arguments.recipe is None:
        return []
    path = find_study(arguments.recipe)
    if is_study(path):
        study = read_study(path)
        if not study.measured:
            raise InputError(f"{path}: shows sizes of networks alone; `widemix study report` plots it")
        return unique(study_runs_of(path, study, arguments.overrides))
    return cross(path, arguments.vary, arguments.overrides) if arguments.vary else []


def _open_runs(study_runs: list[StudyRun], folder: Path) -> tuple[list[str], list[int]]:
    """Return the lines of the study's table, and the numbers of those to submit: neither done nor queued."""
    queued_jobs = [job.partition("_")[::2] for job in queued(folder)]
    for job, index in queued_jobs:
        if not (study_runs and index.isdigit()):
            raise InputError(f"{folder}: job {job} is queued or running there")
    if not study_runs:
        return [], []
    table = merge(folder, study_runs)
    missing = unfinished(folder, table, study_runs)
    indices = {index for _, index in queued_jobs}
    numbers = [number for number in missing if str(number) not in indices]
    if numbers:
        check_array(numbers[-1])
    else:
        raise InputError(f"{folder}: of {len(study_runs)} runs {len(missing)} are queued or running, the others done")
    return table, numbers


def _python(arguments: argparse.Namespace, folder: Path, data: Iterable[Path]) -> list[str]:
    """Return the command that starts Python on the nodes: this Python, or the container's with the folders mounted.

    Raises `InputError` if a folder could not be mounted.
    """
    if arguments.container is None and arguments.container_image is None:
        return [sys.executable]
    recipe = [find_study(arguments.recipe).resolve().parent] if arguments.recipe else []
    paths = [Path.cwd(), folder.parent, *recipe, *(path.resolve() for path in data)]
    folders = sorted({str(path) for path in paths})
    if bad := [folder for folder in (*folders, arguments.stage_to) if "," in folder or ":" in folder]:
        raise InputError(f"{bad[0]}: has a comma or colon, so a container can't mount it; use a path without")
    if arguments.container:
        apptainer = ["apptainer", "exec", "--nv", "--bind", ",".join(folders)]
        return [*apptainer, str(arguments.container.resolve()), "python3"]
    mounts = ",".join(f"{folder}:{folder}" for folder in folders)
    options = {"mounts": mounts, "image": arguments.container_image, "workdir": Path.cwd()}
    # The home folder may have packages for another Python.
    return [*(f"--container-{key}={value}" for key, value in options.items()), "--no-container-mount-home", "python3"]


def submit(arguments: argparse.Namespace) -> Exit:
    """Submit the job, or print what would be submitted."""
    submission = plan(arguments)
    text = shlex.join(submission.command)
    if arguments.dry_run:
        print(text)
        if submission.table:
            print(f"# {TABLE}", *submission.table, sep="\n")
        for path in dict.fromkeys(kept_path(submission.folder, recipe) for recipe in submission.recipes):
            print(f"# {path} is written when this is submitted: the recipe as it is then")
        print(f"# {arguments.script}", arguments.script.read_text(), sep="\n", end="")
        return Exit.DONE
    if arguments.container_image:
        check_pyxis()
    elif arguments.container is None and arguments.environment is None:  # the nodes have this torch
        check_torch()
    sbatch, *rest = submission.command
    run([sbatch, "--test-only", *rest])  # refuses what could never start, which Slurm would queue for ever
    logs = submission.folder / "slurm"
    refuse_link(logs)
    logs.mkdir(parents=True, exist_ok=True)
    for recipe in submission.recipes:
        atomic_write(kept_path(submission.folder, recipe), dump_recipe(recipe))
    if submission.table:
        # Runs that are running already read the table.
        atomic_write(submission.folder / TABLE, "".join(f"{line}\n" for line in submission.table))
    print(text)
    job = run(submission.command).strip().partition(";")[0]
    with open_to_write(logs / "jobs.jsonl", "a") as record:
        record.write(json.dumps({"job": job, "command": submission.command}) + "\n")
    count = f", {len(submission.numbers)} runs" if submission.numbers else ""
    if waits_for(job) in _CLOSED:
        print(f"job {job} waits for the partition, which is down: see `sinfo --summarize`")
    print(f"job {job}{count}; logs in {logs}")
    return Exit.DONE
