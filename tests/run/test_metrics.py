"""The record of a run: what a full disk does to it."""

import json
import resource
from contextlib import contextmanager

import pytest
from torch.utils.tensorboard import SummaryWriter

from pipeline.run.metrics import Record


def line(step: int) -> dict:
    return {"step": step, "split": "train", "loss": 1 / step}


@contextmanager
def full(size: int):
    """No file may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_that_a_full_disk_does_not_take_wait_until_it_does(tmp_path):
    record, path, number = Record(tmp_path, 0, tensorboard=False), tmp_path / "metrics.jsonl", iter(range(1, 1000))
    assert record.write(line(next(number))) is None
    for _ in range(2):
        with full(path.stat().st_size + 10):
            said = [record.write(line(next(number))) for _ in range(300)]
            assert "metrics.jsonl: cannot be written to" in said[0]
            assert said[1:] == [None] * 299  # told once
        assert record.write(line(next(number))) is None
    record.close()
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line(step) for step in range(1, 604)]


def test_curves_go_on_when_tensorboards_writer_has_failed(tmp_path, monkeypatch):
    record, drawn = Record(tmp_path, 0, tensorboard=True), []
    broken, add = record._board, SummaryWriter.add_scalar

    def adds(self, name, value, step):
        if self is broken and step > 1:
            raise OSError(28, "No space left on device")  # what its thread had met
        drawn.append((name, step))
        add(self, name, value, step)

    monkeypatch.setattr(SummaryWriter, "add_scalar", adds)
    assert [record.write(line(step)) for step in (1, 2, 3)] == [None] * 3
    record.close()
    assert drawn == [("train/loss", 1), ("train/loss", 3)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("rest", [b"", b'{"step": 3, "spl', b"\0\0\0", b"\xff\xfe", b"3"])
def test_a_run_that_goes_on_takes_back_what_lies_beyond_its_checkpoint(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("".join(f"{json.dumps(line(step))}\n" for step in (1, 2, 3)).encode() + rest)
    record = Record(tmp_path, 2, tensorboard=False)
    record.write(line(3) | {"loss": 0.5})
    record.rewind(1)
    record.write(line(2))
    record.close()
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line(1), line(2)]
