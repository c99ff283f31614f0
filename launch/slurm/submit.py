"""`widemix submit`: a recipe, a study file, or a recipe with some keys varied, as one sbatch command.

Several runs are a job array, one line each in runs.tsv: the run's name, a copy of its recipe and its overrides,
separated by tabs. The number of a line is the run's index in Slurm's arrays, so lines keep their numbers. The name
has a hash of the resolved recipe, so that runs of another recipe have other lines and other run folders.
"""

import argparse
import getpass
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from widemix.cli.commands import load_from_arguments
from widemix.errors import Exit, InputError
from widemix.files import atomic_write, open_to_write, refuse_link
from widemix.launch.slurm.options import PASSED, elastic_sizes, requested_gpus, run_folder
from widemix.launch.torchrun import check_torch
from widemix.recipe import Recipe, check_init_from, check_world, dump_recipe, match_folder, recipe_hash
from widemix.recipe.files import find_study
from widemix.terminal import print

TABLE = "runs.tsv"
_CLOSED = ("PartitionDown", "PartitionInactive")
_REASON_S, _POLL_S = 5.0, 0.2
# Reasons why Slurm leaves a job in the queue that do not pass by themselves; those of an administrator may.
_NEVER = re.compile(
    r"Partition(Config|TimeLimit|NodeLimit)|BadConstraints|Invalid(Account|QOS)|\w+NotAllowed|\w+PerJobLimit"
)
_OF_A_JOB = re.compile(r"SRUN_|SLURM_(?!CONF|CLUSTERS$|JWT$)")


class Run(Protocol):
    """A run of the array: a recipe with overrides, in a run folder of its own."""

    @property
    def name(self) -> str:
        """Name of its run folder."""

    @property
    def recipe(self) -> Recipe:
        """The recipe with the overrides applied."""

    @property
    def overrides(self) -> Sequence[tuple[str, str]]:
        """All changes of the recipe file, as `("section.key", "YAML value")`."""

    def has_ended(self, folder: Path) -> bool:
        """Whether it has ended in the folder of all runs."""


@dataclass(frozen=True)
class Submission:
    """A job to submit.

    command: sbatch and its arguments.
    folder: the run folder, or the study's folder.
    table: the lines of the study's runs.tsv; empty for a single run.
    numbers: the lines, from 1, of the runs that are submitted; empty for a single run.
    recipes: the recipes to keep in the folder, of all runs.
    """

    command: list[str]
    folder: Path
    table: list[str]
    numbers: list[int]
    recipes: list[Recipe]


def plan(arguments: argparse.Namespace, runs: Sequence[Run]) -> Submission:
    """Check recipe and data, and return the sbatch command; raises `InputError`.

    runs: of a study or of --vary; none of a recipe that is to be trained once.
    """
    ranks = arguments.ranks_per_node or requested_gpus(arguments)[0] or 1
    folder = run_folder(arguments.run_dir, bool(runs))
    recipes = [each.recipe for each in runs] if runs else [load_from_arguments(arguments)]
    for recipe in recipes:
        check_world(recipe, arguments.nodes * ranks)
        match_folder(recipe)
        if not folder.exists():  # a run that goes on has its weights
            check_init_from(recipe)
    data = {Path(recipe.data.path) for recipe in recipes}
    table, numbers = _open_runs(runs, folder)
    command = ["sbatch", "--parsable", *_sbatch_options(arguments, folder, numbers), str(arguments.script)]
    command += [str(folder), str(ranks), str(arguments.restarts), str(arguments.requeues)]
    command += [arguments.preflight, arguments.stage_to, elastic_sizes(arguments, recipes, ranks)]
    command += [str(arguments.environment.resolve()) if arguments.environment else "", arguments.setup]
    command += [*_python(arguments, folder, data), "--"]
    if not runs:
        command += [str(kept_path(folder, recipes[0])), *(f"--{name}={value}" for name, value in arguments.overrides)]
    return Submission(command, folder, table, numbers, recipes)


def _sbatch_options(arguments: argparse.Namespace, folder: Path, numbers: list[int]) -> list[str]:
    options = ["--job-name", f"widemix-{folder.name}", "--nodes", str(arguments.nodes)]
    options += ["--output", f"{folder}/slurm/{'%A_%a' if numbers else '%j'}.log"]
    options += ["--no-kill"] if arguments.elastic else []
    gpus, by_gres = requested_gpus(arguments)
    options += ["--gpus-per-node", str(gpus)] if gpus and not by_gres else []
    cpus = arguments.cpus_per_node
    options += ["--cpus-per-task", str(cpus)] if cpus else ["--exclusive", "--mem", "0"]
    for name in PASSED:
        if value := getattr(arguments, name):
            options += [f"--{name}", value]
    if numbers:
        options += ["--array", ranges(numbers) + (f"%{arguments.at_once}" if arguments.at_once else "")]
    return [*options, *arguments.sbatch]


