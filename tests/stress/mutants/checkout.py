"""Copies of the project to break, each with compiled code and a process for its tests of its own."""

import filecmp
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.conftest import ROOT
from widemix.files import try_lock

_LIMIT_S = 600  # of a test without a break
_IMPORTED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins of pytest, by the server


class Checkout:
    """A copy of the project below a folder, made or brought up to date; what was compiled there stays."""

    def __init__(self, folder: Path):
        self.folder, self.root, self._cache = folder, folder / "widemix", folder / "cache"
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        if try_lock(self._lock.fileno()) is False:
            sys.exit(f"error: {folder}: another run breaks the code there")
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        wanted = {name for name in names if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink())}
        for path in self.root.rglob("*"):
            own = path.relative_to(self.root).as_posix()
            if own not in wanted and (path.is_file() or path.is_symlink()) and not path.match("*.pyc"):
                path.unlink()
        for name in wanted:
            source, target = ROOT / name, self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                target.unlink(missing_ok=True)
                target.symlink_to(source.readlink())
            elif not target.exists() or not filecmp.cmp(source, target, shallow=False):
                shutil.copy2(source, target)
        self._cache.mkdir(exist_ok=True)
        self._server: subprocess.Popen[str] | None = None
        self.cpu_seconds = 0.0  # of the last tests; none of those that were killed
        self._passing: set[str] = set()  # tests that have passed here
        self._failing: list[str] = []  # those that do not pass without a break, which do not run from then on

    def run(
        self, tests: Sequence[str], environ: dict[str, str], seconds: float, options: Sequence[str] = ("-x", "--all")
    ) -> int | None:
        """Run tests in a fork of a process that has imported torch (server.py), by default until one fails.

        Returns pytest's exit code; None if it was killed after so many seconds.
        """
        if self._server is None:
            words = [sys.executable, str(Path(__file__).with_name("server.py"))]
            own = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": ""}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._server = subprocess.Popen(words, env=own, **pipes)  # type: ignore[call-overload]
        assert self._server is not None
        words = [*options, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *_IMPORTED]
        words += [*(f"--deselect={test}" for test in self._failing), *tests]
        log = self.folder / "log"  # of the last tests
        log.unlink(missing_ok=True)
        log.with_suffix(".tests").unlink(missing_ok=True)
        job = {"root": str(self.root), "words": words, "environ": environ, "seconds": seconds, "log": str(log)}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        code, self.cpu_seconds = json.loads(self._server.stdout.readline())
        return code

    def results(self) -> dict[str, str]:
        """How each of the last tests ended: passed, failed, or started where all were killed; none that were skipped.

        One that could not be collected is its file.
        """
        found: dict[str, str] = {}
        log = self.folder / "log.tests"
        for line in log.read_text().splitlines() if log.exists() else ():
            how, test = json.loads(line)
            if how != "passed" or found.get(test) == "started":
                found[test] = how
        self._passing |= {test for test, how in found.items() if how == "passed"}
        return {test: how for test, how in found.items() if how != "skipped"}

    def sound(self, tests: Sequence[str]) -> list[str]:
        """Those that pass here without a break; from then on, what does not is left out."""
        unknown = [test for test in tests if test not in self._passing]
        files = [test for test in unknown if "::" not in test]  # that could not be collected
        if files and self.run(files, self.environ(), _LIMIT_S, ("--collect-only",)) == 0:
            self._passing |= {*files}
        if cases := [test for test in unknown if test not in self._passing]:
            self.run(cases, self.environ(), _LIMIT_S, ("--all",))
            self.results()
        for test in unknown:
            if test not in self._passing:
                self._failing.append(test)
                print(f"fails without a break, left out from here on: {test}", flush=True)
        return [test for test in tests if test in self._passing]

    def environ(self, numba: Path | None = None) -> dict[str, str]:
        """What its tests have in their environment besides. numba: another folder for what numba compiles."""
        caches = {"NUMBA_CACHE_DIR": str(numba or self.folder / "numba"), "XDG_CACHE_HOME": str(self._cache)}
        return caches | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.root)}

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[dict[str, str]]:
        """Give a file another text for as long as this is open; yields `environ`."""
        path = self.root / file
        stat, before = path.stat(), path.read_bytes()
        numba = Path(tempfile.mkdtemp(dir=self._cache)) if is_compiled(file, self.root) else None
        try:
            path.write_text(text)
            # What Python has compiled of a file is that of any text with its size and second.
            os.utime(path, (random.getrandbits(31),) * 2)
            yield self.environ(numba)
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # what numba has compiled of it stays valid
            if numba:
                shutil.rmtree(numba)


def share(checkouts: Sequence[Checkout], items: Sequence[Any], action: Callable[[Any, Checkout], object]) -> None:
    """Do something with each item, in the checkout that is free first."""
    free: SimpleQueue[Checkout] = SimpleQueue()
    for checkout in checkouts:
        free.put(checkout)

    def one(item: Any) -> None:
        checkout = free.get()
        try:
            action(item, checkout)
        finally:
            free.put(checkout)

    with ThreadPoolExecutor(len(checkouts)) as pool:
        list(pool.map(one, items))


def is_compiled(file: str, root: Path) -> bool:
    """Whether numba compiles a file, or names what it keeps after a hash that the file is part of."""
    return file.startswith("pipeline/data/") or "@jit" in (root / file).read_text()
