"""The runs of a study as a job array, one line each in runs.tsv.

A line is the run's name, a copy of its recipe and its overrides, separated by tabs. The number of a line is the
run's index in Slurm's arrays, so lines keep their numbers. The name has a hash of the resolved recipe, so that runs
of another recipe have other lines and other run folders.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from widemix.errors import InputError
from widemix.recipe import Recipe, recipe_hash
from widemix.recipe.key_table import takes_text
from widemix.recipe.yaml_text import QUOTED, parse_yaml, yaml_text
from widemix.studies.study_run import StudyRun

TABLE = "runs.tsv"
_PATHS = re.compile(rf"(?:^|,)(\s*(?:{QUOTED.pattern})\s*(?=,|$)|[^,]*)", re.DOTALL)  # or names, separated by commas


def cross(recipe: Path, vary: Sequence[str], shared: Sequence[tuple[str, str]] = ()) -> list[StudyRun]:
    """Return one run for every combination of values.

    recipe: what all runs start from, with the overrides `shared` applied.
    vary: `["train.seed=0,1", "model.kind=mixer"]` gives two runs.

    Raises `InputError` if a text is not of this form, the recipe of a run is invalid, or a value is repeated.
    """
    axes = []
    for text in vary:
        match = re.fullmatch(r"(\w+\.\w+)=(.+)", text)
        if not match:
            raise InputError(f"--vary {text}: should be section.key=VALUE,VALUE,...")
        axes.append([(match[1], value) for value in _values(match[1], match[2], text)])
    keys = [text.partition("=")[0] for text in vary]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise InputError(f"--vary {repeated[0]}: is given twice; list all its values in one --vary")
    study_runs = [StudyRun(recipe, varied, tuple(shared)) for varied in itertools.product(*axes)]
    names = [study_run.name for study_run in study_runs]
    if duplicates := [study_run for study_run in study_runs if names.count(study_run.name) > 1]:
        values = ", ".join(f"{key}={text}" for key, text in duplicates[0].own)
        raise InputError(f"--vary: two runs have {values}")
    return study_runs


def _values(key: str, text: str, option: str) -> list[str]:
    """Split at commas, but not within brackets or quotes."""
    if takes_text(key):
        return _checked(option, [each.strip() for each in _PATHS.findall(text)])
    try:
        sequence, values = yaml.compose(f"[{text}]", yaml.SafeLoader), parse_yaml(f"[{text}]")
    except yaml.YAMLError:
        raise InputError(f"--vary {option}: the values should be YAML, separated by commas") from None
    assert sequence is not None  # it has a pair of brackets at least
    texts = [
        node.value if isinstance(node, yaml.ScalarNode) and node.style is None else yaml_text(value)  # as typed
        for node, value in zip(sequence.value, values, strict=True)
    ]
    return _checked(option, texts)


def _checked(option: str, texts: list[str]) -> list[str]:
    if bad := [text for text in texts if not text or "\t" in text or "\n" in text]:
        raise InputError(f"--vary {option}: {bad[0]!r} cannot be a value")
    return texts


def kept_path(folder: Path, recipe: Recipe) -> Path:
    """Where `submit` keeps a recipe: its file may be edited while the job waits, or runs and is requeued."""
    return folder / "slurm" / f"recipe-{recipe_hash(recipe)}.yaml"


def table_line(study_run: StudyRun, folder: Path) -> str:
    """Return the run's line of the folder's runs.tsv, without the line break.

    Raises `InputError` for an override that would be cut there.
    """
    overrides = [f"--{key}={value}" for key, value in study_run.overrides]
    if cut := [text for text in overrides if "\t" in text or len(text.splitlines()) > 1]:
        raise InputError(f"{cut[0]!r}: a job's values have no tab and no line break")
    return "\t".join([study_run.name, str(kept_path(folder, study_run.recipe)), *overrides])


def merge(folder: Path, study_runs: Sequence[StudyRun]) -> list[str]:
    """Return the lines of the folder's runs.tsv, with those of these runs replaced, or appended if they are new."""
    table = folder / TABLE
    lines = table.read_text().splitlines() if table.exists() else []
    known = {line.partition("\t")[0]: line for line in lines}
    known |= {study_run.name: table_line(study_run, folder) for study_run in study_runs}
    return list(known.values())


def unfinished(folder: Path, lines: Sequence[str], study_runs: Sequence[StudyRun]) -> list[int]:
    """Return the line numbers, from 1, of the runs that have not ended."""
    numbers = {line.partition("\t")[0]: number for number, line in enumerate(lines, 1)}
    return sorted(numbers[study_run.name] for study_run in study_runs if not study_run.has_ended(folder))


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as sbatch's --array takes them: `[1, 2, 3, 7]` is `1-3,7`."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)
