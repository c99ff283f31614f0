"""The figures and tables of the papers, in their order: recipes/papers.yaml."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from widemix.errors import InputError
from widemix.files import csv_text, parse_json, read_regular
from widemix.recipe.files import SHIPPED
from widemix.recipe.yaml_text import read_yaml
from widemix.section import Section, key
from widemix.studies.estimates import Estimate, samples_differ
from widemix.studies.plan import requirements
from widemix.studies.protocol import Statement
from widemix.studies.study import read_study, study_runs_of
from widemix.studies.study_run import StudyRun, unique

CATALOGUE = SHIPPED / "papers.yaml"
FULL_SIZE = "full_size.csv"


class Check(Statement):
    """A comparison of two numbers, or lists of samples, of a JSON file that an analysis has written."""

    file: str = key(..., "JSON file in the folder of the results")
    left: str = key(..., "keys and places of the one, such as widening.5.largest")
    right: str | float = key(..., "those of the other, or a number")
    paired: bool = key(False, "whether the n-th samples of both belong together, such as those of one network")


class Entry(Section):
    """A figure or table of a paper."""

    figure: str = key(..., "what the paper calls it")
    claim: str = key("", "what the paper says of it; empty: the claim of the study")
    full: list[str] = key([], "studies of the paper's size")
    studies: list[str] = key([], "studies that were run, or that need no run")
    command: str = key("", "command of an analysis")
    images: list[str] = key([], "figures of the analysis, in the folder of the results")
    caption: str = key("", "what a reader has to know of its figures")
    checks: list[Check] = key([], "what the numbers of the analysis decide")
    open: str = key("", "what is open besides the full studies")


class Paper(Section):
    """A paper, and what of it is here."""

    paper: str = key(..., "authors, year and title")
    entries: Annotated[list[Entry], Field(min_length=1)] = key(..., "its figures and tables, in their order")


def read_papers(path: Path = CATALOGUE) -> list[Paper]:
    """Read the catalogue; raises `InputError`."""
    try:
        return TypeAdapter(list[Paper]).validate_python(read_yaml(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def check_estimate(check: Check, folder: Path) -> Estimate | None:
    """The difference that a check is about, of the file in the folder of the results; None if it is not there."""
    path = folder / check.file
    if not path.exists():
        return None
    numbers = parse_json(read_regular(path))
    left, right = (
        [side] if isinstance(side, float) else _samples(numbers, side, path) for side in (check.left, check.right)
    )
    if check.paired and len(left) != len(right):
        raise InputError(f"{path}: {check.left} and {check.right} are no pairs: {len(left)} and {len(right)}")
    return samples_differ(left, right, check.paired)


def _samples(numbers: Any, place: str, path: Path) -> list[float]:
    for part in place.split("."):
        try:
            numbers = numbers[int(part)] if isinstance(numbers, list) else numbers[part]
        except (KeyError, IndexError, ValueError):
            raise InputError(f"{path}: has no {place}, there is no {part}") from None
    return [float(number) for number in (numbers if isinstance(numbers, list) else [numbers])]


def full_size_hours(folder: Path) -> dict[str, float]:
    """Hours on one GPU of the studies of the papers' sizes, as `full_size_csv` has found them."""
    path = folder / FULL_SIZE
    rows = csv.DictReader(io.StringIO(path.read_text())) if path.exists() else ()
    return {row["study"]: float(row["hours"]) for row in rows if row["hours"] != "nan"}


def full_size_csv(papers: Sequence[Paper], studies: Path, gpu: str) -> str:
    """Return the table of the full studies: runs, and hours on one GPU of this kind; nan where they are not known."""
    rows: list[list[object]] = [["study", "runs", "hours", "gpu"]]
    for name in dict.fromkeys(name for paper in papers for entry in paper.entries for name in entry.full):
        path = studies / f"{name}.yaml"
        own, seeds = runs_of_one_seed(path), max(1, len(read_study(path).seeds))
        hours = [each.hours for each in requirements(own, gpu).values()]
        total = sum(each for each in hours if each is not None) * seeds
        known = all(each is not None for each in hours)
        rows.append([name, len(own) * seeds, f"{total:.3g}" if known else "nan", gpu])
    return csv_text(rows)


def runs_of_one_seed(path: Path) -> list[StudyRun]:
    """The runs of a study's first seed, each once; those of other seeds take the same."""
    study = read_study(path)
    return unique(study_runs_of(path, study.model_copy(update={"seeds": study.seeds[:1]})))
