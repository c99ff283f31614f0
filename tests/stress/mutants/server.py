"""`python server.py` runs pytest in forks of itself, which has imported torch and its like: that saves seconds each.

A line of stdin is a job as JSON: `root`, `words` of pytest, `environ`, `seconds`, `log`. A line of stdout is how it
ended: pytest's exit code, or null after so many seconds, which kill it with all that it has started; and the CPU
seconds that it took, with what it has waited for.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

# Nothing of ours, which may be broken.
LIBRARIES = ("torch._dynamo", "torch.distributed", "torchvision", "timm", "torchmetrics.classification", "numba")
LIBRARIES += ("deepspeed.runtime.zero.muon.muon_optimizer", "sklearn.metrics", "scipy.stats", "matplotlib.pyplot")
LIBRARIES += ("pydantic", "yaml", "PIL.Image", "hypothesis", "pytest", "rich", "tensorboard", "safetensors.torch")

TRACE: dict[str, object] = {"__name__": "sitecustomize"}


def run_pytest(root: str, words: list[str], environ: dict[str, str], log: str) -> None:
    """In the fork; does not return."""
    code = 3  # pytest's for an error of its own
    try:
        os.setsid()
        os.chdir(root)
        os.environ.update(environ)
        importlib.import_module("numba.core.config").reload_config()  # with where it keeps what it compiles
        sys.path[:] = [root, *(place for place in sys.path[1:])]
        for stream, path in enumerate((os.devnull, log, log)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), stream)
        if "WIDEMIX_TRACE" in environ:
            exec((Path(__file__).with_name("trace") / "sitecustomize.py").read_text(), TRACE)
        code = int(importlib.import_module("pytest").main(words, plugins=[Record(f"{log}.tests")]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Record:
    """A plugin of pytest: how tests end, each as it does so, since the process may be killed."""

    def __init__(self, path: str):
        self._output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _note(self, how: str, test: str) -> None:
        with contextlib.suppress(OSError):  # a test has closed it
            os.write(self._output, (json.dumps([how, test]) + "\n").encode())

    def pytest_runtest_logstart(self, nodeid):
        self._note("started", nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed or report.skipped or report.when == "teardown":
            self._note(report.outcome, report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self._note("failed", report.nodeid)


def wait(process: int, seconds: float) -> tuple[int | None, float]:
    """The exit code, None if it was killed or ended by a signal, and CPU seconds."""
    deadline, code, spent = time.monotonic() + seconds, None, 0.0
    while time.monotonic() < deadline:
        ended, status, usage = os.wait4(process, os.WNOHANG)
        if ended:
            code, spent = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if code is None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)
    return code, spent


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what libraries say
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            importlib.import_module(name)
    gc.freeze()  # what no job frees
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            run_pytest(job["root"], job["words"], job["environ"], job["log"])
        print(json.dumps(wait(process, job["seconds"])), file=answers, flush=True)
    os._exit(0)  # without what libraries say of what they have not freed
