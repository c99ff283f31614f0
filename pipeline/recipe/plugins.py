"""Modules of other people, which register their parts when they are imported.

A recipe names them in its key `plugins`; an installed package may name its own as an entry point of the group
`widemix.plugins`, and recipes then use its parts without naming it.
"""

import traceback
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from widemix.errors import InputError

GROUP = "widemix.plugins"


@cache
def _import_installed() -> None:
    """Import the modules that installed packages name; `InputError` where one names a module that is not there."""
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except ModuleNotFoundError as error:
            package = entry.dist.name if entry.dist else entry.name
            raise InputError(f"{package}: its plugin {entry.value} cannot be imported ({error}); repair it") from None


def import_plugins(values: Mapping[str, Any], origin: str) -> None:
    """Import installed plugins and the modules that a recipe's plain values name; see `import_modules`."""
    names = values.get("plugins") or ()
    import_modules(map(str, names if isinstance(names, list | tuple) else ()), f"{origin}: plugins")


def import_modules(names: Iterable[str], origin: str) -> None:
    """Import installed plugins and the modules of these names; `InputError` where one is missing or raises.

    Only modules that Python finds by itself: a recipe or checkpoint of a stranger brings no code.
    """
    _import_installed()
    for name in names:
        if not name.strip(".") or name.startswith("."):
            raise InputError(f"{origin}: {name!r} is no name of a module; write it as in `import my_module`")
        try:
            import_module(name)
        except InputError as error:  # of a part that is registered already
            raise InputError(f"{origin}: {name}: {error}") from None
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                cure = "install it, or add its folder to PYTHONPATH"
                raise InputError(f"{origin}: there is no module {name}; {cure}") from None
            raise InputError(f"{origin}: {name} cannot be imported ({_describe(error)})") from error


def _describe(error: BaseException) -> str:
    """Where and why a module could not be imported, in one line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: SyntaxError: {error.msg}"
    last = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename][-1]
    return f"{last.filename}, line {last.lineno}: {type(error).__name__}: {' '.join(str(error).split())}"
