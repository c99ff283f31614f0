"""numba's cache: complete for ranks that start at once, and not compiled again."""

import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from numba.core import event
from numba.core.dispatcher import Dispatcher

import widemix.data.compiled
from tests.clone import CLONE, ROOT
from widemix.api.compile_ahead import compile_ahead
from widemix.data.compiled import _Notice, _notice, native_symbol, optional_symbol
from widemix.data.decode import padded_boxes
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.distributed.topology import Topology
from widemix.native import compiled
from widemix.recipe import load_recipe

# Boxes without images: the compiled functions of others are kept in the same way.
SCRIPT = """
import numpy as np
from widemix.data.decode import padded_boxes
sides = np.full(9, 40)
print(padded_boxes(np.arange(9), sides, sides, 32, 4, 1, 2, 0.5).tolist())
"""


def start(cache: Path) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=CLONE,
        env=environment | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def files(cache: Path) -> dict[Path, tuple[int, int]]:
    """The files of the cache, each with its time and size."""
    found = (path for path in cache.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


@pytest.mark.long
def test_four_ranks_start_at_once_and_the_next_compiles_nothing(tmp_path):
    (tmp_path / "widemix").mkdir()
    shutil.copy(compiled(), tmp_path / "widemix")  # whose building has a test of its own
    ranks = [start(tmp_path) for _ in range(4)]
    outputs, errors = zip(*(rank.communicate(timeout=600) for rank in ranks), strict=True)
    assert [rank.returncode for rank in ranks] == [0] * 4, errors
    assert len(set(outputs)) == 1
    before = files(tmp_path)
    assert {"padded_boxes", "key", "uniform"} <= {path.name.split("-")[0].split(".")[-1] for path in before}
    later = start(tmp_path)
    assert later.communicate(timeout=600)[0] == outputs[0]
    assert files(tmp_path) == before


def test_a_file_in_the_current_folder_does_not_set_numba(tmp_path):
    """Code could be planted in the cache that it names, also by changing it while a command runs."""
    script = """
        import os, pathlib
        os.environ.pop("NUMBA_CACHE_DIR", None)
        import numba, widemix.data.compiled
        pathlib.Path(".numba_config.yaml").write_text("{cache_dir: cache, disable_jit: 1}")
        numba.njit(lambda x: x + 1.5)(2)  # numba reads its settings again when it compiles
        print(numba.config.DISABLE_JIT, numba.config.CACHE_DIR != "cache")
    """
    (tmp_path / ".numba_config.yaml").write_text("{cache_dir: other, disable_jit: 1}")
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "0 True\n"
    assert [path.name for path in tmp_path.iterdir()] == [".numba_config.yaml"]


def test_another_constant_has_another_folder_in_the_users_too(tmp_path, monkeypatch):
    """After an update in NUMBA_CACHE_DIR old code ran: numba does not see that a file has changed that it imports."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache/numba"))
    before = widemix.data.compiled._cache_folder()
    assert before.is_dir()
    assert before.parent == tmp_path / "cache/numba"
    copy = shutil.copytree(ROOT / "pipeline/data", tmp_path / "data", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(widemix.data.compiled, "__file__", str(copy / "compiled.py"))
    assert widemix.data.compiled._cache_folder() == before
    with monkeypatch.context() as patch:  # without the C library, which the code calls
        patch.setattr(widemix.data.compiled.native, "load", lambda: None)
        assert widemix.data.compiled._cache_folder() != before
    with monkeypatch.context() as patch:
        patch.setattr(widemix.data.compiled.numba, "__version__", "0.1")
        assert widemix.data.compiled._cache_folder() != before
    constants = copy / "augment/registry.py"
    constants.write_text(constants.read_text().replace("LINEAR = 1", "LINEAR = 7"))
    assert widemix.data.compiled._cache_folder() != before
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert widemix.data.compiled._cache_folder() == tmp_path / "file"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    assert widemix.data.compiled._cache_folder().parent == tmp_path / "widemix"


def test_without_the_library_its_functions_are_none_or_do_nothing(monkeypatch):
    monkeypatch.setattr(widemix.data.compiled.native, "load", lambda: None)
    assert native_symbol("sum_luma", None) is None
    assert optional_symbol("sum_luma", None).py_func(1, 2) is False


def test_long_compilation_is_announced_once(capsys):
    """Of our functions, in the midst of which others are compiled; none of what takes a moment."""
    begin = event.Event("numba:compile", event.EventStatus.START, {"dispatcher": padded_boxes})
    end = event.Event("numba:compile", event.EventStatus.END, begin.data)
    short, long = _Notice(after=60.0), _Notice(after=0.0)
    for number in range(2):
        for notice in (short, long):
            notice.on_start(begin)
            notice.on_start(begin)
        timer, deadline = short._timer, time.monotonic() + 60
        while number == 0 and not long._timer.finished.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)
        for notice in (short, long):
            notice.on_end(end)
            notice.on_end(end)
        assert timer.finished.is_set()  # it won't say so later either
    assert short._timer is None
    assert capsys.readouterr().err.count("compiling the functions that prepare these batches") == 1


def test_what_is_compiled_within_another_function_does_not_end_it():
    begin = event.Event("numba:compile", event.EventStatus.START, {"dispatcher": padded_boxes})
    end = event.Event("numba:compile", event.EventStatus.END, begin.data)
    notice = _Notice(after=60.0)
    notice.on_start(begin)
    timer = notice._timer
    for _ in range(2):
        notice.on_start(begin)
        notice.on_end(end)
        assert not timer.finished.is_set()
    notice.on_end(end)
    assert timer.finished.is_set()


@pytest.mark.parametrize(
    ("module", "rank", "announced"),
    [("widemix.a", "0", 1), ("widemix.a", "1", 0), ("b", "0", 0), ("widemixed.a", "0", 0)],
)
def test_the_first_rank_announces_the_compilation_of_our_functions(module, rank, announced, monkeypatch):
    begun = []
    timer = SimpleNamespace(start=lambda: begun.append(module))
    monkeypatch.setattr(widemix.data.compiled, "Timer", lambda *_: timer)
    monkeypatch.setenv("RANK", rank)
    function = SimpleNamespace(py_func=SimpleNamespace(__module__=module))
    _Notice(after=2.0).on_start(event.Event("numba:compile", event.EventStatus.START, {"dispatcher": function}))
    assert len(begun) == announced
    assert getattr(timer, "daemon", False) == announced  # a process that has ended does not wait to say it


def test_the_announcement_says_where_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Not "once": another augmentation has functions of its own, which are compiled at its first batch.
    assert "these batches, which are kept for later runs" in _notice()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert (
        "in each run, as there is no cache folder that is this user's alone (XDG_CACHE_HOME names one)" in _notice()
    )
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert "these batches, which are kept for later runs" in _notice()


@pytest.mark.long
def test_the_first_plain_batch_compiles_no_texts_of_errors(digits, tmp_path):
    """An expression or assignment of whole arrays takes numba five seconds: it compiles the text of its error."""
    program = """
import sys
import textwrap
from numba.core import event
names = set()
class Listener(event.Listener):
    def on_start(self, event):
        names.add(event.data["dispatcher"].py_func.__qualname__.partition(".")[0])
    def on_end(self, event):
        pass
event.register("numba:compile", Listener())
import widemix
for settings in ({}, {"is_training": False}):
    next(iter(widemix.Loader(sys.argv[1], "train", 8, 32, device="cpu", num_workers=1, **settings)))
print(*names)
"""
    environ = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program, str(digits)]
    names = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.split()
    assert "shuffled" in names
    assert [name for name in names if "shape_context" in name] == []


def functions() -> list[Dispatcher]:
    """The compiled functions of ours, in this process."""
    modules = [module for name, module in sys.modules.items() if name.startswith("widemix.data.")]
    held = {id(value): value for module in modules for value in vars(module).values()}
    return [value for value in held.values() if isinstance(value, Dispatcher)]


def signatures() -> dict[str, int]:
    """How many signatures each of them has."""
    return {f"{each.py_func.__module__}.{each.py_func.__name__}": len(each.signatures) for each in functions()}


def test_functions_are_kept_leave_other_threads_alone_and_round_as_written():
    assert len(functions()) > 50
    for function in functions():
        options = function.targetoptions
        assert (options["nogil"], options["error_model"], options.get("fastmath", False)) == (True, "numpy", False)
        assert type(function._cache).__name__ == "FunctionCache"


def test_what_set_up_compiles_is_all_that_a_run_needs(digits):
    compile_ahead()
    before = signatures()
    assert before["widemix.data.augment.batch._run_policy"] == 1
    for policy in (None, "rand-m7", "original"):
        augment = [("augment.re_prob", "0.5"), *([("augment.auto_augment", policy)] if policy else [])]
        recipe = load_recipe("digits/mixer", [("data.path", str(digits)), ("data.workers", "1"), *augment])
        topology = Topology(0, 1, 0, 1, torch.device("cpu"))
        with TrainLoader(recipe.data, recipe.augment, recipe.train, topology).batches(epoch=0) as batches:
            next(batches)
        with EvalLoader(recipe.data, 4, topology).batches() as batches:
            next(batches)
    assert signatures() == before


def test_modules_have_one_path_however_the_package_is_found():
    """Else the command `widemix` does not find what set-up has compiled: in a clone the package is a link too."""
    script = "import widemix.errors; print(widemix.errors.__file__)"
    command, by_path = [sys.executable, "-c", script], os.environ | {"PYTHONPATH": str(ROOT / "pipeline" / "..")}
    for folder, env in ((ROOT, None), ("/", by_path)):  # by the link in this folder, or as it is installed
        found = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout
        assert found == f"{ROOT.resolve()}/pipeline/errors.py\n"
