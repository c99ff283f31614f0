"""What happens when timm is imported: our networks' names join its registry, and wandb is not imported.

timm imports Weights & Biases wherever it is installed, asked for or not. It takes a second, and a process that is
killed leaves two folders of it in /tmp.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # `typing` would be most of what `import widemix` takes
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Execute = Callable[[ModuleType], None]

_USES_WANDB = "timm.utils.summary"  # the only module of timm's that imports it
_REGISTRY = "widemix.models.timm_registry"


class _Later:
    """Stands for wandb in timm's module, and imports it when something of it is used."""

    def __getattr__(self, name: str) -> object:
        return getattr(import_module("wandb"), name)


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec of timm and of its module that uses wandb, with a loader that does more or less."""
        if fullname == _USES_WANDB and "wandb" not in sys.modules:
            change: Callable[[Execute, ModuleType], None] = _execute_without_wandb
        elif fullname == "timm":
            change = _execute_and_register
        else:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: change(execute, module)  # type: ignore[method-assign]
        return spec


def _execute_without_wandb(execute: Execute, module: ModuleType) -> None:
    sys.modules["wandb"] = None  # type: ignore[assignment]  # which makes its import fail
    try:
        execute(module)
    finally:
        del sys.modules["wandb"]
    module.__dict__["wandb"] = _Later()


def _execute_and_register(execute: Execute, module: ModuleType) -> None:
    execute(module)
    import_module(_REGISTRY)


def watch_timm() -> None:
    """Put our names into timm's registry, at once if timm is there, else when it comes; and keep wandb out."""
    sys.meta_path.insert(0, _Finder())
    if getattr(getattr(sys.modules.get("timm"), "__spec__", None), "_initializing", True) is False:
        import_module(_REGISTRY)
