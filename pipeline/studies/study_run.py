"""A run of a study: a recipe with some keys changed, trained in a separate folder."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from widemix.errors import InputError
from widemix.files import parse_json, read_regular
from widemix.recipe import Recipe, experiment_hash, load_recipe, load_stored_recipe, run_differences
from widemix.recipe.key_table import takes_text
from widemix.recipe.yaml_text import QUOTED, parse_yaml, yaml_text

_LONGEST = 120  # characters of a folder's name before the hash
_PATHS = re.compile(rf"(?:^|,)(\s*(?:{QUOTED.pattern})\s*(?=,|$)|[^,]*)", re.DOTALL)  # or names, separated by commas


@dataclass(frozen=True)
class StudyRun:
    """One run of a study.

    path: the recipe that it starts from.
    varied: the keys that tell its point from others, as `("section.key", "YAML value")`.
    shared: overrides that all runs have, applied before `varied`.
    panel, line: where its result is plotted.
    seed: its seed; None if the study has none. seeded: the keys that are set to it.
    chosen: the values that a search has chosen for its point, applied after `varied`. group: its entry of the study.
    """

    path: Path
    varied: tuple[tuple[str, str], ...]
    shared: tuple[tuple[str, str], ...] = ()
    panel: str = ""
    line: str = ""
    seed: int | None = None
    seeded: tuple[str, ...] = ()
    chosen: tuple[tuple[str, str], ...] = ()
    group: int = 0

    @property
    def own(self) -> tuple[tuple[str, str], ...]:
        """Overrides that tell it from other runs: the values of its point, those chosen for it, and its seed."""
        return (*self.varied, *self.chosen, *((key, str(self.seed)) for key in self.seeded))

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """All changes of the recipe, those shared by all runs first."""
        return (*self.shared, *self.own)

    @property
    def point(self) -> tuple:
        """Key that runs which differ in their seed alone have in common."""
        return (self.group, self.path, self.varied, self.panel, self.line)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe with the overrides applied; raises `InputError`."""
        return load_recipe(self.path, self.overrides)

    @cached_property
    def name(self) -> str:
        """Name of the run folder: the recipe's, the varied values, and a hash of the resolved recipe.

        `[("model.depth", "2"), ("train.seed", "1")]` is `cifar10-s_mixer_depth-2_seed-1_9f2b6c01d4`. Runs of other
        recipes therefore have other folders, whatever they were started with.
        """
        words = [f"{self.path.resolve().parent.name}-{self.path.stem}"]
        for key, text in self.own:
            words.append(f"{key.partition('.')[2]}-{re.sub(r'[^A-Za-z0-9.+-]+', '_', text).strip('_.')}")
        return f"{'_'.join(words)[:_LONGEST]}_{experiment_hash(self.recipe)}"

    def has_ended(self, folder: Path) -> bool:
        """Whether the study's folder has a run of this recipe that is complete, or has diverged for good."""
        return self.result(folder) is not None or self.has_diverged(folder)

    def result(self, folder: Path) -> dict | None:
        """Return the content of the run's done.json; None if there is none, or the folder has another recipe's run.

        Only keys that could not change in a run count: a node that stages the data changes `data.path`.
        """
        run = folder / self.name
        if not (run / "done.json").exists():
            return None
        try:
            done = parse_json(read_regular(run / "done.json"))
            same = self._is_own(run)
        except (OSError, ValueError) as error:
            raise InputError(f"{run}: is not a finished run ({error})") from None
        return done if same else None

    def has_diverged(self, folder: Path) -> bool:
        """Whether the run ended because its loss was not finite, and no rollback was left: it would end so again."""
        run = folder / self.name
        try:
            *_, last = read_regular(run / "metrics.jsonl").splitlines()
            return parse_json(last).get("event") == "diverged" and self._is_own(run)
        except (OSError, ValueError, AttributeError):  # no run, no line, or one that a kill has cut off
            return False

    def _is_own(self, run: Path) -> bool:
        return not run_differences(load_stored_recipe(run / "recipe.yaml"), self.recipe)


def unique(study_runs: Iterable[StudyRun]) -> list[StudyRun]:
    """Return the runs to train: one of each name, since lines of a figure may share a run."""
    return list({study_run.name: study_run for study_run in study_runs}.values())


def scale(study_runs: Iterable[StudyRun]) -> str:
    """Return in words what runs train: data, epochs, blocks, channels and width, from the least to the greatest."""
    recipes = [study_run.recipe for study_run in study_runs]
    parts = [", ".join(dict.fromkeys(Path(recipe.data.path).name for recipe in recipes))]
    models = [recipe.model.model_dump() for recipe in recipes]
    for values, text in (
        ([recipe.train.epochs for recipe in recipes], "{} epochs"),
        ([model.get("depth") for model in models], "{} blocks"),
        ([model.get("channels") for model in models], "C = {}"),
        ([model.get("width") for model in models], "width {}"),
    ):
        if known := sorted({value for value in values if isinstance(value, int)}):
            ends = dict.fromkeys((known[0], known[-1]))
            parts.append(text.format(" to ".join(f"{value:,}" for value in ends)))
    return "; ".join(filter(None, parts))


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
