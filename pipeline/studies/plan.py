"""A study with its table: its trials and runs, what is chosen for them, what is still to be trained, and its cost."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from widemix.errors import Exit, InputError
from widemix.lease import Leases
from widemix.recipe import Recipe
from widemix.studies.claims import verdicts
from widemix.studies.points import Result, collect
from widemix.studies.protocol import Search
from widemix.studies.quantity import COMPUTED, MEASURED, OF_RECIPE, is_number, value_of
from widemix.studies.rows import Table, finished_row
from widemix.studies.search import Arm, Trial, arms, chosen_runs
from widemix.studies.study import Study, study_runs_of
from widemix.studies.study_run import StudyRun, unique
from widemix.terminal import print

Run = Callable[[Sequence[StudyRun]], Exit]  # trains runs that have not ended, and puts their rows into the table


@dataclass(frozen=True)
class Plan:
    """The runs of a study. path: of its file. study_runs: of the figure, in the order of its lines."""

    path: Path
    study: Study
    table: Table
    study_runs: list[StudyRun]
    # Those that were made so far: to read their recipes again takes most of a second.
    _known: dict[StudyRun, StudyRun] = field(default_factory=dict, repr=False, compare=False)

    def searched(self, search: Search | None = None) -> list[tuple[Arm, list[Trial]]]:
        """Each point with its trials so far, by the study's search or another; none where it has no search."""
        search = search or self.study.search
        if search is None:
            return []
        own = [group.search for group in self.study.runs]
        return [(arm, arm.trials(self._top1)) for arm in arms(self.study_runs, search, own)]

    def runs(self) -> list[StudyRun]:
        """Return the runs to train, with the chosen values of each point whose trials have all ended."""
        return self._chosen(self.searched())

    def _chosen(self, searched: Sequence[tuple[Arm, list[Trial]]]) -> list[StudyRun]:
        if not searched:
            return self.study_runs
        chosen = ((arm.study_runs if open_trials(trials) else chosen_runs(arm, trials)) for arm, trials in searched)
        return [self._once(study_run) for study_runs in chosen for study_run in study_runs]

    def results(self) -> list[Result]:
        """Return the results of all runs. None of a point whose search has not ended: its rows are older."""
        searched = self.searched()
        open_arms = [arm for arm, trials in searched if open_trials(trials)]
        searching = {study_run for arm in open_arms for study_run in arm.study_runs}

        def sizes(result: Result) -> Result:
            return replace(result, y={name: y for name, y in result.y.items() if name not in MEASURED}, row=None)

        results = collect(self._chosen(searched), self.table, self.study)
        return [sizes(result) if result.study_run in searching else result for result in results]

    def trials_to_run(self, search: Search | None = None) -> list[StudyRun]:
        """Return the trials that can be run now, each once; none when the search is complete."""
        return unique(study_run for _, trials in self.searched(search) for study_run in open_trials(trials))

    def add_finished(self, folder: Path) -> None:
        """Add the rows of runs that were trained in the folder without the table, as by a job array."""
        count = -1
        while count != len(self.table.rows):
            count = len(self.table.rows)
            self.table.add_finished([*self.trials_to_run(), *self.runs()], folder)

    def search(self, run: Run, search: Search | None = None) -> Exit:
        """Run trials until none is left. Returns REQUEUE if it was stopped, or other processes have what is left."""
        while missing := self.trials_to_run(search):
            ended = run(missing)
            if ended != Exit.DONE:
                return ended
            if len(self.table.missing(missing)) == len(missing):
                print(f"{len(missing)} trials are left to other processes; the same command continues", flush=True)
                return Exit.REQUEUE
        return Exit.DONE

    def _once(self, study_run: StudyRun) -> StudyRun:
        return self._known.setdefault(study_run, study_run)

    def _top1(self, study_run: StudyRun) -> float | None:
        row = self.table.row(self._once(study_run))
        if row is None:
            return None
        return math.nan if row.state == "diverged" else row.metric("top1")


def make_plan(
    path: Path, study: Study, table: Table, overrides: Sequence[tuple[str, str]] = (), only: str = "*"
) -> Plan:
    """The plan of a study file; overrides and only as for `study_runs_of`. Raises `InputError`."""
    study_runs = study_runs_of(path, study, overrides, only)
    if only == "*":
        verdicts(
            [Result(study_run, math.nan, {}) for study_run in study_runs], study
        )  # claims about points that are not there
    _check_axes(path, study, study_runs)
    if study.search is not None:
        check_top1(path, study_runs)
    for name in study.figure.y:
        if name in ("error", "top1"):
            check_top1(path, study_runs, f"figure.y: {name} is of classes")
    if study.figure.x == "epoch":
        _check_curves(path, study_runs)
    for study_run in study_runs if study.search else []:
        every, epochs = study_run.recipe.eval.every_epochs, study_run.recipe.train.epochs
        if every < epochs:
            raise InputError(
                f"{path}: eval.every_epochs {every} reads the test split before the end of {epochs} epochs; after a "
                f"search it is read once: set eval.every_epochs to {epochs}"
            )
    return Plan(path, study, table, study_runs)


