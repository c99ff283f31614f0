"""Study files: base recipes, the axes along which they vary, seeds, what to plot, and what was published."""

import fnmatch
import itertools
import math
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from widemix.errors import InputError, command
from widemix.recipe import differences, load_recipe, suggest
from widemix.recipe.files import SHIPPED, as_override, find_recipe
from widemix.recipe.yaml_text import read_yaml, yaml_error_message, yaml_text
from widemix.section import Section, key
from widemix.studies.protocol import Claim, Condition, Figure, Place, Published, Range, Search
from widemix.studies.quantity import CONSTRAINTS, MEASURED, solve
from widemix.studies.study_run import StudyRun

MOST_RUNS = 20_000  # each a folder and a process of its own
LEAST_SEEDS = 3  # of a study that searches first
Solve = dict[Literal["omega", "weights", "forward_mflops"], float | list[float]]


class Group(Section):
    """An entry of `runs`: recipes, and the axes whose combinations are its runs."""

    label: str = key(..., "label of its line in the figure")
    recipes: dict[str, str] = key(
        ..., "recipes to start from, each by its panel's name: files, relative to the study's, or shipped ones' names"
    )
    set: dict[str, Any] = key({}, "section.key names with the value that all runs of the entry have")
    axes: dict[str, list[Any] | Solve] = key(
        {},
        "section.key names with a list of values each; every combination is a run. Several keys that vary together "
        "are one axis, 'KEY, KEY', with a list of rows. {omega: X} instead of a list: the value at which the network "
        "has X connections a layer; {weights: X}: the greatest with X weights in all blocks; {forward_mflops: X}: "
        "the greatest with X MFLOPs an image, for all keys of the axis. X may be a list",
    )
    lines: list[str] = key([], "axes that have a line for each value; the others run along the line")
    seeded: list[str] = key([], "keys that are set to the seed too, such as model.permutation_seed")
    search: dict[str, Range] = key({}, "keys that only this entry has to search, with their ranges")

    @model_validator(mode="after")
    def axes_are_consistent(self):
        """Rows of joined axes have a value for each key, `lines` are axes, no list is empty."""
        for name, values in self.axes.items():
            if isinstance(values, dict):
                if len(values) != 1:
                    raise ValueError(f"axes: {name}: give one of {', '.join(CONSTRAINTS)}")
                continue
            count = len(split_axis(name))
            if bad := [row for row in values if count > 1 and (not isinstance(row, list) or len(row) != count)]:
                raise ValueError(f"axes: {name}: {bad[0]} should be a list of {count} values")
            if not values:
                raise ValueError(f"axes: {name}: has no values")
        if unknown := set(self.lines) - set(self.axes):
            raise ValueError(f"lines: {min(unknown)} is not one of the axes")
        return self


class Study(Section):
    """A study file."""

    title: str = key(..., "what is compared")
    source: str = key(..., "paper, figure or table, and the section with its settings")
    claim: str = key("", "the trend that the paper reports, in one sentence, if it does")
    seeds: list[Annotated[int, Field(ge=0)]] = key([], "values of train.seed; empty: that of the recipe, once")
    set: dict[str, Any] = key({}, "section.key names with the value that all runs have")
    search: Search | None = key(None, "what is searched for each point before its runs; null: nothing")
    runs: Annotated[list[Group], Field(min_length=1)] = key(..., "lines of the figure")
    figure: Figure
    claims: list[Claim] = key([], "comparisons that the runs decide")
    published: list[Published] = key([], "published numbers and statements")

    @model_validator(mode="after")
    def protocol_is_kept(self):
        """A search is followed by runs with seeds of their own, at least three, and claims compare results."""
        if self.search is not None:
            if len(set(self.seeds)) < LEAST_SEEDS:
                raise ValueError(f"seeds: a study with a search has at least {LEAST_SEEDS}, each once")
            if self.search.seed in self.seeds:
                raise ValueError(f"search.seed {self.search.seed} is one of seeds: what is searched is no result")
            if "train.patience_epochs" in self.search.set:
                raise ValueError("search.set: train.patience_epochs would end each trial at another epoch")
        elif searching := [number for number, group in enumerate(self.runs) if group.search]:
            raise ValueError(f"runs.{searching[0]}.search: the study has no search, which says how often to try")
        known = {*self.figure.y, *MEASURED}
        if unknown := [claim for claim in self.claims if (claim.y or self.figure.y[0]) not in known]:
            raise ValueError(f"claims: {unknown[0].text}: y is one of {', '.join(sorted(known))}")
        for claim in self.claims:
            if other := {name for one in claim.regime for name in (one.y, one.minus or one.y)} - {*MEASURED}:
                raise ValueError(f"claims: {claim.text}: regime: {min(other)} is none of {', '.join(MEASURED)}")
        return self

    @model_validator(mode="after")
    def published_points_can_be_plotted(self):
        """Points on a logarithmic axis are above 0, deviations are not below."""
        for published in self.published:
            where = f"published: {published.source}: "
            for x, y, *std in published.points:
                if std and std[0] < 0:
                    raise ValueError(f"{where}the standard deviation {std[0]:g} is negative")
                for name, value, log in (("x", x, self.figure.log_x), ("y", y, self.figure.log_y)):
                    if log and value <= 0:
                        raise ValueError(f"{where}{name} is {value:g}, which a logarithmic axis has not")
        return self

    @property
    def by_protocol(self) -> bool:
        """Whether differences are those of networks: rates are searched for each point, or are what is compared."""
        return self.search is not None or (self.figure.x == "optim.lr" and len(set(self.seeds)) >= LEAST_SEEDS)

    @property
    def measured(self) -> bool:
        """Whether the figure needs runs; False if it shows sizes of networks alone."""
        return self.figure.x == "epoch" or any(name in MEASURED for name in self.figure.y)


