"""metrics.jsonl and TensorBoard: full disks, and lines of a run that was cut off."""

import json
import resource
from contextlib import contextmanager

import pytest
from torch.utils.tensorboard import SummaryWriter

from pipeline.run.metrics import MetricsWriter


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


def test_lines_that_do_not_fit_on_a_full_disk_are_written_later(tmp_path):
    writer, path, number = (
        MetricsWriter(tmp_path, 0, tensorboard=False),
        tmp_path / "metrics.jsonl",
        iter(range(1, 1000)),
    )
    assert writer.write(line(next(number))) is None
    for _ in range(2):
        with full(path.stat().st_size + 10):
            said = [writer.write(line(next(number))) for _ in range(300)]
            assert "metrics.jsonl: cannot be written to" in said[0]
            assert said[1:] == [None] * 299  # reported once
        assert writer.write(line(next(number))) is None
    writer.close()
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line(step) for step in range(1, 604)]


def test_curves_continue_after_tensorboards_writer_has_failed(tmp_path, monkeypatch):
    writer, drawn = MetricsWriter(tmp_path, 0, tensorboard=True), []
    broken, add = writer._board, SummaryWriter.add_scalar

    def adds(self, name, value, step):
        if self is broken and step > 1:
            raise OSError(28, "No space left on device")  # as its thread had met before
        drawn.append((name, step))
        add(self, name, value, step)

    monkeypatch.setattr(SummaryWriter, "add_scalar", adds)
    assert [writer.write(line(step)) for step in (1, 2, 3)] == [None] * 3
    writer.close()
    assert drawn == [("train/loss", 1), ("train/loss", 3)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("rest", [b"", b'{"step": 3, "spl', b"\0\0\0", b"\xff\xfe", b"3"])
def test_a_resumed_run_removes_the_lines_beyond_its_checkpoint(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("".join(f"{json.dumps(line(step))}\n" for step in (1, 2, 3)).encode() + rest)
    writer = MetricsWriter(tmp_path, 2, tensorboard=False)
    writer.write(line(3) | {"loss": 0.5})
    writer.rewind(1)
    writer.write(line(2))
    writer.close()
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line(1), line(2)]
