"""The C part's build on its own: once, whole, in a folder that several machines and ranks may share."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from widemix.native import BuildError, build, compiled
from widemix.native.build import cache_folder, compile_library

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "widemix"


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> None:
    """One function to compile, instead of all for seconds: what the code does is not looked at."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "tiny.c").write_text("int tiny(void) { return 1; }\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "sources")


def start(home: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "widemix.native"],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(home.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
def test_processes_that_start_at_once_share_one_build(home):
    ranks = [start(home) for _ in range(4)]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, outputs
    assert len(set(outputs)) == 1
    assert outputs[0].startswith("built on libjpeg")
    assert len(list(home.iterdir())) == 1  # nothing half-made is left


def test_what_is_there_is_not_built_again(home, tiny):
    path = compiled()
    before = path.stat().st_mtime_ns
    assert compiled() == path
    assert path.stat().st_mtime_ns == before


def test_a_change_of_any_source_gets_a_build_of_its_own(home, tiny):
    header, source = build.SOURCES / "tiny.h", build.SOURCES / "tiny.c"
    header.write_text("#define ONE 1\n")
    paths = [build.planned()]
    header.write_text("#define ONE 2\n")
    paths.append(build.planned())
    source.write_text("int tiny(void) { return 2; }\n")
    assert len({*paths, build.planned()}) == 3


def test_without_a_compiler_an_earlier_build_does(home, tiny, monkeypatch, tmp_path):
    path = compiled()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled() == path
    path.unlink()
    with pytest.raises(BuildError, match="there is no C compiler"):
        compiled()


def test_another_processor_or_compiler_gets_a_build_of_its_own(home, tiny, monkeypatch, tmp_path):
    first = compiled()
    monkeypatch.setattr("widemix.native.build.processor", lambda: "flags : another")
    second = compiled()
    compiler = tmp_path / "newer"
    compiler.write_text('#!/bin/sh\n[ "$1" != --version ] || { echo newer; exit; }\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert len({first, second, compiled()}) == 3


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_have_no_complaint(compiler, home, monkeypatch):
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr("widemix.native.build._FLAGS", (*build._FLAGS, "-Werror"))
    assert ctypes.CDLL(str(compiled())).mixer_block


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_make_vectors_of_avx2(compiler, tmp_path):
    """And no calls of functions for single numbers."""
    if not shutil.which(compiler) or platform.machine() != "x86_64":
        pytest.skip(f"{compiler} for x86-64 is not installed")
    source = build.SOURCES / "mixer_block.c"
    written = tmp_path / "mixer_block.s"
    subprocess.run([compiler, *build._FLAGS, "-march=x86-64-v3", "-S", "-o", written, source], check=True)
    text = written.read_text()
    for function in ("multiply", "add_weight_gradient", "norm_backward", "compute_shares"):
        code = re.findall(rf"^{function}(?:\.\w+)*:(.*?)\.size\s", text, re.DOTALL | re.MULTILINE)
        assert code, function
        bad = [each for each in code if each.count("%ymm") <= 30 or re.search("call.*(sqrt|exp|fma)", each)]
        assert not bad, function


def test_a_compiler_that_fails_leaves_nothing_and_says_why(home, monkeypatch, tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" != --version ] || exit 0\necho "x.c:1: fatal error: jpeglib.h: No" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(BuildError, match=r"fatal error: jpeglib.h: No; apt-get install libjpeg-dev"):
        compiled()
    assert not list(home.iterdir())


def test_a_compiler_that_is_no_program_is_named(home, monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(BuildError, match=rf"^{compiler} does not run \(\[Errno \d+\] Exec format error"):
        compiled()


def test_a_compiler_that_is_not_done_in_time_is_named(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    with pytest.raises(BuildError, match=rf"^{compiler} was not done in 0.05 s$"):
        compile_library([str(compiler)], tmp_path / "target.so", timeout=0.05)
    assert list(tmp_path.iterdir()) == [compiler]


def test_a_user_without_a_home_has_a_temporary_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a container's user that has no line in /etc/passwd
    assert cache_folder().name.startswith("widemix-")
