"""Load prepared images, and train, evaluate and export networks, from Python: the public names of widemix.

They are imported when they are first used, so that `import widemix` takes no time.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from widemix.api.loader import Loader
    from widemix.api.runs import build_model, choose_kernels, evaluate, prepare, train
    from widemix.api.views import View
    from widemix.errors import InputError
    from widemix.recipe import Recipe, load_recipe

__all__ = [
    "InputError",
    "Loader",
    "Recipe",
    "View",
    "__version__",
    "build_model",
    "choose_kernels",
    "evaluate",
    "load_recipe",
    "prepare",
    "train",
]
__version__: str = version("widemix")

_HOMES = {
    "InputError": "widemix.errors",
    "Loader": "widemix.api.loader",
    "Recipe": "widemix.recipe",
    "View": "widemix.api.views",
    "build_model": "widemix.api.runs",
    "choose_kernels": "widemix.api.runs",
    "evaluate": "widemix.api.runs",
    "load_recipe": "widemix.recipe",
    "prepare": "widemix.api.runs",
    "train": "widemix.api.runs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'widemix' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
