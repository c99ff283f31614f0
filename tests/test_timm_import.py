"""What is imported when: wandb, MLflow and torch.compile when used, not before; nothing heavy with widemix."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

import pytest

from tests.clone import CLONE, ROOT
from widemix import timm_import

NEEDS_WANDB = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
KILLED = """
import os, signal, sys
import widemix.bench, widemix.trainer, widemix.analysis, widemix
import timm.optim, timm.utils
assert "wandb" not in sys.modules
os.kill(os.getpid(), signal.SIGKILL)
"""
USED = """
import widemix.models, timm, timm.utils.summary
print(timm.utils.summary.wandb.__version__)
import wandb
print(wandb.__version__)
"""


def run(code: str, folder) -> subprocess.CompletedProcess:
    environ = os.environ | {"TMPDIR": str(folder)}
    return subprocess.run([sys.executable, "-c", code], cwd=CLONE, env=environ, capture_output=True, text=True)


def test_widemix_alone_imports_next_to_nothing():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import widemix; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert not {"typing", "importlib.abc", "importlib.util", "inspect", "numpy", "torch"} & set(done.stdout.split())


@pytest.mark.long
@NEEDS_WANDB
def test_a_killed_process_that_used_timm_leaves_nothing_of_it(tmp_path):
    done = run(KILLED, tmp_path)
    assert done.returncode == -9, done.stderr
    assert not list(tmp_path.glob("*wandb*"))


@pytest.mark.long
@NEEDS_WANDB
def test_timm_has_it_when_it_uses_it(tmp_path):
    done = run(USED, tmp_path)
    assert done.stdout.split() == [version("wandb")] * 2, done.stderr


NOT_COMPILED = """
import sys
import widemix.trainer, widemix.evaluation.assessment, widemix.evaluation.predict, widemix.cli.options
import timm, torch, torchvision.ops
needless = {"torch._dynamo", "torch.distributed.tensor", "sklearn", "tensorboard", "deepspeed", "scipy.signal"}
assert not needless & sys.modules.keys(), "imported without need"
import scipy.signal
print(*scipy.signal.convolve([1, 2], [3, 4]))
boxes, features = torch.tensor([[0.0, 0.0, 0.0, 4.0, 4.0]]), torch.arange(64.0).reshape(1, 1, 8, 8)
print(torchvision.ops.roi_align(features, boxes, 1).item())
from torchvision.ops.roi_align import is_compile_supported
import torch._dynamo
assert is_compile_supported("cpu") == torch._dynamo.utils.is_compile_supported("cpu")
from timm.layers import disable_compiler
print(*torch.compile(disable_compiler(lambda x: x + torch.compiler.is_compiling()), backend="eager")(torch.zeros(2)))
"""


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("wandb", timm_import._execute_without_wandb),
        ("mlflow", timm_import._execute_without_mlflow),
        ("torch._dynamo.utils", timm_import._execute_without_dynamo),
        ("scipy.signal", timm_import._execute_without_signals),
        ("matplotlib", timm_import._execute_without_plots),
    ],
)
def test_what_is_imported_already_is_not_left_out(name, change, monkeypatch):
    monkeypatch.setitem(sys.modules, name, there := ModuleType(name))
    for part in [part for part in sys.modules if part.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, part)
    module = ModuleType("module")
    change(lambda module: module.__dict__.update(found=sys.modules[name]), module)
    assert sys.modules[name] is there
    assert {key: value for key, value in vars(module).items() if key[0] != "_"} == {"found": there}


ASKED = """
import inspect, sys
from widemix import timm_import
def execute(module):
    import scipy.signal
    assert hasattr(scipy.signal, "hamming")
    inspect.getmodule(compile("", "nowhere", "exec"))
    assert "scipy.signal.windows" not in sys.modules
    from scipy.signal import convolve, windows
    import scipy.signal.windows
    print(*convolve([1, 2], [3, 4]), windows is scipy.signal.windows)
timm_import._CHANGES["torchmetrics"](execute, None)
print("scipy.signal" in sys.modules)
"""


def test_who_asks_for_what_is_left_out_gets_it(tmp_path):
    """torchmetrics imports librosa where that is installed, which imports from scipy.signal."""
    assert run(ASKED, tmp_path).stdout.split() == ["3", "10", "8", "True", "True"]


@pytest.mark.long
def test_training_and_evaluation_import_nothing_without_need(tmp_path):
    """What timm and torchvision compile with is a third of `import timm`; what they take it for works as before."""
    done = run(NOT_COMPILED, tmp_path)
    assert done.stdout.split("\n")[:-1] == ["3 10 8", "18.0", "tensor(0.) tensor(0.)"], done.stderr


DEEPSPEED = """
import sys
import widemix, deepspeed.runtime.zero.muon.muon_optimizer
from deepspeed.autotuning import autotuner
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.muon import original_muon
assert not {"mlflow", "torch._dynamo", "torch._inductor"} & sys.modules.keys(), "imported without need"
import torch
assert compiler.compile() is torch.compile
print(autotuner.has_mlflow, autotuner.has_mlflow and callable(autotuner.mlflow.start_run))
"""


@pytest.mark.long
def test_deepspeed_brings_no_code_generator_and_no_tracker(tmp_path):
    """Each takes two seconds of a rank's start."""
    done = run(DEEPSPEED, tmp_path)
    assert done.stdout.split()[-2:] == [str(find_spec("mlflow") is not None)] * 2, done.stderr


def test_decorated_functions_are_compiled_once_when_called(monkeypatch):
    compiled = []
    package = ModuleType("deepspeed.runtime.compiler")
    package.compile = lambda: lambda function: compiled.append(function) or (lambda *words, **named: (words, named))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    own, module = package.compile, ModuleType("muon")

    def execute(module):
        @package.compile()
        def update():
            """Its own."""

        module.update = update

    timm_import._execute_compiling_late(execute, module)
    assert package.compile is own
    assert not compiled
    assert module.update.__doc__ == "Its own."
    assert [module.update(1, steps=2), module.update(3)] == [((1,), {"steps": 2}), ((3,), {})]
    assert compiled == [module.update.__wrapped__]


PLOTTED = """
import sys
import widemix, torch, torchmetrics
assert "matplotlib" not in sys.modules
metric = torchmetrics.MeanMetric()
metric.update(torch.ones(2))
import matplotlib.pyplot as plt
plt.style.use("dark_background")
figure, axes = metric.plot()
assert isinstance(figure, plt.Figure), figure
print(figure.get_facecolor(), plt.rcParams["figure.facecolor"])
"""


@pytest.mark.long
def test_metrics_have_their_own_style_of_plots(tmp_path):
    done = run(PLOTTED, tmp_path)
    assert done.stdout.strip() == "(1.0, 1.0, 1.0, 1.0) black", done.stderr


@pytest.mark.parametrize("line", ["import matplotlib.figure", "from matplotlib.pyplot import subplots"])
def test_a_release_that_needs_more_of_matplotlib_gets_it(line, tmp_path, monkeypatch):
    package = tmp_path / "matplotlib"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("figure", "pyplot"):
        (package / f"{name}.py").write_text("subplots = 'its own'")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    module = ModuleType("plot")
    try:
        timm_import._execute_without_plots(lambda module: exec(line, module.__dict__), module)
        name = line.split()[1]
        assert sys.modules[name].subplots == "its own"
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            del sys.modules[name]
