"""The C part's build on its own: once, whole, in a folder that several machines and ranks may share."""

import ctypes
import errno
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from widemix import engine
from widemix.native import BuildError, build, compiled, levels
from widemix.native.build import cache_folder, compile_library
from widemix.native.library import description, open_library
from widemix.recipe.train import TrainSection

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


def test_a_change_of_any_source_gets_a_build_of_its_own(home, tiny, monkeypatch):
    header, source = build.SOURCES / "tiny.h", build.SOURCES / "tiny.c"
    header.write_text("#define ONE 1\n")
    paths = [build.planned()]
    header.write_text("#define ONE 2\n")
    paths.append(build.planned())
    source.write_text("int tiny(void) { return 2; }\n")
    paths.append(build.planned())
    for lines in (1, 2):  # of the same four in turn, of which the second is in another file
        source.write_text("".join(["int a;\n", "int b;\n"][:lines]))
        header.write_text("".join(["int b;\n", "int c;\n"][lines - 1 :]))
        paths.append(build.planned())
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))  # or of the compiler's words
    assert len({*paths, build.planned()}) == 6


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
    found = [first, second, compiled()]
    compiler.write_text(compiler.read_text().replace("newer", "newest"))  # in the same place
    assert len({*found, build.planned()}) == 4


@pytest.fixture
def noting(tmp_path, monkeypatch) -> Path:
    """A compiler that writes its words to this file."""
    compiler, words = tmp_path / "cc", tmp_path / "words"
    compiler.write_text(f'#!/bin/sh\n[ "$1" != --version ] || exit 0\necho "$@" > {words}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    return words


@pytest.mark.parametrize(
    ("choice", "flags"), [("", "-march=native"), ("native", "-march=native"), ("v2", "-march=x86-64-v2")]
)
def test_the_compiler_is_told_the_machine_and_what_keeps_the_numbers(home, tiny, noting, choice, flags, monkeypatch):
    """In a clone, and also beside a wheel's libraries where this machine's own code is asked for."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(levels, "processor", lambda: "flags : cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3")
    monkeypatch.setenv("WIDEMIX_NATIVE", choice)
    if choice == "native":
        (build.SOURCES / "v2.so").touch()
    path = compiled()
    words = noting.read_text().split()
    assert [word for word in words if word.startswith("-m")] == [flags]
    assert {"-ffp-contract=off", "-shared", "-fPIC", "-Wl,-Bsymbolic", str(build.SOURCES / "tiny.c")} <= set(words)
    assert words[-3:] == ["-ljpeg", "-lpthread", "-lm"]
    assert path.parent == home


@pytest.mark.parametrize(
    ("machine", "flags"), [("x86_64", ["-march=native"]), ("aarch64", ["-mcpu=native"]), ("riscv64", [])]
)
def test_code_for_this_machine_alone_is_asked_for_in_its_own_words(machine, flags, home, tiny, noting, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: machine)
    compiled()
    assert [word for word in noting.read_text().split() if word.startswith("-m")] == flags


def test_each_level_has_a_build_of_its_own(home, tiny, noting, monkeypatch):
    names = set()
    for choice in ("native", *levels.runnable()):
        monkeypatch.setenv("WIDEMIX_NATIVE", choice)
        names.add(compiled())
    assert len(names) == 1 + len(levels.runnable())
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC")
    assert compiled() in names  # by its name alone
    monkeypatch.setattr("widemix.native.build.processor", lambda: "flags : another")
    monkeypatch.setenv("WIDEMIX_NATIVE", "native")
    with pytest.raises(BuildError, match="there is no C compiler"):
        compiled()


@pytest.mark.parametrize(("there", "taken"), [({"cc", "gcc"}, "cc"), ({"gcc", "clang"}, "gcc"), ({"clang"}, "clang")])
def test_the_compiler_is_the_systems_unless_another_is_named(tmp_path, monkeypatch, there, taken):
    for name in {*there, "mine"}:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build._compiler() == str(tmp_path / taken)
    monkeypatch.setenv("CC", "")
    assert build._compiler() == str(tmp_path / taken)
    monkeypatch.setenv("CC", "mine")
    assert build._compiler() == str(tmp_path / "mine")
    monkeypatch.setenv("CC", "none")
    assert build._compiler() == str(tmp_path / ("gcc" if "gcc" in there else "clang"))


def test_what_another_process_has_built_meanwhile_is_taken(home, tiny, noting, monkeypatch):
    """While it was waited for; on file systems without locks each builds its own."""
    path = build.planned()
    monkeypatch.setattr(build, "wait_for_lock", lambda _: path.touch())
    assert compiled() == path
    assert not noting.exists()
    path.unlink()
    descriptors = len(os.listdir("/proc/self/fd"))

    def no_locks(_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(build, "wait_for_lock", no_locks)
    assert compiled() == path
    assert noting.exists()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_the_module_says_what_was_built_or_why_nothing_was(monkeypatch, capsys):
    library = SimpleNamespace(jpeg_library=lambda: b"libjpeg-turbo 9")
    monkeypatch.setattr("widemix.native.library.open_library", lambda: library)
    runpy.run_module("widemix.native", run_name="__main__")
    assert capsys.readouterr().out == "built on libjpeg-turbo 9\n"

    def fails():
        raise BuildError("no compiler")

    monkeypatch.setattr("widemix.native.library.open_library", fails)
    with pytest.raises(SystemExit, match=r"^no compiler$"):
        runpy.run_module("widemix.native", run_name="__main__")


def test_the_code_in_use_is_the_packages_or_made_here(home, tiny, noting, monkeypatch):
    opened = SimpleNamespace(jpeg_library=lambda: b"libjpeg-turbo 9")
    monkeypatch.setattr("widemix.native.library.open_library", lambda: opened)
    monkeypatch.setattr("widemix.native.library.SOURCES", build.SOURCES)
    monkeypatch.setattr(levels, "runnable", lambda: {"v7": levels.Level((), frozenset())})
    monkeypatch.setattr(build, "runnable", levels.runnable)
    assert description() == "compiled code is made at its first use"
    build.planned().touch()
    assert description() == "compiled code: made on this machine, libjpeg-turbo 9"
    (build.SOURCES / "v7.so").touch()
    assert description() == "compiled code: v7 of the package, libjpeg-turbo 9"


def test_other_systems_have_no_compiled_code(home, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(BuildError, match=r"^compiled code is for Linux alone$"):
        compiled()


def test_a_library_that_does_not_load_is_a_reason(home, tiny, noting):
    open_library.cache_clear()
    path = compiled()
    path.write_text("no library")
    with pytest.raises(BuildError, match=rf"^{path.name} does not load \(.*"):
        open_library()
    assert description().startswith(f"no compiled code: {path.name} does not load")


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
    words = "In x.c:1:\nx.c:1: fatal error: jpeglib.h: No\nx.c:2: error: other"
    compiler.write_text(f'#!/bin/sh\n[ "$1" != --version ] || exit 0\necho "{words}" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        BuildError, match=r"broken failed: x\.c:1: fatal error: jpeglib\.h: No; apt-get install libjpeg-dev$"
    ):
        compiled()
    assert not list(home.iterdir())
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_library_appears_whole_or_not_at_all(home, tiny, noting, monkeypatch):
    """By a rename in its folder: another one may be of another file system."""

    def replace(source, target):
        assert Path(source).parent == Path(target).parent == home
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        compiled()
    assert not list(home.iterdir())


def test_a_library_is_linked_to_those_it_is_given(tiny, noting, tmp_path):
    compile_library([str(noting.with_name("cc"))], tmp_path / "target.so", "-g", libraries=["-lm", "-lz"])
    words = noting.read_text().split()
    assert "-g" in words
    assert [word for word in words if word.startswith("-l")] == ["-lm", "-lz"]


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


def test_an_error_that_names_nothing_is_its_exit_code(tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho warning: jpeg >&2\nexit 3\n")
    compiler.chmod(0o755)
    with pytest.raises(BuildError, match=rf"^{compiler} failed: exit code 3$"):
        compile_library([str(compiler)], tmp_path / "target.so")


def test_a_folder_that_may_not_be_written_to_is_replaced_by_a_temporary_one(home, monkeypatch):
    assert cache_folder() == home
    assert home.is_dir()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write everywhere
    assert build.home_cache() is None
    assert cache_folder() == cache_folder()
    assert cache_folder().name.startswith("widemix-")


OTHERS = [
    pytest.param(lambda path: path.chmod(0o777), id="writable by all"),
    pytest.param(
        lambda path: os.chown(path, 12345, -1),
        id="of another user",
        marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away"),
    ),
]
ABOVE = [
    pytest.param(lambda path: path.parent.chmod(0o777), id="in a folder writable by all"),
    pytest.param(
        lambda path: os.chown(path.parent, 12345, -1),
        id="in a folder of another user",
        marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away"),
    ),
    pytest.param(
        lambda path: os.chown(path.rename(path.with_name("kept")).parent, 12345, -1) or path.symlink_to("kept"),
        id="reached by a link of another user",
        marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away"),
    ),
]


@pytest.mark.parametrize("plant", OTHERS)
def test_no_library_runs_that_another_user_has_put_there(plant, home, tiny):
    path = compiled()
    path.write_bytes(b"another user's")
    plant(path)
    assert compiled() == path
    ctypes.CDLL(str(path)).tiny()  # compiled anew
    plant(home)
    assert build.home_cache() is None
    assert cache_folder().name.startswith("widemix-")


@pytest.mark.parametrize("plant", ABOVE)
def test_the_home_is_left_where_others_can_replace_what_is_in_it(plant, home):
    assert cache_folder() == home
    plant(home)
    assert build.home_cache() is None


@pytest.mark.parametrize("plant", OTHERS + ABOVE)
def test_nothing_runs_that_another_user_has_put_where_numba_keeps_code(plant, tmp_path):
    program = "import widemix.data.compiled, numba; print(numba.config.CACHE_DIR)"
    own = {"XDG_CACHE_HOME": f"{tmp_path}/home", "NUMBA_CACHE_DIR": f"{tmp_path}/disk", "WIDEMIX_NATIVE": "none"}

    def folder() -> Path:
        words = {"env": os.environ | own, "cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
        return Path(subprocess.run([sys.executable, "-c", program], check=True, timeout=60, **words).stdout.strip())

    kept = folder()
    assert kept.parent == tmp_path / "disk"
    plant(kept)
    assert folder().parent == tmp_path / "home/widemix"


@pytest.mark.parametrize("plant", OTHERS + ABOVE)
def test_nothing_runs_that_another_user_has_put_where_torch_compile_keeps_code(plant, home, monkeypatch, tmp_path):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    train = TrainSection(epochs=1, global_batch=1, compile=True)
    found = []
    for name in ("before", "after"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        engine.prepare(torch.nn.Linear(1, 1), train, torch.device("cpu"))
        found.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        if name == "before":
            assert found[0].parent == tmp_path / "disk"
            assert found[0].stat().st_mode & 0o777 == 0o700
            plant(found[0])
    assert found[1] == home / "inductor"


def test_a_folder_that_cannot_be_made_is_replaced_by_one_that_is_removed_at_the_end(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    registered: list[tuple] = []
    monkeypatch.setattr(build.atexit, "register", lambda *arguments: registered.append(arguments))
    build._temporary_folder.cache_clear()
    folder = cache_folder()
    build._temporary_folder.cache_clear()
    assert registered == [(build._remove, folder, os.getpid())]
    build._remove(folder, os.getpid())
    assert not folder.exists()


def test_without_its_variable_the_cache_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/widemix"


def test_the_temporary_folder_is_removed_by_the_process_that_made_it(tmp_path):
    for name in ("mine", "parents"):
        (tmp_path / name / "deep").mkdir(parents=True)
    build._remove(tmp_path / "mine", os.getpid())
    build._remove(tmp_path / "parents", os.getppid())
    assert [path.name for path in tmp_path.iterdir()] == ["parents"]


def test_a_user_without_a_home_has_a_temporary_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a container's user that has no line in /etc/passwd
    assert cache_folder().name.startswith("widemix-")
