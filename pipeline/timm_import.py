"""Watch the import of timm: our networks' names join its registry, and slow imports wait until they are needed.

timm imports Weights & Biases wherever it is installed, asked for or not. It takes a second, and a process that is
killed leaves two folders of it in /tmp. What torch.compile consists of takes longer than timm itself: timm imports it
for methods that are not to be compiled, and torchvision for a function that nothing here calls. torchmetrics imports
scipy.signal, a quarter of its time, to name a window as it was named before 2022, for one metric of sounds, and
matplotlib, an eighth of what an evaluation takes, for metrics that are plotted. DeepSpeed imports MLflow wherever
that is installed, for its search of configurations, and with ZeRO torch.compile's code generator, for its own Muon: a
third of the time until it trains.
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

_REGISTRY = "widemix.models.timm_registry"


class _Later:
    """Stands for a module where another has imported it, and imports it when something of it is used."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> object:
        return getattr(import_module(self._name), name)


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec of a module of `_CHANGES`, with a loader that does more or less."""
        change = _CHANGES.get(fullname)
        if change is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: change(execute, module)  # type: ignore[method-assign]
        return spec


def _execute_seeing(stand_in: ModuleType | None, name: str, execute: Execute, module: ModuleType) -> bool:
    """Execute a module in which `import NAME` finds the stand-in; not, and False, if NAME is imported already."""
    if name in sys.modules:
        execute(module)
        return False
    sys.modules[name] = stand_in  # type: ignore[assignment]  # None makes its import fail
    try:
        execute(module)
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
    return True


def _execute_without_wandb(execute: Execute, module: ModuleType) -> None:
    if _execute_seeing(None, "wandb", execute, module):
        module.__dict__["wandb"] = _Later("wandb")


def _execute_without_mlflow(execute: Execute, module: ModuleType) -> None:
    from importlib.util import find_spec

    if _execute_seeing(None, "mlflow", execute, module) and find_spec("mlflow"):
        module.__dict__.update(mlflow=_Later("mlflow"), has_mlflow=True)


def _execute_compiling_late(execute: Execute, module: ModuleType) -> None:
    """Functions decorated with `compiler.compile()` are compiled at their first call, not when they are defined."""
    compiler = import_module("deepspeed.runtime.compiler")

    def compile_late(function: Callable[..., object]) -> Callable[..., object]:
        from functools import cache, wraps

        compiled = cache(lambda: compile_now()(function))

        @wraps(function)
        def call(*arguments: object, **options: object) -> object:
            return compiled()(*arguments, **options)

        return call

    compile_now, compiler.compile = compiler.compile, lambda: compile_late  # type: ignore[attr-defined]
    try:
        execute(module)
    finally:
        compiler.compile = compile_now  # type: ignore[attr-defined]


def _execute_without_dynamo(execute: Execute, module: ModuleType) -> None:
    """For `from torch._dynamo.utils import is_compile_supported`, a function that `roi_align` calls."""
    name, function = "torch._dynamo.utils", "is_compile_supported"
    later = _Later(name)
    stand_in = type(sys)(name)
    setattr(stand_in, function, lambda *arguments: getattr(later, function)(*arguments))
    _execute_seeing(stand_in, name, execute, module)


def _execute_without_signals(execute: Execute, module: ModuleType) -> None:
    """For `import scipy.signal`, and `hamming` if it has none. Who asks for more, as librosa does, gets it.

    Not who asks all modules for `__file__`: `inspect.getmodule` does, which torchvision's registrations call.
    """
    name = "scipy.signal"
    stand_in = type(sys)(name)

    def ask(attribute: str) -> object:
        if attribute == "__file__":
            raise AttributeError(attribute)
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return getattr(import_module(name), attribute)

    stand_in.__dict__.update(hamming=None, __getattr__=ask)
    _execute_seeing(stand_in, name, execute, module)


def _execute_without_plots(execute: Execute, module: ModuleType) -> None:
    """For the types of its annotations, which are then `object`, and for the style in which its functions plot.

    A release that needs more of matplotlib when it is imported gets it.
    """
    names = "matplotlib", "matplotlib.axes", "matplotlib.colors", "matplotlib.pyplot"
    if names[0] in sys.modules:
        execute(module)
        return
    plots, axes, colors, pyplot = stand_ins = [type(sys)(name) for name in names]
    plots.__dict__.update(axes=axes, colors=colors, pyplot=pyplot)
    axes.__dict__["Axes"] = colors.__dict__["Colormap"] = pyplot.__dict__["Figure"] = object
    later = _Later(names[-1])

    def context(style: object) -> Callable[[Callable[..., object]], object]:
        from functools import wraps

        def decorate(plot: Callable[..., object]) -> Callable[..., object]:
            @wraps(plot)
            def in_style(*arguments: object, **options: object) -> object:
                return later.style.context(style)(plot)(*arguments, **options)  # type: ignore[attr-defined]

            return in_style

        return decorate

    pyplot.__dict__["style"] = type(sys)("style")
    pyplot.style.context = context
    sys.modules.update(zip(names, stand_ins, strict=True))
    enough = False
    try:
        execute(module)
        enough = True
    except (ImportError, AttributeError):
        pass
    finally:
        for name, stand_in in zip(names, stand_ins, strict=True):
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]
    if enough:
        module.__dict__.update(matplotlib=_Later(names[0]), plt=later)
    else:
        execute(module)


def _execute_with_late_disabling(execute: Execute, module: ModuleType) -> None:
    """`torch.compiler.disable` imports all that it disables; torch's own for optimizers does so at the first call."""
    from torch._compile import _disable_dynamo

    execute(module)
    module.__dict__["disable_compiler"] = _disable_dynamo


def _execute_and_register(execute: Execute, module: ModuleType) -> None:
    execute(module)
    import_module(_REGISTRY)


# Each is the only module of its library that imports the other.
_CHANGES: dict[str, Callable[[Execute, ModuleType], None]] = {
    "timm": _execute_and_register,
    "timm.utils.summary": _execute_without_wandb,
    "timm.layers.typing": _execute_with_late_disabling,
    "torchvision.ops.roi_align": _execute_without_dynamo,
    "torchmetrics": _execute_without_signals,
    "torchmetrics.utilities.plot": _execute_without_plots,
    "deepspeed.autotuning.autotuner": _execute_without_mlflow,
    "deepspeed.runtime.zero.muon.original_muon": _execute_compiling_late,
}


def watch_timm() -> None:
    """Put our names into timm's registry, at once if timm is there, else when it comes; and keep the others out."""
    sys.meta_path.insert(0, _Finder())
    if getattr(getattr(sys.modules.get("timm"), "__spec__", None), "_initializing", True) is False:
        import_module(_REGISTRY)
