"""Copies to a node's disk: once, complete, verified, resumed."""

import errno
import fcntl
import io
import mmap
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.clone import ROOT
from tests.transcripts import check_transcript, transcript
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError
from widemix.launch.stage import remove_old, stage

STAGE = """
    import os
    import sys
    from pathlib import Path
    from widemix.formats import chunks
    from widemix.formats import manifest
    from widemix.launch import stage

    chunks.CHUNK = manifest.CHUNK = stage.CHUNK = chunks.PIECE = stage.PIECE = 4096
    if sys.argv[3:]:  # die at a call of this function
        place, name, left = {"pwrite": os, "fsync": os, "rename": Path}[sys.argv[3]], sys.argv[3], int(sys.argv[4])
        works = getattr(place, name)

        def dies(*arguments):
            global left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), 9)
            return works(*arguments)

        setattr(place, name, dies)
    print(stage.stage(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def make_small(monkeypatch):
    """Blocks of 4 KiB and small pages."""
    for place in (
        "widemix.formats.chunks.CHUNK",
        "widemix.formats.chunks.PIECE",
        "widemix.formats.manifest.CHUNK",
    ):
        monkeypatch.setattr(place, 4096)
    for name in ("CHUNK", "PIECE"):
        monkeypatch.setattr(f"widemix.launch.stage.{name}", 4096)
    monkeypatch.setattr("widemix.data_prep.beton_writer.PAGE", 8192)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(monkeypatch)
        folder = tmp_path_factory.mktemp("prepared") / "digits"
        prepare("digits", None, folder, PrepSettings())
    return folder


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch):
    """The digits, in blocks of 4 KiB and small pages."""
    make_small(monkeypatch)
    shutil.copytree(prepared, tmp_path / "digits")
    return tmp_path / "digits"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start(tmp_path, folder, *dies):
    script = tmp_path / "script.py"
    if not script.exists():  # a process that has been started may not have read it yet
        script.write_text(textwrap.dedent(STAGE))
    return subprocess.Popen(
        [sys.executable, script, folder, tmp_path / "local", *dies],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


OTHER = 65534  # a user


@pytest.fixture
def disk(tmp_path):
    """A folder in which every user may write, as /tmp."""
    if os.geteuid() != 0:
        pytest.skip("being two users needs root")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o1777)
    return tmp_path / "disk"


def give_away(*paths: Path) -> None:
    for path in paths:
        os.chown(path, OTHER, OTHER, follow_symlinks=False)


@pytest.fixture
def answer(folder, tmp_path, system, monkeypatch, capsys, widemix):
    """`stage WORDS` is the command, `half DIR` prepares half of the digits; others are sh's. `in DIR`: from there."""
    system({"psutil.process_iter": list})

    def run(command: str) -> str:
        name, *words = shlex.split(command)
        monkeypatch.chdir(tmp_path)
        if name == "in":
            monkeypatch.chdir(words.pop(0))
            name = words.pop(0)
        if name == "stage":
            code, said = widemix("stage", *words)
            said += f"exit code {code}\n" * (code != 0)
        elif name == "half":
            prepare("digits", None, tmp_path / words[0], PrepSettings(fraction=0.5), force=True)
            said = capsys.readouterr().out
        else:
            said = subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout
        said = re.sub(r"-[0-9a-f]{16}\b", "-HASH", said.replace(str(tmp_path), "{tmp}"))
        return re.sub(r"[\d.]+ (MiB|s)\b", r"N \1", said)

    return run


@transcript(Path(__file__).with_name("stage.txt"))
def test_what_is_staged(case, answer, request):
    """Where another user has been before: as root."""
    if "chown" in case[1] and os.geteuid() != 0:
        pytest.skip("being two users needs root")
    check_transcript(case, answer, request.config)


def test_four_processes_copy_once(tmp_path, folder):
    processes = [start(tmp_path, folder) for _ in range(4)]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    places = {out.strip() for out, _ in outputs}
    assert len(places) == 1
    assert contents(Path(places.pop())) == contents(folder)
    assert "".join(errors for _, errors in outputs).count("copying from") == 1


