"""Atomic writes and locks."""

import errno
import os
import subprocess
import threading

import pytest

from widemix.errors import InputError
from widemix.files import advise, atomic_write, fsync_path, try_lock, wait_for_lock, write_output


def raises(error: BaseException):
    def call(*_, **__):
        raise error

    return call


def contents(folder) -> dict[str, bytes]:
    """By `cat`, since pathlib may fail as a test says."""
    return {name: subprocess.check_output(["cat", f"{folder}/{name}"]) for name in os.listdir(folder)}


def test_a_lock_is_one_process_alone_until_it_is_closed(tmp_path):
    has = threading.Event()

    def wait(file):
        wait_for_lock(file.fileno())
        has.set()

    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert try_lock(first.fileno())
        assert not try_lock(second.fileno())
        thread = threading.Thread(target=wait, args=(second,), daemon=True)
        thread.start()
        assert not has.wait(0.02)
        first.close()
        assert has.wait(300)
        thread.join()


def test_a_file_system_without_locks_stops_nobody(tmp_path, system):
    """As Lustre mounted without `-o flock`. Other failures are raised."""
    with (tmp_path / "lock").open("w") as file:
        for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            system({"fcntl.flock": raises(OSError(number, "not here"))})
            assert try_lock(file.fileno()) is None
        system({"fcntl.flock": raises(OSError(errno.EIO, "not here"))})
        with pytest.raises(OSError, match="not here"):
            try_lock(file.fileno())


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("call", "error"),
    [("pathlib.Path.replace", KeyboardInterrupt()), ("pathlib.Path.open", KeyboardInterrupt()), ("os.fsync", FULL)],
)
def test_a_file_is_written_whole_or_not_at_all(tmp_path, system, call, error):
    atomic_write(tmp_path / "a.json", "before")
    files = len(os.listdir("/proc/self/fd"))
    system({call: raises(error)})
    with pytest.raises(type(error)):
        atomic_write(tmp_path / "a.json", b"after")
    assert getattr(error, "filename", None) == (str(tmp_path / "a.json") if error is FULL else None)
    if call == "os.fsync":
        with pytest.raises(OSError, match="No space"):
            fsync_path(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == files
    assert contents(tmp_path) == {"a.json": b"before"}


def test_a_folder_that_is_missing_is_that_of_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        atomic_write(tmp_path / "no/a.json", "x")
    assert error.value.filename == str(tmp_path / "no/.a.json")


@pytest.mark.parametrize(
    ("data", "written"),
    [("ä\r\n", "ä\r\n".encode()), (os.fsdecode(b"\xff"), b"\xff"), (b"\x00\xff\n", b"\x00\xff\n")],
)
def test_text_and_bytes_are_written_as_they_are(tmp_path, data, written, system):
    """With line ends kept, and the file and its folder flushed; what a killed writer left behind does not matter."""
    (tmp_path / ".a").write_text("half of a longer file")
    flushed = []
    system({"os.fsync": lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))})
    atomic_write(tmp_path / "a", data)
    assert contents(tmp_path) == {"a": written}
    assert flushed == [str(tmp_path / ".a"), str(tmp_path)]


@pytest.mark.parametrize("name", ["a", ".a"])
def test_nothing_is_written_through_a_link(tmp_path, name):
    (tmp_path / "theirs").write_text("before")
    (tmp_path / name).symlink_to("theirs")
    for write in (atomic_write, write_output):
        with pytest.raises(InputError, match=rf"/{name}: is a link to theirs, and nothing is written or removed"):
            write(tmp_path / "a", "after")
    assert contents(tmp_path) == {"theirs": b"before", name: b"before"}


def test_what_a_command_replaces_is_said(tmp_path, capsys):
    path = tmp_path / "predictions.csv"
    name = os.fsdecode(b"\xff")  # of a file
    for content, said in (("a", False), ("a", False), (name, True), (b"\xff", False), ("b", True), (b"b", False)):
        write_output(path, content)
        output = capsys.readouterr()
        assert (f"{path}: replaces the one of 20" in output.err) == said
        assert output.out == ""
    assert path.read_text() == "b"


def test_advice_is_of_the_bytes_and_kind_named(monkeypatch, system):
    given = []
    system({"os.posix_fadvise": lambda *words: given.append(words)})
    for advice in ("WILLNEED", "DONTNEED"):
        advise(7, 4096, 100, advice)
    assert given == [(7, 4096, 100, os.POSIX_FADV_WILLNEED), (7, 4096, 100, os.POSIX_FADV_DONTNEED)]
    monkeypatch.delattr(os, "posix_fadvise")
    advise(7, 4096, 100, "WILLNEED")
