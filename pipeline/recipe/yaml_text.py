"""YAML as recipes and studies are written: numbers as in YAML 1.2, no key twice, errors with their line."""

import json
import pickle
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from widemix.files import read_regular


class _Yaml(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, and reads scalars as YAML 1.2 does.

    1e-3 is a number; 20:30, 2020-01-01 and 010, of which PyYAML makes 8, are text.
    """

    def construct_mapping(self, node, deep=False):
        """The mapping of a node; an error if a key is there twice, or is no scalar."""
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
        """The value of a node; an error of YAML where PyYAML raises one of Python, or a value contains itself."""
        if node in self.recursive_objects:
            raise yaml.constructor.ConstructorError(None, None, "a list or mapping contains itself", node.start_mark)
        try:
            return super().construct_object(node, deep=True)  # at once, so that it is known what is being made
        except (ValueError, AttributeError):  # PyYAML's for a date, an integer, ... that its pattern lets through
            text = node.value if len(node.value) <= 20 else f"{node.value[:20]}..."
            problem = f"{text!r} is no valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def parse_yaml(text: str) -> Any:
    """Return what a YAML text holds; raises yaml.YAMLError."""
    return pickle.loads(_parse(text))


@lru_cache(4096)
def _parse(text: str) -> bytes:
    """The value, pickled. The runs of a study have the same few files and values, hundreds of times."""
    try:
        return pickle.dumps(yaml.load(text, _Yaml))
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="lists or mappings are nested too deeply") from None


def yaml_text(value: Any) -> str:
    """Return a value that YAML has read as text that YAML reads as the same value, in quotes only where needed."""
    if isinstance(value, str):
        with suppress(yaml.YAMLError):
            if parse_yaml(value) == value:
                return value
    return json.dumps(value, ensure_ascii=False)


QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)  # a text in quotes, as YAML has them
MOST = 1 << 20  # bytes of a recipe or a study
_NOT_AS_YAML_1_1 = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")
_Yaml.yaml_implicit_resolvers = {
    first: [known for known in resolvers if known[0] not in _NOT_AS_YAML_1_1]
    for first, resolvers in _Yaml.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)


class _Text(yaml.SafeDumper):
    """A dumper that quotes the texts of which `_Yaml`, or a YAML 1.1 loader, would make something else."""


for _each in (_Yaml, _Text):
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def dump_yaml(value: Any) -> str:
    """Return a value as YAML that `parse_yaml` reads as the same value; mappings keep their order."""
    return yaml.dump(value, Dumper=_Text, sort_keys=False)


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds, as recipes are read; raises OSError, UnicodeDecodeError or yaml.YAMLError."""
    return parse_yaml(read_regular(path, MOST).decode("utf-8"))


def yaml_error_message(error: Exception) -> str:
    """Return what is wrong with a YAML file, and in which line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "unreadable"
    return f"line {mark.line + 1}: {problem}" if mark else problem
