"""Prepared data and runs of the real command, shared by the tests."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from data_prep.prepare import prepare
from data_prep.settings import PrepSettings

ROOT = Path(__file__).parents[1]
SMALL = ("--model.depth", "2", "--log.every", "1", "--log.tensorboard", "false", "--data.workers", "1")

# No property may fail because the machine is slow.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests stay in one process, which makes its fixtures once. So do all engines': DeepSpeed keeps the first
    process group that it meets."""
    engine = ROOT / "tests" / "engine"
    for item in items:
        item.add_marker(pytest.mark.xdist_group(str(engine if engine in item.path.parents else item.path)))


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """The prepared digits."""
    folder = tmp_path_factory.mktemp("digits")
    prepare("digits", None, folder, PrepSettings())
    return folder


class Command:
    """`widemix` in a process of its own, as a user runs it."""

    def __init__(self, *words: str | Path, module: str = "pipeline.cli", env: dict[str, str] | None = None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout: float = 180) -> tuple[int, str]:
        """Exit code and output."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.process.returncode, output

    def wait_for_step(self, run: Path, step: int, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not any(line["step"] >= step for line in train_lines(run)):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline, "no such step was reached"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to every process of it at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def train_lines(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["split"] == "train"]


@pytest.fixture
def train(digits, tmp_path):
    """Start `widemix train` on the digits with a small model: train(run, options...) -> Command."""

    def start(run: str, *options: str, recipe="recipes/digits/rp_mixer.yaml", **kwargs) -> Command:
        words = ("train", recipe, "--data.path", digits, "--run-dir", tmp_path / run, *SMALL, *options)
        return Command(*words, **kwargs)

    return start
