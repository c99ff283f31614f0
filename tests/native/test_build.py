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

import pytest
import torch

from tests.conftest import ROOT
from widemix import engine
from widemix.native import BuildError, build, compiled
from widemix.native.build import FLAGS, cache_folder, compile_library, find_compiler, home_cache, planned
from widemix.native.library import description, open_library
from widemix.recipe.sections import TrainSection


def run(program: str, **environ: str) -> str:
    """What a Python of its own prints; `program` is a module or its text."""
    words = ["-c", program] if " " in program else ["-m", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | environ, timeout=600, **pipes).stdout


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.long
def test_processes_that_start_at_once_share_one_build(home):
    command = [sys.executable, "-m", "widemix.native"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(4)]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, outputs
    assert len(set(outputs)) == 1
    assert len(list(home.iterdir())) == 1  # nothing half-made is left


def test_the_module_says_what_was_built_or_why_nothing_was():
    assert re.fullmatch(r"built on libjpeg\S* \d.*\n", run("widemix.native"))
    assert run("widemix.native", WIDEMIX_NATIVE="none") == "WIDEMIX_NATIVE=none\n"


def test_what_is_there_is_not_built_again(home, tiny, monkeypatch, tmp_path):
    path = compiled(tiny)
    before = path.stat().st_mtime_ns
    assert compiled(tiny) == path
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled(tiny) == path
    assert path.stat().st_mtime_ns == before
    path.unlink()
    with pytest.raises(BuildError, match="there is no C compiler"):
        compiled(tiny)


def test_every_change_gets_a_build_of_its_own(home, tiny, cpu, compiler, tmp_path):
    header, source = tiny / "tiny.h", tiny / "tiny.c"
    texts = [("#define ONE 1\n", "int a;\n"), ("#define ONE 2\n", "int a;\n"), ("#define ONE 2\n", "int b;\n")]
    texts += [("int b;\nint c;\n", "int a;\n"), ("int c;\n", "int a;\nint b;\n")]  # the same lines in other files
    paths = []
    for of_header, of_source in texts:
        header.write_text(of_header)
        source.write_text(of_source)
        paths.append(planned(tiny))
    (tmp_path / "other.py").write_text(Path(build.__file__).read_text().replace('"-O3"', '"-O2"'))
    paths.append(runpy.run_path(str(tmp_path / "other.py"))["planned"](tiny))
    for version in ("newer", "newest"):  # in the same place
        compiler(f"echo {version}")
        paths.append(planned(tiny))
    cpu(platform.machine(), "flags : another")
    assert len({*paths, planned(tiny)}) == len(paths) + 1


@pytest.mark.parametrize(
    ("machine", "choice", "flags"),
    [
        ("x86_64", "", ["-march=native"]),
        ("x86_64", "native", ["-march=native"]),  # also beside a wheel's libraries
        ("x86_64", "v2", ["-march=x86-64-v2"]),
        ("aarch64", "", ["-mcpu=native"]),
        ("riscv64", "", []),
    ],
)
def test_the_compiler_is_told_what_keeps_the_numbers(home, tiny, cpu, compiler, machine, choice, flags, monkeypatch):
    cpu(machine, "flags : cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3")
    monkeypatch.setenv("WIDEMIX_NATIVE", choice)
    if choice == "native":
        (tiny / "v2.so").touch()
    noted = compiler()
    assert compiled(tiny).parent == home
    words = noted.read_text().split()
    assert [word for word in words if word.startswith("-m")] == flags
    assert {"-ffp-contract=off", "-shared", "-fPIC", "-Wl,-Bsymbolic", str(tiny / "tiny.c")} <= set(words)
    assert words[-3:] == ["-ljpeg", "-lpthread", "-lm"]


def test_each_level_has_a_build_of_its_own(home, tiny, cpu, compiler, monkeypatch):
    compiler()
    names = set()
    for choice in ("native", *build.runnable()):
        monkeypatch.setenv("WIDEMIX_NATIVE", choice)
        names.add(compiled(tiny))
    assert len(names) == 1 + len(build.runnable())
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC")
    assert compiled(tiny) in names  # by its name alone
    cpu(platform.machine(), "flags : another")
    monkeypatch.setenv("WIDEMIX_NATIVE", "native")
    with pytest.raises(BuildError, match="there is no C compiler"):
        compiled(tiny)


