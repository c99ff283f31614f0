"""Processors, compilers and caches that a test asks for."""

from pathlib import Path

import pytest


@pytest.fixture
def cpu(system):
    """A machine of this kind whose /proc/cpuinfo says so; None: it has no such file."""
    read, exists = Path.read_text, Path.exists

    def be(machine: str, info: str | None) -> None:
        is_info = lambda path: str(path) == "/proc/cpuinfo"  # noqa: E731
        system({"platform.machine": lambda: machine})
        system({"pathlib.Path.exists": lambda path: info is not None if is_info(path) else exists(path)})
        system({"pathlib.Path.read_text": lambda path, *of: info if is_info(path) else read(path, *of)})

    return be


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "widemix"


@pytest.fixture
def tiny(tmp_path) -> Path:
    """One function to compile, instead of all for seconds: what the code does is not looked at."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "tiny.c").write_text("int tiny(void) { return 1; }\n")
    return tmp_path / "sources"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A C compiler that is this script of a shell; by default it writes its words to a file, which is returned."""

    def make(script: str | None = None) -> Path:
        path, words = tmp_path / "compiler", tmp_path / "words"
        script = f'[ "$1" != --version ] || exit 0\necho "$@" > {words}' if script is None else script
        path.write_text(f"#!/bin/sh\n{script}\n" if script else "")
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        return words

    return make
