"""Recipe files: YAML with `extends`, overrides from the command line, and errors that suggest the right key."""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any

import yaml
from pydantic import PlainValidator

from widemix.arguments import FilePath, check_arguments, is_iterable
from widemix.errors import InputError, command
from widemix.models.families import KINDS
from widemix.recipe.error_messages import suggest
from widemix.recipe.key_table import SECTIONS, key_names, takes_text, value_types
from widemix.recipe.plugins import import_plugins
from widemix.recipe.recipe import Recipe, parse_recipe
from widemix.recipe.recipe_hash import leaves
from widemix.recipe.yaml_text import QUOTED, dump_yaml, parse_yaml, read_yaml, yaml_error_message, yaml_text

SHIPPED = (Path(__file__).parents[1] / "recipes").resolve()
_NULLS = ("null", "~")


def _pairs(overrides: Any) -> list[tuple[str, str]]:
    pairs = list(overrides) if is_iterable(overrides) and not isinstance(overrides, Mapping) else None
    if pairs is None or not all(
        isinstance(pair, tuple | list) and list(map(type, pair)) == [str, str] for pair in pairs
    ):
        raise ValueError('must be pairs of a key and its value as YAML text, such as ("train.epochs", "3")')
    return [(name, text) for name, text in pairs]


@check_arguments
def load_recipe(
    path: FilePath, overrides: Annotated[Iterable[tuple[str, str]], PlainValidator(_pairs)] = ()
) -> Recipe:
    """Return the recipe at `path` with overrides applied.

    path: a YAML file, or the name of a shipped recipe such as `digits/rp_mixer`; so `extends`, relative to the file.
    overrides: pairs of `section.key` and a value as YAML text, such as `("train.epochs", "3")`; the last one wins.
        A path or a name that is not in quotes is taken as it is: `("data.path", "data #2")`.

    Raises `InputError`, in one line that names file or command line, key and cure.
    """
    return _load(find_recipe(path), overrides, str(path))


def load_stored_recipe(path: Path) -> Recipe:
    """Return the recipe that a run keeps in its folder."""
    return _load(path, (), str(path))


def _load(file: Path, overrides: Iterable[tuple[str, str]], path: str) -> Recipe:
    merged = _read(file, ())
    import_plugins(merged, path)
    origin = dict.fromkeys(leaves(merged), path)
    known = key_names()
    for name, text in overrides:
        _override(merged, name, text, known)
        origin[name] = "the command line"
    return parse_recipe(_in_home(merged), origin, default_origin=path)


def find_recipe(path: str | Path, folder: Path = Path()) -> Path:
    """The file at `path`; if there is none, the shipped recipe of that name, also without `recipes/` and `.yaml`.

    folder: which a relative path is relative to.
    """
    given = folder / os.path.expanduser(path)
    if given.is_file():
        return given
    names = (SHIPPED / path, SHIPPED / f"{path}.yaml", SHIPPED.parent / path)
    return next((found for found in names if found.is_file()), given)


def find_study(path: str | Path) -> Path:
    """The study file at `path`; if there is none, the shipped study of that name, such as `figure7`."""
    found, shipped = find_recipe(path), find_recipe(Path("studies") / path)
    return shipped if shipped.is_file() and not found.is_file() else found


def shipped_name(stem: str) -> str:
    """How a command names the study STEM.yaml: by its stem if one of that name is shipped, else as a file."""
    return stem if find_recipe(Path("studies") / stem).is_file() else f"{stem}.yaml"


