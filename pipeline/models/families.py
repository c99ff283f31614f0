"""The model families that a recipe may name by `model.kind`. Imports no torch."""

from collections.abc import Callable
from importlib import import_module
from inspect import isabstract

from widemix.errors import InputError, shown
from widemix.models.section import ModelSection

# One line a family, or a few of a kind: its folder, whose section.py lists its sections in SECTIONS.
FAMILIES = (
    "mixer",
    "sw_mlp",
    "plain_mlps",
    "baselines",
    "timm_networks",
    "text",
)

KINDS: dict[str, type[ModelSection]] = {}
WATCHERS: list[Callable[[type[ModelSection]], None]] = []  # called with each section that is registered from then on


def register(section: type[ModelSection]) -> type[ModelSection]:
    """Make recipes understand the section's kinds; returns the section, so that it serves as a decorator.

    Families outside this package call it before a recipe that names them is loaded. `InputError` if the section is
    incomplete or another one has its kind.
    """
    if not (isinstance(section, type) and issubclass(section, ModelSection)):
        raise InputError(f"section {shown(section)}: should be a class derived from ModelSection")
    kinds = section.kinds()
    if not kinds:
        raise InputError(f"{section.__name__}: has no kind; declare `kind: Literal[...]` with its names in recipes")
    if isabstract(section):
        raise InputError(f"{section.__name__}: must define {', '.join(sorted(section.__abstractmethods__))}")
    for kind in kinds:
        if KINDS.get(kind, section) is not section:
            raise InputError(f"{section.__name__}: kind {kind} is {KINDS[kind].__name__}'s already; choose another")
    for watch in WATCHERS:
        watch(section)
    KINDS.update(dict.fromkeys(kinds, section))
    return section


def sections() -> list[type[ModelSection]]:
    """Every registered section once, those of this package first."""
    return list(dict.fromkeys(KINDS.values()))


def named_networks() -> dict[str, tuple[ModelSection, int]]:
    """The published networks of all families by name: section and side of the image in pixels.

    The name is the paper's in lower case, then the side.
    """
    return {name: network for section in sections() for name, network in section.named().items()}


for _family in FAMILIES:
    for _section in import_module(f"widemix.models.{_family}.section").SECTIONS:
        register(_section)
