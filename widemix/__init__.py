"""Load prepared pictures, and train, evaluate and export networks, from Python: the public names of widemix.

They are imported when they are first used, so that `import widemix` takes no time.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.errors import InputError
    from pipeline.recipe import Recipe, load_recipe
    from widemix.loader import Loader
    from widemix.runs import build_model, choose_kernels, evaluate, prepare, train
    from widemix.views import View

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
    "InputError": "pipeline.errors",
    "Loader": "widemix.loader",
    "Recipe": "pipeline.recipe",
    "View": "widemix.views",
    "build_model": "widemix.runs",
    "choose_kernels": "widemix.runs",
    "evaluate": "widemix.runs",
    "load_recipe": "pipeline.recipe",
    "prepare": "widemix.runs",
    "train": "widemix.runs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'widemix' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
