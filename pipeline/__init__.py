"""Load prepared images, and train, evaluate and export networks, from Python: the public names of widemix.

They and the modules (`widemix.models`, `widemix.analysis` ...) are imported when they are first used, so that
`import widemix` takes no time: `typing` and `importlib.abc` alone would be 50 ms. From then on `timm.create_model`
knows our networks by name.
"""

from __future__ import annotations

import os
from importlib import import_module

if __name__ != "widemix":
    raise ImportError("pipeline/ is the folder of the package widemix: `import widemix`", name=__name__)

# In a clone this folder is found by its own name or by the link `widemix`, as the process was started. numba keeps
# what it has compiled by the paths of modules: by two paths it would compile all of it twice.
__path__ = [os.path.realpath(folder) for folder in __path__]

from widemix.timm_import import watch_timm

TYPE_CHECKING = False  # type checkers take it for true
if TYPE_CHECKING:
    from typing import Any

    __version__: str
    from widemix.api.loader import Loader
    from widemix.api.loader_arguments import View
    from widemix.api.prep import prepare
    from widemix.api.runs import build_model, choose_memory_layout, evaluate, train
    from widemix.errors import InputError
    from widemix.recipe import Recipe, load_recipe

__all__ = [
    "InputError",
    "Loader",
    "Recipe",
    "View",
    "__version__",
    "build_model",
    "choose_memory_layout",
    "evaluate",
    "load_recipe",
    "prepare",
    "train",
]

_HOMES = {
    "InputError": "widemix.errors",
    "Loader": "widemix.api.loader",
    "Recipe": "widemix.recipe",
    "View": "widemix.api.loader_arguments",
    "build_model": "widemix.api.runs",
    "choose_memory_layout": "widemix.api.runs",
    "evaluate": "widemix.api.runs",
    "load_recipe": "widemix.recipe",
    "prepare": "widemix.api.prep",
    "train": "widemix.api.runs",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("widemix")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if not name.startswith("_"):
        from importlib.util import find_spec

        if find_spec(f"widemix.{name}"):
            return import_module(f"widemix.{name}")
    raise AttributeError(f"module 'widemix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


watch_timm()
