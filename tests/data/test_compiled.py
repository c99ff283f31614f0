"""numba's cache: complete for ranks that start at once, and not compiled again."""

import io
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from numba.core import event
from numba.core.dispatcher import Dispatcher

from tests.clone import CLONE, ROOT
from tests.data.loading import place, read
from widemix.api.compile_ahead import compile_ahead
from widemix.data.compiled import CompilationNotice, compilation_notice, numba_folder, run_on_threads
from widemix.data.decode import padded_boxes
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.native import compiled
from widemix.recipe import load_recipe

# Boxes without images: the compiled functions of others are kept in the same way.
BOXES = """
import numpy as np
from widemix.data.decode import padded_boxes
sides = np.full(9, 40)
print(padded_boxes(np.arange(9), sides, sides, 32, 4, 1, 2, 0.5).tolist())
"""


def start(program: str, folder: Path = CLONE, *words: str, **environ: str | None) -> subprocess.Popen:
    """A program in a Python of its own; a variable that is None is not set."""
    found = {name: value for name, value in (os.environ | environ).items() if value is not None}
    command = [sys.executable, "-c", textwrap.dedent(program), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=found, **pipes)


def output(process: subprocess.Popen) -> str:
    said, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    return said


@pytest.mark.long
def test_four_ranks_start_at_once_and_the_next_compiles_nothing(tmp_path):
    (tmp_path / "widemix").mkdir()
    shutil.copy(compiled(), tmp_path / "widemix")  # whose building has a test of its own
    start_one = lambda: start(BOXES, NUMBA_CACHE_DIR=None, XDG_CACHE_HOME=str(tmp_path))  # noqa: E731
    files = lambda: {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}  # noqa: E731
    [boxes] = {output(rank) for rank in [start_one() for _ in range(4)]}
    before = files()
    assert {"padded_boxes", "key", "uniform"} <= {path.name.split("-")[0].split(".")[-1] for path in before}
    assert output(start_one()) == boxes
    assert files() == before


def test_a_file_in_the_current_folder_does_not_set_numba(tmp_path):
    """Code could be planted in the cache that it names, also by changing it while a command runs."""
    program = """
        import pathlib
        import numba, widemix.data.compiled
        pathlib.Path(".numba_config.yaml").write_text("{cache_dir: cache, disable_jit: 1}")
        numba.njit(lambda x: x + 1.5)(2)  # numba reads its settings again when it compiles
        print(numba.config.DISABLE_JIT, numba.config.CACHE_DIR != "cache")
    """
    (tmp_path / ".numba_config.yaml").write_text("{cache_dir: other, disable_jit: 1}")
    assert output(start(program, tmp_path, NUMBA_CACHE_DIR=None)) == "0 True\n"
    assert [path.name for path in tmp_path.iterdir()] == [".numba_config.yaml"]


