"""Hashes taken while a file is written are those of the file."""

import os

import numpy as np
import pytest

from widemix.data_prep.disk import DiskFile
from widemix.errors import InputError
from widemix.formats import blocks
from widemix.formats.blocks import BlockHashes, hash_blocks, hash_bytes


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4096)
    monkeypatch.setattr(blocks, "PIECE", 1500)
    monkeypatch.setattr(blocks, "CACHED", 1500)


def written(path, start: int, pieces: list[tuple[int, int]], keep: int = 0) -> BlockHashes:
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


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 9000])
@pytest.mark.parametrize("sizes", [[100] * 300, [4096] * 5, [20_000, 1], [0, 5, 8192, 3]])
@pytest.mark.parametrize("gap", [0, 17, 5000])
def test_followed_blocks_have_the_hashes_of_the_file(tmp_path, start, sizes, gap):
    hashes = written(tmp_path / "file", start, [(gap if number else 0, size) for number, size in enumerate(sizes)])
    read = hash_blocks(tmp_path / "file")
    assert {block: read[block] for block in hashes.known} == hashes.known
    assert hashes.start == -(-start // 4096) * 4096
    assert set(hashes.known) == set(range(hashes.start // 4096, len(read)))
    assert hash_blocks(tmp_path / "file", hashes.known) == read


def test_what_is_written_again_or_was_there_before_is_read(tmp_path):
    hashes = written(tmp_path / "file", 4096, [(0, 50_000)])
    hashes.add(0, memoryview(bytes(5000)))
    assert min(hashes.known) == 2
    more = written(tmp_path / "file", 54_096, [(0, 9_000)], keep=54_096)
    read = hash_blocks(tmp_path / "file")
    assert set(more.known) == {14, 15}
    assert more.start == 14 * 4096
    assert hash_blocks(tmp_path / "file", more.known) == read


def test_what_follows_the_kept_bytes_is_cut_off(tmp_path):
    """As a process leaves it that was killed; without kept bytes, all of it."""
    for keep in (100, 0):
        (tmp_path / "file").write_bytes(b"x" * 1000)
        disk = DiskFile(tmp_path / "file", keep)
        disk.write(300, [b"yy"])
        disk.wait()
        disk.close()
        assert (tmp_path / "file").read_bytes() == b"x" * keep + bytes(300 - keep) + b"yy"


def test_what_is_told_to_be_on_disk_is_flushed_before(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda _: done.append((tmp_path / "file").read_bytes()))
    disk = DiskFile(tmp_path / "file", 0)
    for number in range(2):
        disk.write(number, [b"%d" % number])
        disk.flush(then=done.append)
    disk.wait()
    disk.close()
    digests = [hash_bytes(data) for data in (b"0", b"01")]
    assert done[1::2] == digests
    assert [data[: number + 1] for number, data in enumerate(done[::2])] == [b"0", b"01"]


def test_after_a_write_that_failed_nothing_more_is_written_or_flushed(tmp_path, monkeypatch):
    disk = DiskFile(tmp_path / "file", 0)
    flushed: list[str] = []
    write = disk._write
    monkeypatch.setattr(disk, "_write", lambda position, parts: 1 / 0 if position == 10 else write(position, parts))
    disk.write(0, [b"0" * 10])
    disk.flush(flushed.append)
    disk.wait()
    disk.write(10, [b"1" * 10])
    disk.write(20, [b"2" * 10])
    disk.flush(flushed.append)
    with pytest.raises(ZeroDivisionError):
        disk.wait()
    disk.close()
    assert (tmp_path / "file").read_bytes() == b"0" * 10
    assert len(flushed) == 1


def test_writes_that_wait_for_the_disk_are_bounded(tmp_path):
    """Else all of a data set would be held in memory."""
    disk = DiskFile(tmp_path / "file", 0)
    for number in range(40):
        disk.write(number, [b"x"])
    assert len(disk._pending) <= 16
    disk.wait()
    disk.close()
    assert (tmp_path / "file").read_bytes() == b"x" * 40


def test_hashes_tell_of_what_should_be_on_disk(tmp_path):
    hashes = written(tmp_path / "file", 0, [(0, 20_000)])
    with (tmp_path / "file").open("r+b") as file:
        file.seek(10_000)
        file.write(b"damage")
    assert hash_blocks(tmp_path / "file", hashes.known)[2] != hash_blocks(tmp_path / "file")[2]


@pytest.mark.parametrize("size", [3_000, 4_096, 30_000])
@pytest.mark.parametrize("hit", [None, 10, 500, 620, 700, 2_000])
def test_what_the_disk_does_not_hold_is_noticed(tmp_path, size, hit):
    """The tables at the beginning, what lies between them and the data, and the data in their block are read back."""
    path, head = tmp_path / "file", b"tables" * 100
    hashes = written(path, 640, [(0, size)])
    with path.open("r+b") as file:
        file.write(head)
        if hit is not None:
            file.seek(hit)
            file.write(b"\x99")
    hashes.add(0, memoryview(head))
    if hit is None:
        assert hashes.of_file(path, head) == hash_blocks(path)
        return
    with pytest.raises(InputError, match="differs from what was written to it; the disk is failing"):
        hashes.of_file(path, head)


def test_a_file_that_is_read_has_the_hash_of_what_was_written(tmp_path):
    hashes, read = written(tmp_path / "file", 4096, [(0, 10_000), (300, 9_000)]), BlockHashes()
    with (tmp_path / "file").open("rb") as file:
        assert read.add_file(file, 4096, 9_000)
        known = dict(read.known)
        read.copy().add(9_000, memoryview(b"other" * 3_000))
        assert read.known == known
        before = read.copy()
        assert not before.add_file(file, 9_000, 100_000)
        assert read.add_file(file, 9_000, 4096 + 19_300)
    assert (read.all(), read.known, read.start) == (hashes.all(), hashes.known, hashes.start)
