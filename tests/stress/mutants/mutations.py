"""Mutations: each a mistake that someone could make, in one place of the code, and the tests that must notice it."""

from pathlib import Path
from typing import NamedTuple

import yaml

EQUIVALENT = Path(__file__).with_name("equivalent.yaml")  # of random ones, that change nothing


class Mutation(NamedTuple):
    """`old` occurs once in the file, and becomes `new`; `tests` are arguments of pytest."""

    file: str
    title: str
    old: str
    new: str
    tests: str


def read_mutations() -> list[Mutation]:
    """All that the YAML files of this folder hold: file -> title -> old, new, tests."""
    found = []
    for path in sorted({*Path(__file__).parent.glob("*.yaml")} - {EQUIVALENT}):
        for file, mutations in yaml.safe_load(path.read_text()).items():
            found += [Mutation(file, title, **change) for title, change in mutations.items()]
    return found


def mutated(text: str, mutation: Mutation) -> str:
    """A file's text with the mutation; `ValueError` unless the old text occurs exactly once."""
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(f"{mutation.file}: {mutation.title}: {mutation.old!r} occurs {count} times, not once")
    return text.replace(mutation.old, mutation.new)