def dump_recipe(recipe: Recipe) -> str:
    """Return the whole recipe as YAML, defaults included, as the run folder stores it."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    extends = f"{chain[-1]}: extends " if chain else ""
    try:
        values = read_yaml(path)
    except FileNotFoundError:
        raise InputError(f"{extends}{path}: no such recipe{_nearby(path, chain)}") from None
    except IsADirectoryError:
        if (path / "recipe.yaml").is_file():
            raise InputError(
                f"{path}: is a run folder; {command('train', path / 'recipe.yaml', '--run-dir', path)} resumes it"
            ) from None
        raise InputError(f"{extends}{path}: is a folder; name a recipe, such as digits/rp_mixer") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{extends}{path}: cannot be read as a recipe ({error})") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML, {yaml_error_message(error)}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: a recipe is a mapping of sections ({', '.join(SECTIONS)})")
    if "runs" in values:
        raise InputError(f"{path}: is a study, not a recipe; `widemix study run {path}` trains its runs")
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str) or "\0" in base:
        raise InputError(f"{path}: extends takes the path of one recipe, relative to this file")
    own = path.resolve()
    if own in chain:
        raise InputError(f"{path}: extends itself through {chain[-1]}")
    return _merge(_read(find_recipe(base, path.parent), (*chain, own)), values)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge mappings; any other value of `over` replaces that of `base`.

    A model of another kind keeps only the keys of `base` that it has.
    """
    merged = dict(base)
    models = base.get("model"), over.get("model")
    if all(isinstance(model, dict) and "kind" in model for model in models):
        merged["model"] = _of_kind(base["model"], over["model"]["kind"])
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merge(merged[name], value) if both else value
    return merged


def _override(values: dict[str, Any], name: str, text: str, known: Iterable[str]) -> None:
    if name not in known:
        raise InputError(f"--{name}: no such key{suggest(name, known)}")
    if not text.strip():
        raise InputError(f"--{name}: has an empty value; give one, or null where the key takes it")
    section, leaf = name.split(".")
    try:
        value = _text(name, text) if takes_text(name) else parse_yaml(text)
    except yaml.YAMLError as error:
        quoted = "; put quotes around text with special characters"
        raise InputError(f"--{name} {text}: not valid YAML, {yaml_error_message(error)}{quoted}") from None
    if not isinstance(values.setdefault(section, {}), dict):
        raise InputError(f"{section}: must be a mapping")
    kept = _of_kind(values[section], value) if name == "model.kind" else values[section]
    values[section] = {**kept, leaf: value}


def _in_home(values: Any, depth: int = 2) -> Any:
    """Sections with `~/` at the start of a text, which is a path then, replaced by the user's home folder."""
    if depth and isinstance(values, dict):
        return {name: _in_home(value, depth - 1) for name, value in values.items()}
    return os.path.expanduser(values) if isinstance(values, str) and values.startswith("~/") else values


def _text(name: str, text: str) -> str | None:
    """The value of a key that takes a path or a name: not YAML but in quotes, and for null where the key takes it."""
    if QUOTED.fullmatch(text) or (text in _NULLS and NoneType in value_types(name)):
        return parse_yaml(text)
    return text


def as_override(name: str, value: Any) -> tuple[str, str]:
    """Return a key and a value that YAML has read as an override; raises `InputError` for a path that is no text."""
    if takes_text(name) and not isinstance(value, str | None):
        raise InputError(f"--{name} {yaml_text(value)}: must be text; put quotes around it")
    return name, yaml_text(value)


def _of_kind(model: dict[str, Any], kind: Any) -> dict[str, Any]:
    """A model section with another kind: without the keys of the old one that the new one does not have."""
    family = KINDS.get(kind) if isinstance(kind, str) else None
    if family is None or model.get("kind") in family.kinds():
        return model
    return {name: value for name, value in model.items() if name in family.model_fields}


def _nearby(path: Path, chain: tuple[Path, ...]) -> str:
    """The end of the message for a recipe that is not there: the nearest in its folder, or of the shipped ones."""
    beside = {p.name: str(p) for p in path.parent.glob("[!.]*.yaml") if p.resolve() not in chain}
    close = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.4)
    if close:
        return f"; did you mean {beside[close[0]]}?"
    shipped = [str(name.relative_to(SHIPPED).with_suffix("")) for name in sorted(SHIPPED.glob("*/**/*.yaml"))]
    close = difflib.get_close_matches(str(path), shipped, n=1)
    close = close or [name for name in shipped if name.endswith(f"/{path.stem}")][:1]
    if close:
        return f"; did you mean {close[0]}?"
    where = "" if path.parent.is_dir() else f" (there is no folder {path.parent} either)"
    folders = sorted({name.partition("/")[0] for name in shipped})
    return f"{where}; give a file, or a shipped one of {', '.join(folders)}, such as digits/rp_mixer"