@pytest.mark.parametrize(("there", "taken"), [({"cc", "gcc"}, "cc"), ({"gcc", "clang"}, "gcc"), ({"clang"}, "clang")])
def test_the_compiler_is_the_systems_unless_another_is_named(tmp_path, monkeypatch, there, taken):
    for name in {*there, "mine"}:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_compiler() == str(tmp_path / taken)
    for named, found in (("", taken), ("mine", "mine"), ("none", "gcc" if "gcc" in there else "clang")):
        monkeypatch.setenv("CC", named)
        assert find_compiler() == str(tmp_path / found)


def test_what_another_process_has_built_meanwhile_is_taken(home, tiny, compiler, system):
    """While it was waited for; on file systems without locks each builds its own."""
    noted, path = compiler(), planned(tiny)
    system({"fcntl.flock": lambda *_: path.touch()})
    assert compiled(tiny) == path
    assert not noted.exists()
    path.unlink()
    before = descriptors()

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    system({"fcntl.flock": no_locks})
    assert compiled(tiny) == path
    assert noted.exists()
    assert descriptors() <= before


def test_the_code_in_use_is_the_packages_or_made_here(home, tiny, compiler, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    made = compiled()
    library = open_library().jpeg_library().decode()
    assert description() == f"compiled code: made on this machine, {library}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.parent))
    assert description(tiny) == "compiled code is made at its first use"
    compiler()
    path = compiled(tiny)
    path.write_text("no library")
    words = rf"{path.name} does not load \(.*"
    with pytest.raises(BuildError, match=f"^{words}"):
        open_library(tiny)
    assert re.match(f"no compiled code: {words}", description(tiny))
    level = list(build.runnable())[-1]
    shutil.copy(made, tiny / f"{level}.so")
    assert description(tiny) == f"compiled code: {level} of the package, {library}"


def test_other_systems_have_no_compiled_code(home, system):
    system({"sys.platform": "darwin"})
    with pytest.raises(BuildError, match=r"^compiled code is for Linux alone$"):
        compiled()


COMPILERS = pytest.mark.parametrize("name", ["gcc", "clang"])


@pytest.mark.long
@COMPILERS
def test_compilers_have_no_complaint(name, tmp_path):
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    compile_library([name], tmp_path / "code.so", "-Werror")
    assert ctypes.CDLL(str(tmp_path / "code.so")).mixer_block


@pytest.mark.long
@COMPILERS
def test_compilers_make_vectors_of_avx2(name, tmp_path):
    if not shutil.which(name) or platform.machine() != "x86_64":
        pytest.skip(f"{name} for x86-64 is not installed")
    path = tmp_path / "mixer_block.s"
    subprocess.run([name, *FLAGS, "-march=x86-64-v3", "-S", "-o", path, build.SOURCES / "mixer_block.c"], check=True)
    for function in ("multiply", "add_weight_gradient", "norm_backward", "compute_shares"):
        pattern = rf"^{function}(?:\.\w+)*:(.*?)\.size\s"
        code = re.findall(pattern, path.read_text(), re.DOTALL | re.MULTILINE)
        assert code, function
        bad = [each for each in code if each.count("%ymm") <= 30 or re.search("call.*(sqrt|exp|fma)", each)]
        assert not bad, function


ERRORS = "In x.c:1:\nx.c:1: fatal error: jpeglib.h: No\nx.c:2: error: other"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f'echo "{ERRORS}" >&2\nexit 1', r"failed: x\.c:1: fatal error: jpeglib\.h: No; apt-get install libjpeg-dev"),
        ("echo warning: jpeg >&2\nexit 3", "failed: exit code 3"),
        ("exec sleep 60", r"was not done in 0\.05 s"),
        ("", r"does not run \(\[Errno \d+\] Exec format error.*\)"),  # no program
    ],
)
def test_a_compiler_that_fails_leaves_nothing_and_says_why(tmp_path, compiler, script, words):
    compiler(script)
    before, target = descriptors(), tmp_path / "made/target.so"
    target.parent.mkdir()
    timeout = 0.05 if "sleep" in script else 60
    with pytest.raises(BuildError, match=rf"^{os.environ['CC']} {words}$"):
        compile_library([os.environ["CC"]], target, timeout=timeout)
    assert list(target.parent.iterdir()) == []
    assert descriptors() <= before