def _check_axes(path: Path, study: Study, study_runs: Sequence[StudyRun]) -> None:
    """Raise `InputError` for a run without a place on an axis, before anything is trained."""
    figure = study.figure
    for axis, name, log in (("x", figure.x, figure.log_x), *(("y", name, figure.log_y) for name in figure.y)):
        counted = name in COMPUTED and name not in OF_RECIPE
        for study_run in study_runs if name not in (*MEASURED, "epoch") and not counted else []:
            try:
                value = value_of(name, study_run.recipe)
            except InputError as error:
                raise InputError(f"{path}: figure.{axis}: {study_run.name}: {error}") from None
            if axis == "y" and not is_number(value):
                raise InputError(f"{path}: figure.y: {name} is {value} at {study_run.name}, which is no number")
            if log and is_number(value) and float(value) <= 0:
                raise InputError(
                    f"{path}: figure.{axis}: {name} is {value} at {study_run.name}, which a logarithmic axis does not"
                    f" have; set figure.log_{axis} to false"
                )


def check_top1(path: Path, study_runs: Sequence[StudyRun], wanted: str = "search: chooses by top-1") -> None:
    """Raise `InputError` for runs that predict no class and so have no top-1. wanted: what it is for."""
    for targets in {study_run.recipe.data.targets for study_run in study_runs} - {"class"}:
        raise InputError(f"{path}: {wanted}, and data.targets is {targets}")


def _check_curves(path: Path, study_runs: Sequence[StudyRun]) -> None:
    """Raise `InputError` where the runs of a learning curve differ in more than their seed."""
    first: dict[tuple[str, str], StudyRun] = {}
    for study_run in study_runs:
        other = first.setdefault((study_run.panel, study_run.line), study_run)
        if other.point != study_run.point:
            keys = [key for key, value in study_run.varied if (key, value) not in other.varied]
            what = f"that differ in {', '.join(keys)}"
            if other.group != study_run.group:
                what = f"of runs.{other.group} and runs.{study_run.group}"
            raise InputError(
                f"{path}: figure.x epoch: the line {study_run.line} has runs {what}, and a learning curve is the "
                "mean over seeds alone; name the axis in lines, or give each entry a label of its own"
            )


def open_trials(trials: Sequence[Trial]) -> list[StudyRun]:
    """The runs of the trials that have not ended."""
    return [trial.study_run for trial in trials if trial.top1 is None]


def state(study_run: StudyRun, folder: Path, leases: Leases, table: Table) -> str:
    """Return `done`, `diverged`, `running on HOST`, `begun` (stopped or failed, with a run folder) or `open`."""
    row = table.row(study_run) or finished_row(study_run, folder)
    if row is not None:
        return row.state
    holder = leases.holder(study_run.name)
    if holder is not None and holder.alive:
        return f"running on {holder.host}"
    return "begun" if (folder / study_run.name / "recipe.yaml").exists() else "open"


@dataclass(frozen=True)
class Requirements:
    """Cost of one run: hours on one GPU (None if the number of samples is not known) and bytes of checkpoints."""

    hours: float | None
    bytes: int


def requirements(study_runs: Sequence[StudyRun], gpu: str) -> dict[str, Requirements]:
    """Return what each run takes, by its name: hours from a roofline, as `widemix cost` computes them."""
    found: dict[str, Requirements] = {}
    known: dict[str, Requirements] = {}  # runs that differ only in their seed take the same
    for study_run in study_runs:
        values = study_run.recipe.model_dump(mode="json")
        values["train"]["seed"] = 0
        alike = repr(values)
        if alike not in known:
            known[alike] = Requirements(_hours(study_run, gpu), _checkpoint_bytes(study_run.recipe))
        found[study_run.name] = known[alike]
    return found


def _hours(study_run: StudyRun, gpu: str) -> float | None:
    from widemix.estimate.hardware import Cluster  # these import torch, which takes seconds
    from widemix.estimate.recipe_tables import header_fields
    from widemix.estimate.report import estimate

    stated = re.search(r"--samples (\d+)", header_fields(study_run.path).get("cost", ""))
    samples = int(stated[1]) if stated and not (Path(study_run.recipe.data.path) / "manifest.json").exists() else None
    rows = estimate(study_run.recipe, Cluster(1, gpu), samples)
    return next((row.value for row in rows if row.name == "hours"), None)


def _checkpoint_bytes(recipe: Recipe) -> int:
    """Bytes of the checkpoints that a run keeps: weights, optimizer states and average, in fp32."""
    from widemix.models.cost import FLOAT, model_cost

    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    copies = 1 + recipe.optim.spec.states + (recipe.train.ema_decay is not None)
    kept = recipe.train.keep_last + (recipe.train.keep_best is not None)
    return FLOAT * cost.parameters * copies * kept
