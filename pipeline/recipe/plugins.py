"""The key `plugins` of a recipe: modules of other people, which register their parts when they are imported."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pipeline.errors import InputError


def import_plugins(values: Mapping[str, Any], origin: str) -> None:
    """Import the modules that a recipe's plain values name; `InputError` where there is no such module.

    Only modules that Python finds by itself: a recipe or checkpoint of a stranger brings no code.
    """
    names = values.get("plugins") or ()
    for name in names if isinstance(names, list | tuple) else ():
        try:
            import_module(str(name))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports one that is not
            cure = "install it, or add its folder to PYTHONPATH"
            raise InputError(f"{origin}: plugins: there is no module {name}; {cure}") from None