def test_another_constant_version_or_library_has_another_folder(tmp_path, monkeypatch, system):
    """After an update in NUMBA_CACHE_DIR old code ran: numba does not see that a file has changed that it imports."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache/numba"))
    folder = numba_folder(ROOT / "pipeline/data", True)
    assert folder.is_dir()
    assert folder.parent == tmp_path / "cache/numba"
    copy = shutil.copytree(ROOT / "pipeline/data", tmp_path / "data", ignore=shutil.ignore_patterns("__pycache__"))
    found = [numba_folder(copy, True), numba_folder(copy, False)]
    constants = copy / "augment/registry.py"
    constants.write_text(constants.read_text().replace("LINEAR = 1", "LINEAR = 7"))
    found.append(numba_folder(copy, True))
    system({"numba.__version__": "0.1"})
    found.append(numba_folder(copy, True))
    assert found[0] == folder
    assert len(set(found)) == 4


def test_the_users_cache_is_taken_where_none_can_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert numba_folder(ROOT / "pipeline/data", True) == tmp_path / "file"  # in whose place numba takes another
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    assert numba_folder(ROOT / "pipeline/data", True).parent == tmp_path / "widemix"


def of(module: str) -> SimpleNamespace:
    return SimpleNamespace(py_func=SimpleNamespace(__module__=module))


@pytest.mark.parametrize(
    ("function", "rank", "after", "announced"),
    [
        (padded_boxes, "0", 0.0, True),
        (padded_boxes, "0", 60.0, False),  # what takes a moment
        (of("widemix.a"), "1", 0.0, False),
        (of("b"), "0", 0.0, False),
        (of("widemixed.a"), "0", 0.0, False),
    ],
)
def test_long_compilation_is_announced_once(function, rank, after, announced, monkeypatch):
    """By the first rank, of our functions, in the midst of which others are compiled."""
    monkeypatch.setenv("RANK", rank)
    notice, before = CompilationNotice(after), set(threading.enumerate())
    begin = event.Event("numba:compile", event.EventStatus.START, {"dispatcher": function})
    end = event.Event("numba:compile", event.EventStatus.END, begin.data)
    deadline, said = time.monotonic() + 60, io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    for number in range(2):
        notice.on_start(begin)
        timers = set(threading.enumerate()) - before
        assert all(timer.daemon for timer in timers)  # a process that has ended does not wait to say it
        assert len(timers) == (after > 0) or not after
        while announced and number == 0 and not said.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(2):
            notice.on_start(begin)
            notice.on_end(end)
            assert after == 0 or timers <= set(threading.enumerate())  # what is compiled within does not end it
        notice.on_end(end)
        for timer in timers:
            timer.join(timeout=60)  # it won't say so later either
        assert set(threading.enumerate()) <= before
    assert said.getvalue().count("compiling the functions that prepare these batches") == announced


def test_the_announcement_says_where_nothing_is_kept(tmp_path, monkeypatch):
    """Not "once": another augmentation has functions of its own, which are compiled at its first batch."""
    (tmp_path / "file").touch()
    often = "in each run, as there is no cache folder that is this user's alone (XDG_CACHE_HOME names one)"
    for home, given, words in (
        (tmp_path, "", "which are kept for later runs"),
        (tmp_path / "file", "", often),
        (tmp_path / "file", str(tmp_path), "which are kept for later runs"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        monkeypatch.setenv("NUMBA_CACHE_DIR", given)
        assert f"these batches, {words}; 5 to 40 seconds" in compilation_notice()


@pytest.mark.long
def test_the_first_plain_batch_compiles_no_texts_of_errors(digits, tmp_path):
    """An expression or assignment of whole arrays takes numba five seconds: it compiles the text of its error."""
    program = """
        import sys
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
    names = output(start(program, CLONE, str(digits), NUMBA_CACHE_DIR=str(tmp_path))).split()
    assert "shuffled" in names
    assert [name for name in names if "shape_context" in name] == []


def functions() -> list[Dispatcher]:
    """The compiled functions of ours, in this process."""
    modules = [module for name, module in sys.modules.items() if name.startswith("widemix.data.")]
    held = {id(value): value for module in modules for value in vars(module).values()}
    return [value for value in held.values() if isinstance(value, Dispatcher)]


def test_functions_leave_other_threads_alone_and_round_as_written():
    assert len(functions()) > 50
    for function in functions():
        options = function.targetoptions
        assert (options["nogil"], options["error_model"], options.get("fastmath", False)) == (True, "numpy", False)
        assert function.stats.cache_path  # it is kept


def test_what_set_up_compiles_is_all_that_a_run_needs(digits):
    signatures = lambda: {(each.py_func.__module__, each.__name__): len(each.signatures) for each in functions()}  # noqa: E731
    compile_ahead()
    before = signatures()
    assert any(before.values())
    for policy in (None, "rand-m7", "original"):
        augment = [("augment.re_prob", "0.5"), *([("augment.auto_augment", policy)] if policy else [])]
        recipe = load_recipe("digits/mixer", [("data.path", str(digits)), ("data.workers", "1"), *augment])
        with TrainLoader(recipe.data, recipe.augment, recipe.train, place()).batches(0) as batches:
            next(batches)
        read(EvalLoader(recipe.data, 400, place()))
    assert signatures() == before


@pytest.mark.parametrize("way", ["by the link", "as installed"])
def test_modules_have_one_path_however_the_package_is_found(way):
    """Else the command `widemix` does not find what set-up has compiled: in a clone the package is a link too."""
    program = "import widemix.errors; print(widemix.errors.__file__)"
    if way == "by the link":
        found = start(program, ROOT)
    else:
        found = start(program, Path("/"), PYTHONPATH=str(ROOT / "pipeline" / ".."))
    assert output(found) == f"{ROOT.resolve()}/pipeline/errors.py\n"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_share_runs_in_parallel(threads):
    meet, seen = threading.Barrier(threads, timeout=300), []

    def work(k: int, of: int) -> None:
        meet.wait()  # all parts must be running
        seen.append((k, of))

    run_on_threads(work, threads)
    assert sorted(seen) == [(k, threads) for k in range(threads)]


def test_an_exception_of_any_share_is_raised():
    def work(k: int, of: int) -> None:
        if k == 2:
            raise OSError("the third part")

    with pytest.raises(OSError, match="the third part"):
        run_on_threads(work, 3)
