"""Atomic writes and locks."""

import errno
import fcntl
import os
import threading

import pytest

from widemix.errors import InputError
from widemix.files import advise, atomic_write, fsync_path, try_lock, wait_for_lock, write_output


def test_a_lock_is_one_process_alone_until_it_is_closed(tmp_path):
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert try_lock(first.fileno())
        assert not try_lock(second.fileno())
        first.close()
        assert try_lock(second.fileno())


def test_a_file_system_without_locks_stops_nobody(tmp_path, monkeypatch):
    """As Lustre mounted without `-o flock`. Other failures are raised."""

    def fails(number):
        def flock(*_):
            raise OSError(number, "not here")

        return flock

    with (tmp_path / "lock").open("w") as file:
        for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            monkeypatch.setattr(fcntl, "flock", fails(number))
            assert try_lock(file.fileno()) is None
        monkeypatch.setattr(fcntl, "flock", fails(errno.EIO))
        with pytest.raises(OSError, match="not here"):
            try_lock(file.fileno())
        monkeypatch.setattr("widemix.files.fcntl", None)  # as on Windows
        assert try_lock(file.fileno()) is None
        wait_for_lock(file.fileno())


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    atomic_write(path, "before")

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            atomic_write(path, b"after")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "before")]

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space") as error:
        atomic_write(path, "after")
    assert error.value.filename == str(path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "before")]


def test_an_error_is_that_of_what_failed_first_and_leaves_no_file_open(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError) as error:
        atomic_write(tmp_path / "no/a.json", "x")
    assert error.value.filename == str(tmp_path / "no/.a.json")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            atomic_write(tmp_path / "a.json", "x")
    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fsync_path(tmp_path)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_text_and_bytes_are_written_as_they_are(tmp_path):
    """With line ends kept, and the file and its folder flushed; what a killed writer left behind does not matter."""
    (tmp_path / ".a").write_text("half of a longer file")
    name = os.fsdecode(b"\xff")  # of a file, as Python has it
    for data, written in (("ä\r\n", "ä\r\n".encode()), (name, b"\xff"), (b"\x00\xff\n", b"\x00\xff\n")):
        atomic_write(tmp_path / "a", data)
        assert (tmp_path / "a").read_bytes() == written
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_file_and_folder_are_flushed(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr("os.fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    atomic_write(tmp_path / "a", "text")
    assert flushed == [str(tmp_path / ".a"), str(tmp_path)]


@pytest.mark.parametrize("name", ["a", ".a"])
def test_nothing_is_written_through_a_link(tmp_path, name):
    (tmp_path / "theirs").write_text("before")
    (tmp_path / name).symlink_to("theirs")
    for write in (atomic_write, write_output):
        with pytest.raises(InputError, match=rf"/{name}: is a link to theirs, and nothing is written or removed"):
            write(tmp_path / "a", "after")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"theirs": "before", name: "before"}


def test_what_a_command_replaces_is_said(tmp_path, capsys):
    path = tmp_path / "predictions.csv"
    name = os.fsdecode(b"\xff")  # of a file
    for content, said in (("a", False), ("a", False), (name, True), (b"\xff", False), ("b", True), (b"b", False)):
        write_output(path, content)
        output = capsys.readouterr()
        assert (f"{path}: replaces the one of 20" in output.err) == said
        assert output.out == ""
    assert path.read_text() == "b"


def test_a_lock_is_waited_for(tmp_path):
    has = threading.Event()

    def wait(file):
        wait_for_lock(file.fileno())
        has.set()

    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert try_lock(first.fileno())
        thread = threading.Thread(target=wait, args=(second,), daemon=True)
        thread.start()
        assert not has.wait(0.02)
        first.close()
        assert has.wait(300)
        thread.join()


def test_advice_is_of_the_bytes_and_the_kind_that_are_named(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: given.append(words))
    for advice in ("WILLNEED", "DONTNEED"):
        advise(7, 4096, 100, advice)
    assert given == [(7, 4096, 100, os.POSIX_FADV_WILLNEED), (7, 4096, 100, os.POSIX_FADV_DONTNEED)]
    monkeypatch.delattr(os, "posix_fadvise")
    advise(7, 4096, 100, "WILLNEED")
