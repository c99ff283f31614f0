"""Hashes taken while a file is written are those of the file."""

import numpy as np
import pytest

from data_prep.disk import DiskFile
from pipeline.formats import blocks
from pipeline.formats.blocks import BlockHashes, hash_blocks


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4096)


def written(path, start: int, pieces: list[tuple[int, int]], keep: int = 0) -> BlockHashes:
    """A file written from `start` on in pieces of so many bytes, each after a gap."""
    rng = np.random.default_rng(start)
    disk = DiskFile(path, keep)
    for gap, size in pieces:
        start += gap
        disk.write(start, [rng.bytes(size // 3), rng.bytes(size - size // 3)])
        start += size
    disk.flush(then=lambda: None)
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


def test_hashes_tell_of_what_should_be_on_disk(tmp_path):
    hashes = written(tmp_path / "file", 0, [(0, 20_000)])
    with (tmp_path / "file").open("r+b") as file:
        file.seek(10_000)
        file.write(b"damage")
    assert hash_blocks(tmp_path / "file", hashes.known)[2] != hash_blocks(tmp_path / "file")[2]
