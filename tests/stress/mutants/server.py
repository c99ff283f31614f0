"""`python server.py` runs pytest in forks of itself, which has imported torch and its like: that saves seconds each.

A line of stdin is a job as JSON: `root`, `words` of pytest, `environ`, `seconds`, `log`. A line of stdout is how it
ended: pytest's exit code, or null after so many seconds, which kill it with all that it has started; and the CPU
seconds that it took, with what it has waited for.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

# Nothing of ours, which may be broken, nor numba, which reads its environment when it is imported.
LIBRARIES = ("torch", "torch.distributed", "torchvision", "timm", "torchmetrics.classification", "sklearn.metrics")
LIBRARIES += ("scipy.stats", "matplotlib.pyplot", "pydantic", "yaml", "PIL.Image", "hypothesis", "pytest", "rich")

TRACE: dict[str, object] = {"__name__": "sitecustomize"}


def run_pytest(root: str, words: list[str], environ: dict[str, str], log: str) -> None:
    """In the fork; does not return."""
    code = 3  # pytest's for an error of its own
    try:
        os.setsid()
        os.chdir(root)
        os.environ.update(environ)
        if "WIDEMIX_TRACE" in environ:
            exec((Path(__file__).with_name("trace") / "sitecustomize.py").read_text(), TRACE)
        sys.path[:] = [root, *(place for place in sys.path[1:])]
        for stream, path in enumerate((os.devnull, log, log)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), stream)
        code = int(importlib.import_module("pytest").main(words))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            run_pytest(job["root"], job["words"], job["environ"], job["log"])
        print(json.dumps(wait(process, job["seconds"])), flush=True)
