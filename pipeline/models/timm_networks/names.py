"""The names of timm's networks, read from its source: importing timm imports torch, which takes seconds."""

import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from widemix.errors import InputError

_REGISTERED = re.compile(r"^@register_model\s+def (\w+)\(", re.MULTILINE)


def unknown_name(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return the message about a name that timm does not have, with the nearest of `names`, those that it has."""
    close = get_close_matches(name, names, n=1)
    return "timm has no such network" + (f"; did you mean {prefix}{close[0]}?" if close else "")


def check_name(name: str, prefix: str = "") -> None:
    """Raise `InputError` where timm has no network of this name, with or without a tag of its weights.

    Not once timm is imported, which then knows better: plug-ins register theirs. prefix: of the name, in recipes.
    """
    from widemix.models.families import KINDS, named_networks, sections

    network, source = name.partition(".")[0], _source()
    ours = {*KINDS, *named_networks(), *(section.timm_architecture for section in sections())}
    if "timm" in sys.modules or not _REGISTERED.search(source) or network in ours:
        return
    forms = (f"\ndef {network}(", f"'{network}'", f'"{network}"', f"'{network}.", f'"{network}.')
    if not any(form in source for form in forms):
        raise InputError(unknown_name(name, _REGISTERED.findall(source), prefix))


@cache
def _source() -> str:
    """The text of timm's networks; empty where it is not installed as such."""
    spec = find_spec("timm")
    folders = (spec and spec.submodule_search_locations) or ()
    files = (file for folder in folders for file in sorted(Path(folder, "models").glob("*.py")))
    return "\n".join(file.read_text(errors="replace") for file in files)