def _open_runs(runs: Sequence[Run], folder: Path) -> tuple[list[str], list[int]]:
    """Return the lines of the study's table, and the numbers of those to submit: neither done nor queued."""
    queued_jobs = [job.partition("_")[::2] for job in queued(folder)]
    for job, index in queued_jobs:
        if not (runs and index.isdigit()):
            raise InputError(f"{folder}: job {job} is queued or running there")
    if not runs:
        return [], []
    table = merge(folder, runs)
    places = {line.partition("\t")[0]: number for number, line in enumerate(table, 1)}
    missing = sorted(places[run.name] for run in runs if not run.has_ended(folder))
    indices = {index for _, index in queued_jobs}
    numbers = [number for number in missing if str(number) not in indices]
    if numbers:
        check_array(numbers[-1])
    else:
        raise InputError(f"{folder}: of {len(runs)} runs {len(missing)} are queued or running, the others done")
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


def submit(arguments: argparse.Namespace, runs: Sequence[Run]) -> Exit:
    """Submit the job, or print what would be submitted; runs: as for `plan`."""
    submission = plan(arguments, runs)
    text = shlex.join(submission.command)
    if submission.numbers and not arguments.cpus_per_node:
        print("each run has whole nodes; with --cpus-per-node N several small ones share a node", file=sys.stderr)
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


def run(command: list[str]) -> str:
    """Run a command of Slurm and return its output; raises `InputError` with Slurm's message if it fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, env=_environ()).stdout
    except FileNotFoundError:
        raise InputError(f"{command[0]}: not found; submit on a machine that has Slurm's commands") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        message = re.sub(rf"^{command[0]}: (error: )?", "", lines[-1])
        raise InputError(f"{command[0]} failed: {message}") from None


def _environ() -> dict[str, str]:
    """Return the environment without what describes the job or salloc in which this runs: sbatch would hand it on."""
    return {name: value for name, value in os.environ.items() if not _OF_A_JOB.match(name)}


def queued(folder: Path) -> list[str]:
    """Return the jobs submitted for this folder that are queued or running: `12_3` (array, index) or `12_N/A`."""
    record = folder / "slurm" / "jobs.jsonl"
    if not record.exists():
        return []
    jobs = {json.loads(line)["job"] for line in record.read_text().splitlines()}
    command = ["squeue", "--noheader", "--array", "--user", getpass.getuser(), "--format", "%F_%K"]
    return [job for job in run(command).split() if job.partition("_")[0] in jobs]


def waits_for(job: str) -> str:
    """Return Slurm's reason why a job is in the queue; raises `InputError`, and cancels it, if it could never start.

    `sbatch --test-only` does not look at the limits of partitions and accounts.
    """
    reason = "PartitionConfig"  # Slurm's first word for any limit, until its scheduler has looked
    deadline = time.monotonic() + _REASON_S
    while reason == "PartitionConfig" and time.monotonic() < deadline:
        reason = next(iter(run(["squeue", "--noheader", "--job", job, "--format", "%r"]).split()), "")
        time.sleep(_POLL_S)
    if _NEVER.fullmatch(reason):
        run(["scancel", job])
        raise InputError(
            f"sbatch: job {job} could never start ({reason}) and is cancelled: see `scontrol show partition` and ask "
            "for less"
        )
    return reason


def check_array(last: int) -> None:
    """Raise `InputError` if Slurm's arrays end before this index; a machine that can't ask Slurm does not know."""
    try:
        size = re.search(r"MaxArraySize\s*= (\d+)", run(["scontrol", "show", "config"]))
    except InputError:
        return
    if size and last >= int(size[1]):
        raise InputError(
            f"{last} runs: an array of Slurm's has at most {int(size[1]) - 1} here (MaxArraySize {size[1]}); divide "
            "them among several --run-dir, each with some of the values"
        )


def check_pyxis() -> None:
    """Raise `InputError` if srun starts no containers; a machine that has only sbatch does not know."""
    if shutil.which("srun") and "--container-image" not in run(["srun", "--help"]):
        raise InputError(
            "--container-image: srun has no such option here, it is Pyxis's; an Apptainer image is run by --container"
        )


def kept_path(folder: Path, recipe: Recipe) -> Path:
    """Where `submit` keeps a recipe: its file may be edited while the job waits, or runs and is requeued."""
    return folder / "slurm" / f"recipe-{recipe_hash(recipe)}.yaml"


def merge(folder: Path, runs: Sequence[Run]) -> list[str]:
    """Return the lines of the folder's runs.tsv, with those of these runs replaced, or appended if they are new.

    Raises `InputError` for an override that would be cut there.
    """
    table = folder / TABLE
    lines = table.read_text().splitlines() if table.exists() else []
    known = {line.partition("\t")[0]: line for line in lines}
    for run in runs:
        overrides = [f"--{key}={value}" for key, value in run.overrides]
        if cut := [text for text in overrides if "\t" in text or len(text.splitlines()) > 1]:
            raise InputError(f"{cut[0]!r}: a job's values have no tab and no line break")
        known[run.name] = "\t".join([run.name, str(kept_path(folder, run.recipe)), *overrides])
    return list(known.values())


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as sbatch's --array takes them: `[1, 2, 3, 7]` is `1-3,7`."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)
