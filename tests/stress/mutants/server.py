"""`python server.py` runs pytest in forks of itself, which has imported torch and its like: that saves seconds each.

A line of stdin is a job as JSON: `root`, `words` of pytest, `environ`, `seconds`. A line of stdout is how it ended:
pytest's exit code, or null after so many seconds, which kill it with all that it has started.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import warnings

# Nothing of ours, which may be broken, nor numba, which reads its environment when it is imported.
LIBRARIES = ("torch", "torch.distributed", "torchvision", "timm", "torchmetrics.classification", "sklearn.metrics")
LIBRARIES += ("scipy.stats", "matplotlib.pyplot", "pydantic", "yaml", "PIL.Image", "hypothesis", "pytest", "rich")


def run_pytest(root: str, words: list[str], environ: dict[str, str]) -> None:
    """In the fork; does not return."""
    code = 3  # pytest's for an error of its own
    try:
        os.setsid()
        os.chdir(root)
        os.environ.update(environ)
        sys.path[:] = [root, *(place for place in sys.path[1:])]
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silent, stream)
        code = int(importlib.import_module("pytest").main(words))
    finally:
        os._exit(code)


def wait(process: int, seconds: float) -> int | None:
    """The exit code; None if it was killed, or ended by a signal."""
    deadline, code = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if code is None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)
    return code


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            run_pytest(job["root"], job["words"], job["environ"])
        print(json.dumps(wait(process, job["seconds"])), flush=True)
