"""Hashes taken while a file is written are those of the file."""

import threading

import numpy as np
import pytest

from tests.shims import disk_of
from widemix.data_prep.unfinished import DiskFile
from widemix.errors import InputError
from widemix.formats import chunks
from widemix.formats.chunks import ChunkHashes, hash_bytes, hash_chunks


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Chunks of 4 KiB: those of a test would have gigabytes else."""
    for name, size in {"CHUNK": 4096, "PIECE": 1500, "CACHED": 1500}.items():
        monkeypatch.setattr(chunks, name, size)


def written(path, start: int, pieces: list[tuple[int, int]], keep: int = 0) -> ChunkHashes:
    """A file written from `start` on in pieces of so many bytes, each after a gap."""
    rng = np.random.default_rng(start)
    disk = DiskFile(path, keep)
    for gap, size in pieces:
        start += gap
        disk.write(start, [rng.bytes(size // 3), rng.bytes(size - size // 3)])
        start += size
    disk.flush(then=lambda _: None)
    disk.wait()
    disk.close()
    return disk.hashes


def overwrite(path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 9000])
@pytest.mark.parametrize("sizes", [[100] * 300, [4096] * 5, [20_000, 1], [0, 5, 8192, 3]])
@pytest.mark.parametrize("gap", [0, 17, 5000])
def test_followed_chunks_have_the_hashes_of_the_file(tmp_path, start, sizes, gap):
    hashes = written(tmp_path / "file", start, [(gap if number else 0, size) for number, size in enumerate(sizes)])
    found = hash_chunks(tmp_path / "file")
    assert {chunk: found[chunk] for chunk in hashes.known} == hashes.known
    assert hashes.start == -(-start // 4096) * 4096
    assert set(hashes.known) == set(range(hashes.start // 4096, len(found)))
    assert hash_chunks(tmp_path / "file", hashes.known) == found


def test_what_is_written_again_or_was_there_before_is_read(tmp_path):
    hashes = written(tmp_path / "file", 4096, [(0, 50_000)])
    hashes.add(0, memoryview(bytes(5000)))
    assert min(hashes.known) == 2
    more = written(tmp_path / "file", 54_096, [(0, 9_000)], keep=54_096)
    assert set(more.known) == {14, 15}
    assert more.start == 14 * 4096
    assert hash_chunks(tmp_path / "file", more.known) == hash_chunks(tmp_path / "file")


def test_what_is_told_to_be_on_disk_is_flushed_before(tmp_path, system):
    done = []
    system({"os.fsync": lambda _: done.append((tmp_path / "file").read_bytes())})
    disk = DiskFile(tmp_path / "file", 0)
    for number in range(2):
        disk.write(number, [b"%d" % number])
        disk.flush(then=done.append)
    disk.wait()
    disk.close()
    assert done[1::2] == [hash_bytes(data) for data in (b"0", b"01")]
    assert [data[: number + 1] for number, data in enumerate(done[::2])] == [b"0", b"01"]


def test_after_a_write_that_failed_no_more_is_written(tmp_path):
    disk, flushed = DiskFile(tmp_path / "file", 0), []
    disk.write(0, [b"0" * 10])
    disk.flush(flushed.append)
    disk.wait()
    with disk_of(15):
        disk.write(10, [b"1" * 10])
        disk.write(5, [b"2"])
        disk.flush(flushed.append)
        with pytest.raises(OSError, match="File too large"):
            disk.wait()
    disk.close()
    assert (tmp_path / "file").read_bytes()[:10] == b"0" * 10
    assert len(flushed) == 1


def test_writes_that_wait_for_the_disk_are_bounded(tmp_path):
    """Else all of a data set would be held in memory."""
    free, queued = threading.Event(), []

    class Waiting(ChunkHashes):
        def add(self, position, data):
            free.wait()
            super().add(position, data)

    def write_all():
        for number in range(40):
            disk.write(number, [b"x"])
            queued.append(number)

    disk = DiskFile(tmp_path / "file", 0, Waiting())
    writer = threading.Thread(target=write_all)
    writer.start()
    writer.join(timeout=0.5)
    assert len(queued) <= 16
    free.set()
    writer.join()
    disk.wait()
    disk.close()
    assert (tmp_path / "file").read_bytes() == b"x" * 40


@pytest.mark.parametrize("size", [3_000, 4_096, 30_000])
@pytest.mark.parametrize("hit", [None, 10, 500, 620, 700, 2_000])
def test_what_the_disk_does_not_hold_is_noticed(tmp_path, size, hit):
    """The tables at the beginning, what lies between them and the data, and the data in their chunk are read back."""
    path, head = tmp_path / "file", b"tables" * 100
    hashes = written(path, 640, [(0, size)])
    overwrite(path, 0, head)
    hashes.add(0, memoryview(head))
    if hit is None:
        assert hashes.of_file(path, head) == hash_chunks(path)
        return
    overwrite(path, hit, b"\x99")
    with pytest.raises(InputError, match="differs from what was written to it; the disk is failing"):
        hashes.of_file(path, head)


def test_a_read_file_has_the_hash_of_what_was_written(tmp_path):
    hashes, found = written(tmp_path / "file", 4096, [(0, 10_000), (300, 9_000)]), ChunkHashes()
    with (tmp_path / "file").open("rb") as file:
        assert found.add_file(file, 4096, 9_000)
        known = dict(found.known)
        found.copy().add(9_000, memoryview(b"other" * 3_000))
        assert found.known == known
        assert not found.copy().add_file(file, 9_000, 100_000)
        assert found.add_file(file, 9_000, 4096 + 19_300)
    assert (found.all(), found.known, found.start) == (hashes.all(), hashes.known, hashes.start)
