"""Recipe files: YAML with `extends`, overrides from the command line, and errors that suggest the right key."""

import copy
import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.errors import InputError, command
from pipeline.models.families import KINDS
from pipeline.recipe.key_table import SECTIONS, families, keys
from pipeline.recipe.plugins import import_plugins
from pipeline.recipe.schema import Recipe

SHIPPED = Path(__file__).parents[2] / "recipes"  # in a checkout, and in the wheel


class _Yaml(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, and reads numbers as YAML 1.2 does: 1e-3 is one, 20:30 is not."""

    def construct_mapping(self, node, deep=False):
        seen: set[str] = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is a list or a mapping", name.start_mark)
            if name.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name.value!r} is duplicated", name.start_mark
                )
            seen.add(name.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node, deep=False):
        try:
            return super().construct_object(node, deep)
        except (ValueError, AttributeError):  # PyYAML's for a date, an integer, ... that its pattern lets through
            text = node.value if len(node.value) <= 20 else f"{node.value[:20]}..."
            problem = f"{text!r} is no valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _load_yaml(text: str) -> Any:
    try:
        return yaml.load(text, _Yaml)
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="lists or mappings are nested too deeply") from None


_Yaml.yaml_implicit_resolvers = {
    first: [known for known in resolvers if known[0] != "tag:yaml.org,2002:int"]
    for first, resolvers in _Yaml.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds, as recipes are read; raises OSError, UnicodeDecodeError or yaml.YAMLError."""
    return copy.deepcopy(_parse(path.read_text(encoding="utf-8")))


@cache
def _parse(text: str) -> Any:
    """The cells of a study have the same few files, hundreds of times."""
    return _load_yaml(text)


# Keys that were renamed: the old name of each, and its name now.
_RENAMED = {
    "train.accumulation": "train.grad_accum_steps",
    "train.checkpointing": "train.activation_checkpointing",
    "train.save_every": "train.save_every_steps",
    "train.keep": "train.keep_last",
    "train.keep_every": "train.keep_every_steps",
    "data.on_bad": "data.on_corrupt",
    "data.batches_ahead": "data.prefetch_batches",
    "data.ahead_mib": "data.prefetch_mib",
    "data.memory": "data.memory_gib",
    "data.window": "data.shuffle_window_mib",
    "engine.timeout": "engine.timeout_s",
    "engine.bucket_view": "engine.gradient_as_bucket_view",
    "engine.bucket_mb": "engine.bucket_cap_mb",
    "engine.overlap": "engine.overlap_comm",
    "engine.offload": "engine.cpu_offload",
    "faults.hang": "faults.hang_timeout_s",
    "faults.skips": "faults.max_skipped_steps",
    "faults.rollbacks": "faults.max_rollbacks",
    "faults.spike": "faults.loss_spike_std",
    "eval.every": "eval.every_epochs",
    "eval.batch": "eval.batch_size",
}


def load_recipe(path: str | Path, overrides: Iterable[tuple[str, str]] = ()) -> Recipe:
    """Return the recipe at `path` with overrides applied.

    path: a YAML file, or the name of a shipped recipe such as `digits/rp_mixer`; `extends` is relative to the file.
    overrides: pairs of `section.key` and a value as YAML text, such as `("train.epochs", "3")`; the last one wins.

    Raises `InputError`, in one line that names file or command line, key and cure.
    """
    merged = _read(find_recipe(path), chain=())
    import_plugins(merged, str(path))
    origin = {name: str(path) for name in _leaves(merged)}
    known = keys()
    for name, text in overrides:
        _override(merged, name, text, known)
        origin[name] = "the command line"
    return parse_recipe(merged, origin, default_origin=str(path))


def find_recipe(path: str | Path) -> Path:
    """The file at `path`; if there is none, the shipped recipe of that name, also without `recipes/` and `.yaml`."""
    given = Path(path)
    names = (given, SHIPPED / given, SHIPPED / f"{given}.yaml", SHIPPED.parent / given)
    return next((name for name in names if name.is_file()), given)


def find_study(path: str | Path) -> Path:
    """The study file at `path`; if there is none, the shipped study of that name, such as `figure7`."""
    found, shipped = find_recipe(path), find_recipe(Path("studies") / path)
    return shipped if shipped.is_file() and not found.is_file() else found


def parse_recipe(
    values: Mapping[str, Any], origin: Mapping[str, str] | None = None, default_origin="recipe"
) -> Recipe:
    """Validate plain values; the first mistake becomes an `InputError` of one line.

    values: sections by name, each a mapping of its keys.
    origin: for each `section.key`, the file it comes from or "the command line", for the message.
    default_origin: the same for keys that `origin` omits.
    """
    import_plugins(values, default_origin)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise InputError(_complaint(error, values, origin or {}, default_origin)) from None


def dump_recipe(recipe: Recipe) -> str:
    """Return the whole recipe as YAML, defaults included, as the run folder stores it."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def flat_recipe(recipe: Recipe) -> dict[str, Any]:
    """All `section.key` of a recipe with their values, defaults included."""
    dump = recipe.model_dump(mode="json", exclude={"plugins"})
    return {f"{section}.{name}": value for section, keys in dump.items() for name, value in keys.items()}


def recipe_hash(recipe: Recipe) -> str:
    """Return 16 hexadecimal digits that depend on the values of all keys."""
    canonical = json.dumps(recipe.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def differences(one: Recipe, other: Recipe) -> list[str]:
    """Return the `section.key` names whose values differ between two recipes."""
    a, b = one.model_dump(mode="json"), other.model_dump(mode="json")
    return [name for name in _leaves(a | b) if _get(a, name) != _get(b, name)]


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    if Path(os.path.realpath(path)) in chain:  # Path.resolve raises at a link to itself
        raise InputError(f"{path}: extends itself through {chain[-1]}")
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
        raise InputError(f"{path}: not valid YAML, {yaml_complaint(error)}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: a recipe is a mapping of sections ({', '.join(SECTIONS)})")
    if "cells" in values:
        raise InputError(f"{path}: is a study, not a recipe; `widemix study run {path}` trains its cells")
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str) or "\0" in base:
        raise InputError(f"{path}: extends takes the path of one recipe, relative to this file")
    return _merge(_read(path.parent / base, (*chain, path.resolve())), values)


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
        value = _load_yaml(text)
    except yaml.YAMLError as error:
        quoted = "; put quotes around text with special characters"
        raise InputError(f"--{name} {text}: not valid YAML, {yaml_complaint(error)}{quoted}") from None
    if not isinstance(values.setdefault(section, {}), dict):
        raise InputError(f"{section}: must be a mapping")
    kept = _of_kind(values[section], value) if name == "model.kind" else values[section]
    values[section] = {**kept, leaf: value}


def _of_kind(model: dict[str, Any], kind: Any) -> dict[str, Any]:
    """A model section with another kind: without the keys of the old one that the new one does not have."""
    family = KINDS.get(kind) if isinstance(kind, str) else None
    if family is None or model.get("kind") in family.kinds():
        return model
    return {name: value for name, value in model.items() if name in family.model_fields}


def _complaint(
    error: ValidationError, values: Mapping[str, Any], origin: Mapping[str, str], default_origin: str
) -> str:
    # A mistyped key is often the reason why another one is missing: report it first.
    first, *others = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    path = [part for part in first["loc"] if isinstance(part, str)]
    family = _kind(path, values)
    name = ".".join(path)
    where = origin.get(name, default_origin)
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "extra_forbidden":
        leaf = name not in Recipe.model_fields and any(known.endswith(f".{name}") for known in keys())
        table = list(keys()) if "." in name or leaf else list(Recipe.model_fields)
        if family and name in table:
            return f"{where}: {name} is not a key of kind {family}{more}"
        return f"{where}: unknown key {name}{suggest(name, table)}{more}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        return f"{where}: {name}: the list is too short{more}"
    if first["type"] == "missing":
        return f"{where}: {name} is missing{more}"
    if first["type"] == "union_tag_not_found":
        return f"{where}: {name}.kind is missing{more}"
    if first["type"] == "union_tag_invalid":
        kinds = keys()[f"{name}.kind"][0].split("|")
        where = origin.get(f"{name}.kind", default_origin)
        given = first["input"]["kind"]
        close = difflib.get_close_matches(str(given), kinds, n=1, cutoff=0.5)
        cure = f"did you mean {close[0]}?" if close else f"choose from {', '.join(kinds)}"
        return f"{where}: {name}.kind {_as_yaml(given)}: no such kind; {cure}{more}"
    if first["type"] == "invalid_key":
        section = f"{first['loc'][0]}: " if len(first["loc"]) > 1 else ""
        return f"{where}: {section}the key {_as_yaml(first['input'])} is not text; put quotes around it{more}"
    message = re.sub(" or instance of [A-Za-z]+$", "", first["msg"])
    message = message.removeprefix("Value error, ").replace("valid tuple", "list")
    message = message.replace("valid dictionary", "mapping of keys")
    message = message.replace("be a list", f"be a list, such as [{first['input']}]")
    given = f" {_as_yaml(first['input'])}" if not isinstance(first["input"], (dict, BaseModel)) else ""
    subject = f"{name}{given}: " if name else ""
    return f"{where}: {subject}{message[0].lower() + message[1:] if subject else message}{more}"


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)


def _kind(path: list[str], values: Mapping[str, Any]) -> str | None:
    """The kind of the section at which a pydantic error's path begins, taken out of the path if it is there."""
    if len(path) < 2 or len(families(path[0])) == 1:
        return None
    # The path of an error in a pydantic union has the kind after the section, the path of one in `model` does not.
    return values["model"]["kind"] if path[0] == "model" else path.pop(1)


def suggest(name: str, table: Iterable[str]) -> str:
    """Return the end of an error message: "; did you mean KEY?" with the nearest of the keys in `table`."""
    if name in _RENAMED:
        return f"; it was renamed to {_RENAMED[name]}"
    names = list(table)
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = [known for known in names if known.rsplit(".", 1)[-1] == leaf]
    close = same_leaf or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not close:
        by_leaf = {known.rsplit(".", 1)[-1]: known for known in names}
        close = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.5)]
    if close:
        return f"; did you mean {close[0]}?"
    return f"; choose from {', '.join(names)}" if len(names) < 12 else "; `widemix train --help` lists them"