def test_what_another_process_copies_is_waited_for(tmp_path, folder):
    """With a line that says so."""
    copy = stage(folder, tmp_path / "local")
    lock = tmp_path / f"local/.{copy.name}.lock"
    with lock.open("a") as file, ThreadPoolExecutor() as pool, redirect_stderr(io.StringIO()) as said:
        fcntl.flock(file, fcntl.LOCK_EX)
        again, deadline = pool.submit(stage, folder, tmp_path / "local"), time.monotonic() + 300
        while not said.getvalue().endswith("\n") and not again.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert said.getvalue() == f"{lock}: waiting for the process that copies\n"
        file.close()
        assert again.result(300) == copy


def test_a_killed_copy_is_resumed(tmp_path, folder, system):
    copied, pwrite = [], os.pwrite

    def dies_later(descriptor, piece, start):
        copied.append(start)
        if len(copied) == 40:
            raise KeyboardInterrupt
        return pwrite(descriptor, piece, start)

    system({"os.pwrite": dies_later})
    with pytest.raises(KeyboardInterrupt):
        stage(folder, tmp_path / "local")
    assert not any(path.suffix != ".unfinished" and path.is_dir() for path in (tmp_path / "local").iterdir())
    before = len(copied)
    copy = stage(folder, tmp_path / "local")
    assert contents(copy) == contents(folder)
    blocks = sum(-(-path.stat().st_size // 4096) for path in folder.glob("*.beton"))
    assert len(copied) - before < blocks - 20


def test_after_any_kill_no_copy_looks_complete(tmp_path, folder):
    for call, number in (("pwrite", "1"), ("pwrite", "40"), ("fsync", "1"), ("rename", "1")):
        process = start(tmp_path, folder, call, number)
        process.communicate(timeout=600)
        assert process.returncode == -signal.SIGKILL
        (unfinished,) = (path for path in (tmp_path / "local").iterdir() if path.is_dir())
        assert unfinished.suffix == ".unfinished"
    assert contents(stage(folder, tmp_path / "local")) == contents(folder)


def test_a_disk_without_space_is_refused_before_copying(tmp_path, folder, system):
    """Of a copy that was cut off, the blocks that it has are not needed again."""
    local, usage = tmp_path / "local", shutil.disk_usage(tmp_path)
    sizes = sum(path.stat().st_size for path in folder.glob("*.beton"))
    said = r"has 0 MiB free, a copy of .*digits needs \d+"

    def leave(free: int) -> None:
        system({"shutil.disk_usage": lambda _: usage._replace(free=free)})

    leave(1000)
    with pytest.raises(InputError, match=f"{said}$"):
        stage(folder, local)
    assert not any(local.glob("*/*.beton"))
    [unfinished] = local.glob("*.unfinished")
    for split in folder.glob("*.beton"):  # as a copy that was cut off: long, and without data
        with (unfinished / split.name).open("wb") as file:
            file.truncate(split.stat().st_size)
    (local / "other-0123456789abcdef").mkdir()
    cure = f"; `widemix stage --to {local} --clean 7` removes copies not used for 7 days"
    with pytest.raises(InputError, match=f"{said}{cure}$"):
        stage(folder, local)
    shutil.copy(folder / "train.beton", unfinished)
    with (unfinished / "train.beton").open("rb") as file:
        os.fsync(file.fileno())  # from then on it has its blocks
    occupied = sum(path.stat().st_blocks * 512 for path in unfinished.iterdir())
    assert occupied > 4096
    leave(sizes - occupied - 1)
    with pytest.raises(InputError, match="needs"):
        stage(folder, local)
    leave(sizes - occupied)
    assert contents(stage(folder, local)) == contents(folder)


def test_a_disk_that_holds_something_else_is_named(tmp_path, folder, system):
    system({"os.pwrite": lambda _, piece, start: len(piece)})
    with pytest.raises(InputError, match=r"unfinished/\w+\.beton: differs from what was written to it; the disk is"):
        stage(folder, tmp_path / "local")
    assert not list((tmp_path / "local").glob("digits-*/manifest.json"))


# Old copies.

OLD = "0123456789abcdef"


def process(*paths: Path, way: str = "open_files", hidden: bool = False) -> SimpleNamespace:
    """A process that reads these files, or maps them; hidden: into which we may not look."""

    def files() -> list[SimpleNamespace]:
        if hidden:
            raise psutil.AccessDenied
        return [SimpleNamespace(path=str(path)) for path in paths]

    return SimpleNamespace(**{"open_files": list, "memory_maps": list} | {way: files})


def test_old_copies_are_removed_and_nothing_else(tmp_path, folder, system):
    system({"psutil.process_iter": lambda: [psutil.Process()]})  # others of this machine may be many
    local = tmp_path / "local"
    old = stage(folder, local)
    prepare("digits", None, folder, PrepSettings(fraction=0.5), force=True)
    unfinished = stage(folder, local)
    unfinished = unfinished.rename(f"{unfinished}.unfinished")
    prepare("digits", None, folder, PrepSettings(fraction=0.25), force=True)
    recent = stage(folder, local)
    for name in (f"mine-{OLD}", "notes"):
        (local / name).mkdir()
    (local / ".notes.lock").touch()
    (tmp_path / "elsewhere").mkdir()
    (local / f"linked-{OLD}").symlink_to(tmp_path / "elsewhere")
    (local / f".linked-{OLD}.lock").touch()
    for lock in local.glob(".*.lock"):
        if lock.name != f".{recent.name}.lock":
            os.utime(lock, (0, 0))
    with (old / "train.beton").open("rb") as file:  # as a job that trains
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert remove_old(local, days=7) == [unfinished]
    mapped.close()
    assert remove_old(local, days=7) == [old]
    assert remove_old(local, days=7) == []
    kept = {recent.name, f"mine-{OLD}", "notes", f"linked-{OLD}"}
    assert {path.name for path in local.iterdir() if path.is_dir()} == kept
    os.utime(local / f".{recent.name}.lock", (0, 0))
    assert stage(folder, local) == recent  # one that is used again is not old
    assert remove_old(local, days=7) == []
    with (local / f".{recent.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a process that copies
        assert remove_old(local, days=0) == []
    assert remove_old(local, days=0) == [recent]
    assert not recent.exists()


@pytest.mark.parametrize("way", ["open_files", "memory_maps"])
def test_a_copy_that_stays_keeps_no_later_one(tmp_path, system, way):
    """Not one that is recent, that another process copies, or of which one has a file open, nor what is no copy."""
    names = [f"{letter}-{OLD}" for letter in "abcdef"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / f".{name}.lock").touch()
        os.utime(tmp_path / f".{name}.lock", (0, 0) if name[0] != "a" else None)
    (tmp_path / ".b.lock").touch()
    (tmp_path / f"{names[3]}.unfinished").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)  # processes have what it leads to
    beside, inside = tmp_path / f"{names[4]}.old/a", tmp_path / names[3] / "train.beton"
    found = [process(hidden=True, way=way), process(tmp_path / names[1], way=way), process(beside, inside, way=way)]
    system({"psutil.process_iter": lambda: found})
    with (tmp_path / f".{names[2]}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        gone = [names[1], f"{names[3]}.unfinished", *names[4:]]
        assert remove_old(tmp_path / "link", days=7) == [tmp_path / "link" / name for name in gone]
    assert [path.name for path in sorted(tmp_path.glob("?-*"))] == [names[0], *names[2:4]]


def test_a_copy_that_cannot_be_removed_is_named(tmp_path, folder, system):
    def fails(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    copy = stage(folder, tmp_path / "local")
    system({"psutil.process_iter": list, "shutil.rmtree": fails})
    with pytest.raises(InputError, match=rf"^{copy}: cannot be removed \(Permission denied\)$"):
        remove_old(tmp_path / "local", days=0)


def test_where_files_cannot_be_locked_old_copies_are_removed(tmp_path, folder, system):
    def no_locks(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    stage(folder, tmp_path / "local")
    system({"psutil.process_iter": list, "fcntl.flock": no_locks})
    assert len(remove_old(tmp_path / "local", days=0)) == 1
