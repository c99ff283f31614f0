"""Keeps timm from importing Weights & Biases before it uses it.

timm does so wherever it is installed, asked for or not. It takes a second, and a process that is killed leaves two
folders of it in /tmp.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_MODULE = "timm.utils.summary"  # the only one of timm's that imports it


class _Later:
    """Stands for wandb in timm's module, and imports it when something of it is used."""

    def __getattr__(self, name: str) -> object:
        return getattr(import_module("wandb"), name)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec of timm's module, whose loader hides wandb."""
        if fullname != _MODULE or "wandb" in sys.modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_without_wandb(module: ModuleType) -> None:
            sys.modules["wandb"] = None  # type: ignore[assignment]  # which makes its import fail
            try:
                execute(module)
            finally:
                del sys.modules["wandb"]
            module.__dict__["wandb"] = _Later()

        spec.loader.exec_module = execute_without_wandb  # type: ignore[method-assign]
        return spec


def import_wandb_later() -> None:
    """Let timm, if it is still to be imported, import wandb only when it uses it."""
    sys.meta_path.insert(0, _Finder())
