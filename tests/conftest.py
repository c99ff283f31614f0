"""Prepared data and runs of the real command, shared by the tests."""

import atexit
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.clone import CLONE, ROOT

# Before torch is imported: threads of several processes on the same CPUs burn their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Of what is started here; removed at the end, with what ranks leave there that play several nodes.
os.environ["TMPDIR"] = tempfile.mkdtemp(dir=CLONE)
# As a command that runs in this process leaves it, whichever tests come first; what is started here finds `tests`.
os.environ["PYTHONSAFEPATH"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

import torch

from tests.forks import Forks, group_of
from widemix.cli.commands import run_command, tune_garbage_collector
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings

pytest_plugins = ["tests.selection"]
THREADS = torch.get_num_threads()
SMALL = ("--model.depth", "2", "--log.every", "1", "--log.tensorboard", "false", "--data.workers", "1")

# No property may fail because the machine is slow.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Files of 20 s and more.
LONGEST = {"test_train", "test_keys", "test_memory", "test_golden", "test_estimate", "test_docs", "test_states"}
LONGEST |= {"test_engines", "test_runner", "test_setup", "test_processes", "test_coefficients", "test_extensions"}

# What sees GPUs: `make stress WHAT=gpu`. The other tests start more ranks than most machines have GPUs.
ON_GPUS = [
    ROOT / "tests" / name
    for name in (
        "gpu",
        "models/test_batch_last_triton.py",
        "data/test_normalise_and_mix.py",
        "data/test_batches.py",
    )
]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import the tests without looking for garbage, and leave what they import out of later searches.

    These are a million objects: to search them takes 0.4 s, and DeepSpeed asks for it six times an engine in bf16.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        tune_garbage_collector()
        atexit.register(gc.unfreeze)  # so that all is freed at the end: Triton complains of what is not


def pytest_configure(config) -> None:
    hide_gpus(config.args, os.environ)


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") == "no":  # else its processes would take that for the project's root
        os.chdir(CLONE)


def hide_gpus(arguments: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Hide GPUs from this process and what it starts, unless pytest is asked for tests of `ON_GPUS` alone."""
    paths = [(ROOT / argument.partition("::")[0]).resolve() for argument in arguments]
    if not all(any(path.is_relative_to(seeing) for seeing in ON_GPUS) for path in paths):
        environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Undo what a command that sets torch's threads leaves: two that wait for each other slow all later tests."""
    torch.set_num_threads(THREADS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several processes: begin with the longest files, so that none is left to one of them at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--worlds", type=int, default=1, help="random worlds of tests/end_to_end/test_worlds.py (default: 1)"
    )
    parser.addoption("--regenerate", action="store_true", help="write transcripts anew: look at what has changed")


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """The prepared digits."""
    folder = tmp_path_factory.mktemp("digits")
    prepare("digits", None, folder, PrepSettings())
    return folder


class System:
    """What the operating system and other packages answer in a test: `system({"os.cpu_count": lambda: 8})`.

    Nothing of ours: a test that replaces a part of widemix holds how it is written, and not what it does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch

    def __call__(self, answers: Mapping[str, object]) -> None:
        for name, answer in answers.items():
            assert not name.startswith("widemix"), name
            self._monkeypatch.setattr(name, answer)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


class Command:
    """`widemix` in a process of its own, as a user runs it."""

    def __init__(self, *words: str | Path, module: str = "widemix", env: dict[str, str] | None = None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words)],
            cwd=CLONE,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout: float = 600) -> tuple[int, str]:
        """Exit code and output."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.process.returncode, output

    def wait_for_step(self, run: Path, step: int, timeout: float = 300) -> None:
        deadline = time.monotonic() + timeout
        while not any(line["step"] >= step for line in train_lines(run)):
            assert self.is_running(), self.wait()[1]
            assert time.monotonic() < deadline, "no such step was reached"
            time.sleep(0.01)

    def is_running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to every process of it at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


class Fork(Command):
    """The same in forks of a process that has imported everything, which saves seconds: see `tests.forks`.

    So are the ranks of a `widemix train --ranks`.

    With a `world` it is so many ranks of `python -m widemix train`, as a launcher would start them. fault: see
    `tests.faults.faulty`.
    """

    def __init__(self, *words: str | Path, log: Path, world: int = 0, fault: str = "none"):
        from tests.faults.faulty import train_with, widemix_with  # which imports torch

        target, environs = (train_with, group_of(world)) if world else (widemix_with, [{}])
        self.forks = Forks(target, fault, *map(str, words), log=log, environs=environs)

    def wait(self, timeout: float = 600) -> tuple[int, str]:
        codes, output = self.forks.wait(timeout)
        return next((code for code in codes if code), 0), output

    def is_running(self) -> bool:
        self.forks.reap()
        return bool(self.forks.running)

    def signal(self, number: int) -> None:
        self.forks.signal(number)

    def kill(self) -> None:
        self.forks.kill()
        self.forks.wait()


def train_lines(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["split"] == "train"]


@pytest.fixture
def train(digits, tmp_path):
    """Start `widemix train` on the digits with a small model: train(run, options...) -> Command.

    As a fork, and its ranks too; with `world` as so many ranks; as a user does, in a Python of its own, with `real`
    set, where alone it sees GPUs. fault: see `tests.faults.faulty`; of a fork and its ranks.
    """
    logs = (tmp_path / f"{number}.log" for number in itertools.count())

    def start(run: str, *options: str, recipe="recipes/digits/rp_mixer.yaml", world=0, real=False, fault="none"):
        words = (recipe, "--data.path", digits, "--run-dir", tmp_path / run, *SMALL, *options)
        if real:
            return Command("train", *words)
        return Fork(*(words if world else ("train", *words)), log=next(logs), world=world, fault=fault)

    return start


@pytest.fixture
def widemix(capsys) -> Callable[..., tuple[int, str]]:
    """widemix(words...) -> exit code and output of a command, in this process."""
    from widemix.cli.parser import make_parser

    def answer(*words: object) -> tuple[int, str]:
        code = run_command(make_parser(), None, [*map(str, words)])
        output = capsys.readouterr()
        return code, output.out + output.err

    return answer