_SECTIONS: dict[str, type[Section]] = {  # by the key that they stand at, for the names of their keys
    "figure": Figure,
    "runs": Group,
    "published": Published,
    "search": Search,
    "keys": Range,
    "claims": Claim,
    "regime": Condition,
}
_SECTIONS |= dict.fromkeys(("left", "right", "slope"), Place)


def is_study(path: Path) -> bool:
    """Whether a YAML file is a study and no recipe."""
    try:
        values = read_yaml(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(values, dict) and "runs" in values


def read_study(path: Path) -> Study:
    """Read a study file; raises `InputError`, in one line that names the file, the key and what is wrong."""
    try:
        values = read_yaml(path)
        if isinstance(values, dict) and "runs" not in values and values.keys() & {"extends", "model", "train"}:
            raise InputError(f"{path}: is a recipe, not a study; {command('train', path)} trains it")
        if not isinstance(values, dict):
            raise InputError(f"{path}: a study is a mapping with the keys {', '.join(Study.model_fields)}")
        return Study.model_validate(values)
    except FileNotFoundError:
        shipped = sorted(file.stem for file in (SHIPPED / "studies").glob("*.yaml"))
        names = {name: name for name in shipped} | {file.stem: str(file) for file in path.parent.glob("[!.]*.yaml")}
        close = get_close_matches(path.stem, names, n=1)
        close = close or [name for name in names if name.startswith(f"{path.stem}_")]
        others = f"give a file, or one of {len(shipped)} shipped, such as figure7"
        hint = f"did you mean {names[close[0]]}?" if close else others
        raise InputError(f"{path}: no such study; {hint}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid YAML, {yaml_error_message(error)}") from None
    except ValidationError as error:
        first = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        place = list(map(str, first["loc"]))
        message = "is missing" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            unknown = place.pop()
            within = [part for part in place if part in _SECTIONS]
            section = _SECTIONS[within[-1]] if within else Study
            message = f"unknown key {unknown}{suggest(unknown, section.model_fields)}"
        where = f"{'.'.join(place)}: " if place else ""
        raise InputError(f"{path}: {where}{message}") from None


def study_runs_of(
    path: Path, study: Study, overrides: Sequence[tuple[str, str]] = (), only: str = "*"
) -> list[StudyRun]:
    """Return the runs of a study in the order of its lines.

    overrides: applied to all runs, before the values that the study varies.
    only: a shell pattern for the names of run folders; other runs are omitted.

    Raises `InputError` if a recipe is invalid, an override is varied, or a run is duplicated within its entry.
    """
    seeds = max(1, len(study.seeds))
    count = sum(math.prod(map(len, _choices(group))) * seeds * len(group.recipes) for group in study.runs)
    if count > MOST_RUNS:
        raise InputError(f"{path}: has {count:,} runs; a study has at most {MOST_RUNS:,}")
    study_runs = []
    for number, group in enumerate(study.runs):
        try:
            own = list(_group_runs(path, study, number, overrides))
            names = [study_run.name for study_run in own]
        except InputError as error:
            if str(error).startswith((f"{path}: ", *(f"--{name}" for name, _ in overrides))):
                raise
            mistake = str(error) if overrides else str(error).removeprefix("the command line: ").removeprefix("--")
            raise InputError(f"{path}: runs.{number} ({group.label}): {mistake}") from None
        if duplicates := {name for name in names if names.count(name) > 1}:
            raise InputError(f"{path}: runs.{number} ({group.label}): the run {min(duplicates)} is duplicated")
        study_runs += own
    _check_shared(path, study, study_runs)
    _check_lengths(path, study, study_runs)
    if chosen := [study_run for study_run in study_runs if fnmatch.fnmatchcase(study_run.name, only)]:
        return chosen
    first = f"the first is {study_runs[0].name}" if study_runs else "there are no runs"
    raise InputError(f"{path}: no run is called {only}; {first}")


def _check_shared(path: Path, study: Study, study_runs: Sequence[StudyRun]) -> None:
    """`InputError` where entries would share a run though they differ in a key that changes what the study shows."""
    timed = "epoch_seconds" in (*study.figure.y, *(claim.y for claim in study.claims))
    first: dict[str, StudyRun] = {}
    for study_run in study_runs:
        other = first.setdefault(study_run.name, study_run)
        differ = [] if other.group == study_run.group else differences(other.recipe, study_run.recipe)
        shown = [name for name in differ if timed and not name.startswith("log.")]
        if not shown and "train.grad_accum_steps" in differ:
            from widemix.engine.batch_norm import has_batch_norms  # which imports torch: that takes seconds

            shown = ["train.grad_accum_steps"] * has_batch_norms(study_run.recipe)
        if shown:
            raise InputError(
                f"{path}: runs.{study_run.group} ({study_run.line}): would be the same run as in runs.{other.group}, "
                f"and {shown[0]} differs, on which its results depend; make that key an axis of one entry: its "
                "values are in the runs' names"
            )


def _check_lengths(path: Path, study: Study, study_runs: Sequence[StudyRun]) -> None:
    """`InputError` where the split that results are of would say when a run ends whose result is compared."""
    for study_run in study_runs if study.by_protocol or study.claims else []:
        if study_run.recipe.train.patience_epochs is not None:
            raise InputError(
                f"{path}: runs.{study_run.group} ({study_run.line}): train.patience_epochs would end each run at "
                "another epoch, by its results on the split that is reported; set it to null"
            )


def _group_runs(path: Path, study: Study, number: int, overrides: Sequence[tuple[str, str]]) -> Iterator[StudyRun]:
    group = study.runs[number]
    varies = {name for axis in group.axes for name in split_axis(axis)} | set(group.seeded)
    varies |= {"train.seed"} if study.seeds else set()
    varies |= {*study.search.keys, *group.search} if study.search else set()
    if conflicts := [name for name, _ in overrides if name in varies]:
        raise InputError(f"--{conflicts[0]}: {path} varies it")
    constant = [as_override(name, value) for name, value in {**study.set, **group.set}.items()]
    shared = (*constant, *overrides)
    for panel, recipe in group.recipes.items():
        file = find_recipe(recipe, path.parent)
        for varied, line in _combinations(file, group, shared):
            seeds: list[int | None] = [*study.seeds] or [None]
            for seed in seeds:
                seeded = () if seed is None else ("train.seed", *group.seeded)
                yield StudyRun(file, varied, shared, panel, line, seed, seeded, group=number)


def _combinations(
    recipe: Path, group: Group, shared: Sequence[tuple[str, str]]
) -> Iterator[tuple[tuple[tuple[str, str], ...], str]]:
    """Every combination of the axes' values that has a solution, with the label of its line."""
    for chosen in itertools.product(*_choices(group)):
        varied: list[tuple[str, str]] = []
        for axis, value in zip(group.axes, chosen, strict=True):  # lists first: solutions depend on them
            if isinstance(group.axes[axis], list):
                names = split_axis(axis)
                varied += map(as_override, names, value if len(names) > 1 else [value])
        for axis, value in zip(group.axes, chosen, strict=True):
            constraint = group.axes[axis]
            if isinstance(constraint, dict):
                names, base = split_axis(axis), load_recipe(recipe, [*shared, *varied])
                solution = solve(names, next(iter(constraint)), value, base)
                if solution is None:
                    break
                varied += [as_override(name, solution) for name in names]
        else:
            labels = [_label(axis, value, group) for axis, value in zip(group.axes, chosen, strict=True)]
            yield tuple(varied), ", ".join([group.label, *filter(None, labels)])


def _choices(group: Group) -> list[list[Any]]:
    """The values of each axis; of one that is solved, what it is solved for."""
    given = (next(iter(values.values())) if isinstance(values, dict) else values for values in group.axes.values())
    return [values if isinstance(values, list) else [values] for values in given]


def _label(axis: str, value: Any, group: Group) -> str:
    """Return the part of a line's label that names an axis; empty if the axis runs along the line."""
    if axis not in group.lines:
        return ""
    constraint = group.axes[axis]
    if isinstance(constraint, dict):
        unit = {"omega": "connections", "weights": "weights", "forward_mflops": "MFLOPs"}[next(iter(constraint))]
        return f"{value:,.0f} {unit}" if value >= 100 else f"{value:g} {unit}"
    return f"{axis.partition('.')[2]} {yaml_text(value)}"


def split_axis(axis: str) -> list[str]:
    """Return the keys of an axis: `"model.width, model.density"` has two."""
    return [name.strip() for name in axis.split(",")]