def _nearby(path: Path, chain: tuple[Path, ...]) -> str:
    """The end of the message for a recipe that is not there: the nearest in its folder, or of the shipped ones."""
    beside = {p.name: str(p) for p in path.parent.glob("*.yaml") if p.resolve() not in chain}
    close = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.4)
    if close:
        return f"; did you mean {beside[close[0]]}?"
    shipped = [str(name.relative_to(SHIPPED).with_suffix("")) for name in sorted(SHIPPED.rglob("*.yaml"))]
    close = difflib.get_close_matches(str(path), shipped, n=1)
    close = close or [name for name in shipped if name.endswith(f"/{path.stem}")][:1]
    if close:
        return f"; did you mean {close[0]}?"
    where = "" if path.parent.is_dir() else f" (there is no folder {path.parent} either)"
    return f"{where}; recipes/README.md lists those that there are"


def yaml_complaint(error: Exception) -> str:
    """Return what is wrong with a YAML file, and in which line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "unreadable"
    return f"line {mark.line + 1}: {problem}" if mark else problem


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    names = []
    for name, value in values.items():
        if isinstance(value, dict) and not prefix:
            names += _leaves(value, f"{name}.")
        else:
            names.append(f"{prefix}{name}")
    return names


def _get(values: Mapping[str, Any], name: str) -> Any:
    section, _, leaf = name.partition(".")
    return values.get(section, {}).get(leaf) if leaf else values.get(section)