def test_a_library_appears_whole_or_not_at_all(home, tiny, compiler, system):
    """By a rename in its folder: another one may be of another file system."""
    compiler()

    def replace(source, target):
        assert Path(source).parent == Path(target).parent == home
        raise KeyboardInterrupt

    system({"os.replace": replace})
    with pytest.raises(KeyboardInterrupt):
        compiled(tiny)
    assert not list(home.iterdir())


def test_a_library_is_linked_to_those_it_is_given(tiny, compiler, tmp_path):
    noted = compiler()
    compile_library([os.environ["CC"]], tmp_path / "target.so", "-g", libraries=["-lm", "-lz"], sources=tiny)
    words = noted.read_text().split()
    assert "-g" in words
    assert [word for word in words if word.startswith("-l")] == ["-lm", "-lz"]


AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")


def give_link(path: Path) -> None:
    os.chown(path.rename(path.with_name("kept")).parent, 12345, -1)
    path.symlink_to("kept")


OTHERS = [
    pytest.param(lambda path: path.chmod(0o777), id="writable by all"),
    pytest.param(lambda path: os.chown(path, 12345, -1), id="of another user", marks=AS_ROOT),
]
ABOVE = [
    pytest.param(lambda path: path.parent.chmod(0o777), id="in a folder writable by all"),
    pytest.param(lambda path: os.chown(path.parent, 12345, -1), id="in a folder of another user", marks=AS_ROOT),
    pytest.param(give_link, id="reached by a link of another user", marks=AS_ROOT),
]


@pytest.mark.parametrize("plant", OTHERS)
def test_no_library_runs_that_another_user_has_put_there(plant, home, tiny):
    path = compiled(tiny)
    path.write_bytes(b"another user's")
    plant(path)
    assert compiled(tiny) == path
    ctypes.CDLL(str(path)).tiny()  # compiled anew
    plant(home)
    assert home_cache() is None
    assert cache_folder().name.startswith("widemix-")


@pytest.mark.parametrize("plant", ABOVE)
def test_the_home_is_left_where_others_can_replace_its_content(plant, home):
    assert cache_folder() == home
    plant(home)
    assert home_cache() is None


@pytest.mark.parametrize("plant", OTHERS + ABOVE)
@pytest.mark.parametrize("what", ["numba", "torch.compile"])
def test_nothing_runs_that_another_user_has_put_there(what, plant, home, system, monkeypatch, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    system({"tempfile.tempdir": str(disk)})

    def folder() -> Path:
        if what == "numba":
            own = {"NUMBA_CACHE_DIR": str(disk), "WIDEMIX_NATIVE": "none"}
            return Path(
                run("import widemix.data.compiled, numba; print(numba.config.CACHE_DIR)", **own).split("\n")[-2]
            )
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        engine.apply_training_options(
            torch.nn.Linear(1, 1), TrainSection(epochs=1, global_batch=1, compile=True), torch.device("cpu")
        )
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])

    kept = folder()
    assert kept.parent == disk
    assert kept.stat().st_mode & 0o777 == 0o700
    plant(kept)
    assert folder().parent == home


def test_the_cache_is_in_the_home_or_temporary(home, system, monkeypatch, tmp_path):
    assert cache_folder() == home
    assert home.is_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/widemix"
    system({"os.access": lambda path, mode: mode != os.W_OK})  # root may write everywhere
    assert home_cache() is None
    assert cache_folder() == cache_folder()
    assert cache_folder().name.startswith("widemix-")
    monkeypatch.undo()
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    system({"pwd.getpwuid": {}.__getitem__})  # a container's user that has no line in /etc/passwd
    assert cache_folder().name.startswith("widemix-")


def test_the_process_that_made_a_folder_removes_it(tmp_path):
    (tmp_path / "file").touch()
    program = """if True:
        import os, sys
        from widemix.native.build import cache_folder
        folder, child = cache_folder(), os.fork()
        if child:
            os.waitpid(child, 0)
            (folder / "deep").mkdir()
            print(folder, folder.exists())"""
    folder, existed = run(program, XDG_CACHE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path)).split()
    assert (Path(folder).parent, existed) == (tmp_path, "True")
    assert not Path(folder).exists()
    assert tempfile.gettempdir() != str(tmp_path)
