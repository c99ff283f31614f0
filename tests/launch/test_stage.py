"""Copies to a node's disk: once, complete, verified, resumed."""

import errno
import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from widemix.cli.parser import make_parser
from widemix.command_line.commands import run_command
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.errors import InputError
from widemix.formats.manifest import manifest_json, read_manifest
from widemix.launch.stage import remove_old, stage

ROOT = Path(__file__).parents[2]
STAGE = """
    import os
    import sys
    from pathlib import Path
    from widemix.formats import blocks
    from widemix.formats import manifest
    from widemix.launch import stage

    blocks.BLOCK = manifest.BLOCK = stage.BLOCK = blocks.PIECE = stage.PIECE = 4096
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
        "widemix.formats.blocks.BLOCK",
        "widemix.formats.blocks.PIECE",
        "widemix.formats.manifest.BLOCK",
    ):
        monkeypatch.setattr(place, 4096)
    for name in ("BLOCK", "PIECE"):
        monkeypatch.setattr(f"widemix.launch.stage.{name}", 4096)
    monkeypatch.setattr("widemix.data_prep.write.PAGE", 8192)


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


def test_a_copy_is_whole_and_reused(tmp_path, folder, capsys, system):
    written, replace = [], Path.replace
    system({"pathlib.Path.replace": lambda path, target: written.append(target) or replace(path, target)})
    copy = stage(folder, tmp_path / "a" / "local")
    assert contents(copy) == contents(folder)
    assert {path.parent.suffix for path in written} == {".unfinished"}  # it has its name when all is there
    assert written[-1].name == "manifest.json"
    times = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    assert stage(folder, tmp_path / "a" / "local") == copy
    assert times == {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    assert "already there" in capsys.readouterr().err


def rename_classes(path: Path) -> None:
    """The data are whole; the names of their classes would be wrong."""
    manifest = read_manifest(path.parent)
    path.write_text(manifest_json(manifest.model_copy(update={"classes": tuple(reversed(manifest.classes))})))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("manifest.json", rename_classes, "differs from that of the source"),
        ("train.beton", lambda path: os.truncate(path, 1000), "train.beton"),
        ("train.beton", lambda path: os.truncate(path, path.stat().st_size + 5), "train.beton"),
        ("test.crc32c", lambda path: path.write_bytes(b"x"), "is damaged"),
        ("train.crc32c", Path.unlink, "cannot be read"),
    ],
)
def test_a_copy_that_was_changed_is_mended(tmp_path, folder, capsys, name, change, said):
    copy = stage(folder, tmp_path / "local")
    capsys.readouterr()
    change(copy / name)
    assert stage(folder, tmp_path / "local") == copy
    assert contents(copy) == contents(folder)
    assert f"{copy / name}" in (line := capsys.readouterr().err.splitlines()[0])
    assert said in line


def test_other_content_gets_another_place(tmp_path, folder):
    first = stage(folder, tmp_path / "local")
    prepare("digits", None, folder, PrepSettings(fraction=0.5), force=True)
    second = stage(folder, tmp_path / "local")
    assert first != second
    assert contents(second) == contents(folder)
    assert contents(first) != contents(second)


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


def test_what_others_put_on_a_disk_is_not_used(tmp_path, folder, disk):
    name, secret = stage(folder, tmp_path / "own").name, tmp_path / "secret"
    secret.write_text("mine")
    secret.chmod(0o600)
    (disk / f"{name}.unfinished").mkdir()
    (disk / f"{name}.unfinished/train.beton").symlink_to(secret)
    (disk / f".{name}.lock").symlink_to(secret)
    shutil.copytree(folder, disk / name)
    give_away(disk / name, disk / f".{name}.lock", *disk.rglob("*"))
    copy = stage(folder, disk)
    assert copy == stage(folder, disk) == disk / f"widemix-{os.getuid()}" / name
    assert contents(copy) == contents(folder)
    assert (copy.parent.stat().st_mode & 0o777, copy.stat().st_uid, copy.stat().st_mode & 0o022) == (0o700, 0, 0)
    assert secret.read_text() == "mine"
    assert remove_old(disk, -1) == [copy]
    assert (disk / name).is_dir()


def planted(place: str):
    """What another user, or a folder that was sent, has in the place of ours: made by (disk, name of the copy)."""

    def folder_of_other(disk: Path, name: str) -> None:
        (disk / place.format(name)).mkdir(parents=True)
        give_away(disk / place.format(name))

    def link(disk: Path, name: str) -> None:
        (disk / place.format(name)).parent.mkdir(0o700, exist_ok=True, parents=True)
        (disk / place.format(name)).symlink_to(disk.parent / "elsewhere")

    def open_to_all(disk: Path, name: str) -> None:
        (disk / place.format(name)).mkdir(parents=True)
        (disk / place.format(name)).chmod(0o777)

    return folder_of_other, link, open_to_all


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["another user's", "a link", "open to all"])
@pytest.mark.parametrize("place", ["widemix-0", "widemix-0/{}", "widemix-0/{}.unfinished"])
def test_a_place_that_others_can_write_to_is_refused(tmp_path, folder, disk, place, kind):
    name, elsewhere = stage(folder, tmp_path / "own").name, tmp_path / "elsewhere"
    elsewhere.mkdir()
    if place != "widemix-0":
        (disk / "widemix-0").mkdir(0o700)
    planted(place)[kind](disk, name)
    with pytest.raises(InputError, match=rf"{place.format(name)}: is not a folder of this user's alone"):
        stage(folder, disk)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("place", ["{}.unfinished/train.beton", ".{}.lock"])
def test_nothing_is_copied_through_a_link(tmp_path, folder, place):
    name, secret = stage(folder, tmp_path / "own").name, tmp_path / "secret"
    secret.write_text("mine")
    planted(place)[1](tmp_path / "local", name)
    (tmp_path / "elsewhere").symlink_to(secret)
    with pytest.raises(InputError, match=rf"{place.format(name)}: is a link to \S+elsewhere, and nothing is written"):
        stage(folder, tmp_path / "local")
    assert secret.read_text() == "mine"


@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o755, OTHER), (0o1777, OTHER)])
def test_a_disk_where_others_can_replace_ours_is_told(folder, disk, capsys, mode, owner):
    disk.chmod(mode)
    os.chown(disk, owner, owner)
    assert contents(stage(folder, disk)) == contents(folder)
    assert f"warning: {disk}: other users can replace what we write there; name a folder" in capsys.readouterr().err


def test_four_processes_copy_once(tmp_path, folder):
    processes = [start(tmp_path, folder) for _ in range(4)]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    places = {out.strip() for out, _ in outputs}
    assert len(places) == 1
    assert contents(Path(places.pop())) == contents(folder)
    assert "".join(errors for _, errors in outputs).count("copying from") == 1


def test_what_another_process_copies_is_waited_for(tmp_path, folder, capsys):
    """With a line that says so."""
    copy = stage(folder, tmp_path / "local")
    lock = tmp_path / f"local/.{copy.name}.lock"
    capsys.readouterr()
    with lock.open("a") as file, ThreadPoolExecutor() as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        again, said = pool.submit(stage, folder, tmp_path / "local"), ""
        while not said.endswith("\n") and not again.done():
            said += capsys.readouterr().err
        assert said == f"{lock}: waiting for the process that copies\n"
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


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("train.beton", 50 * 4096 + 5, r"train\.beton: block 50 is damaged"),
        ("train.crc32c", 0, r"^{folder}/train\.crc32c: is damaged; prepare the folder again$"),
    ],
)
def test_a_damaged_source_is_named_and_not_staged(tmp_path, folder, name, place, said):
    data = bytearray((folder / name).read_bytes())
    data[place] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(InputError, match=said.replace("{folder}", str(folder))):
        stage(folder, tmp_path / "local")
    assert not any((tmp_path / "local").glob("digits-*[0-9a-f]/manifest.json"))


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


def test_a_folder_is_staged_by_its_own_name(tmp_path, folder, monkeypatch):
    copy = stage(folder, tmp_path / "local")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    assert stage(Path(), tmp_path / "local") == stage(tmp_path / "link", tmp_path / "local") == copy
    assert copy.name.startswith("digits-")
    for source, local in ((Path(), folder / "copies"), (folder, Path("copies")), (folder, tmp_path / "link/copies")):
        with pytest.raises(InputError, match=f"^{local}: is in the folder that is to be copied"):
            stage(source, local)


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


@pytest.mark.parametrize(("days", "removed"), [(6.99, False), (7.01, True)])
def test_days_are_days(tmp_path, folder, system, days, removed):
    system({"psutil.process_iter": list})
    local = tmp_path / "local"
    os.utime(local / f".{stage(folder, local).name}.lock", (time.time() - days * 24 * 3600,) * 2)
    assert run_command(make_parser(), argv=["stage", "--to", str(local), "--clean", "7"]) == 0
    assert any(local.glob("*/manifest.json")) is not removed


def test_where_files_cannot_be_locked_old_copies_are_removed(tmp_path, folder, system):
    def no_locks(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    stage(folder, tmp_path / "local")
    system({"psutil.process_iter": list, "fcntl.flock": no_locks})
    assert len(remove_old(tmp_path / "local", days=0)) == 1


@pytest.mark.parametrize(
    ("local", "words"), [("file", "is a file, not a folder"), ("file/below", "cannot be copied to")]
)
def test_a_target_that_is_a_file_is_refused(tmp_path, folder, local, words):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=words):
        stage(folder, tmp_path / local)


def test_the_first_copy_finds_nothing_to_clean(tmp_path, folder, capsys):
    for words, place, code in (([str(folder)], "local", 0), ([], "local", 0), ([], "none", 2)):
        assert run_command(make_parser(), None, ["stage", *words, "--to", f"{tmp_path}/{place}", "--clean=7"]) == code
    assert "no such folder, so there are no copies to remove" in capsys.readouterr().err
