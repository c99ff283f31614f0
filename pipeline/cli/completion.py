"""The parser of all commands with the names of recipes and the recipe keys, of which shtab makes completion."""

import argparse
from collections.abc import Iterator

from widemix.cli.parser import make_parser
from widemix.recipe import key_names
from widemix.recipe.files import SHIPPED


def make_completed() -> argparse.ArgumentParser:
    """Return a parser for `python -m shtab`. It is to parse nothing: a recipe may also be a file of the user's."""
    parser = make_parser()
    files = sorted(path.relative_to(SHIPPED).with_suffix("") for path in SHIPPED.rglob("*.yaml"))
    recipes = [str(path) for path in files if len(path.parts) > 1 and path.parts[0] != "studies"]
    studies = [path.name for path in files if path.parts[0] == "studies"]
    for command in _commands(parser):
        for action in command._actions:
            if action.dest == "recipe":
                action.choices, action.type = studies if action.metavar == "STUDY.yaml" else recipes, None
        if any(action.dest == "recipe" for action in command._actions):
            for key in key_names():
                command.add_argument(f"--{key}", dest=key, help="a recipe key")
    return parser


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _commands(command)
