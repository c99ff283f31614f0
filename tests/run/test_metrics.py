"""metrics.jsonl and TensorBoard: full disks, and lines of a run that was cut off."""

import json
import os

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata

from tests.shims import disk_of
from widemix.recipe import flat_recipe, load_recipe
from widemix.run import metrics
from widemix.run.metrics import SUPERSEDED, MetricsWriter, peak_memory


def line(step: int) -> dict:
    return {"step": step, "split": "train", "loss": 1 / step}


def test_lines_that_do_not_fit_on_a_full_disk_are_written_later(tmp_path):
    writer, path, number = (
        MetricsWriter(tmp_path, 0, tensorboard=False),
        tmp_path / "metrics.jsonl",
        iter(range(1, 1000)),
    )
    assert writer.write(line(next(number))) is None
    for _ in range(2):
        with disk_of(path.stat().st_size + 10):
            said = [writer.write(line(next(number))) for _ in range(300)]
            assert "metrics.jsonl: cannot be written to" in said[0]
            assert said[1:] == [None] * 299  # reported once
        assert writer.write(line(next(number))) is None
    writer.close()
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line(step) for step in range(1, 604)]


def test_curves_that_do_not_fit_on_a_full_disk_are_written_later(tmp_path):
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    writer.write(line(1))
    with disk_of(max(path.stat().st_size for path in tmp_path.iterdir()) + 10):
        for step in range(2, 400):
            writer.write(line(step))
    writer.write(line(400))
    writer.close()
    board = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in board.Scalars("loss/train")] == list(range(1, 401))


def test_curves_beyond_the_checkpoint_are_left_out(tmp_path):
    for begin in (0, 3):
        writer = MetricsWriter(tmp_path, begin, tensorboard=True)
        for step in range(begin + 1, 6):
            writer.write(line(step) | {"loss": float(begin)})
        writer.close()
    board = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in board.Scalars("loss/train")] == [0, 0, 0, 3, 3]


@pytest.mark.parametrize("rest", [b"", b'{"step": 3, "spl', b"\0\0\0", b"\xff\xfe", b"3", b'{"at": 1}'])
def test_a_resumed_run_removes_the_lines_beyond_its_checkpoint(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("".join(f"{json.dumps(line(step))}\n" for step in (1, 2, 3)).encode() + rest)
    writer = MetricsWriter(tmp_path, 2, tensorboard=False)
    assert writer.superseded == 1 + bool(rest)
    writer.write(line(3) | {"loss": 0.5})
    writer.rewind(1)
    writer.write(line(2))
    writer.close()
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line(1), line(2)]
    moved = [json.dumps(each).encode() for each in (line(3), line(2), line(3) | {"loss": 0.5})]
    moved[1:1] = [rest] if rest else []
    assert (tmp_path / SUPERSEDED).read_bytes() == b"".join(each + b"\n" for each in moved)


def test_lines_are_on_disk_in_the_other_file_before_they_leave_this_one(tmp_path, monkeypatch):
    lines = [f"{json.dumps(line(step))}\n".encode() for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    flushed = []

    def fsync(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), *(file.read_bytes() for file in files)))

    files = (tmp_path / SUPERSEDED, tmp_path / "metrics.jsonl")
    monkeypatch.setattr(os, "fsync", fsync)
    MetricsWriter(tmp_path, 2, tensorboard=False).close()
    assert flushed[0] == (str(files[0]), lines[2], b"".join(lines))


def test_tensorboard_has_what_the_lines_say(tmp_path):
    recipe = load_recipe("digits/mixer")
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    writer.add_description(recipe, {"host": "here"})
    metrics = {"train": ("loss", "lr", "images_per_s"), "eval": ("loss", "top1", "top5")}
    lines = [
        {"step": step, "epoch": step / 8, "split": split, "time": 1e9 + step} | dict.fromkeys(names, step / 3)
        for step in (2, 4, 6)
        for split, names in metrics.items()
    ]
    image = np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8)
    for each in lines:
        writer.write(each)
    writer.add_image("first_batch", image, 1)
    writer.write({"step": 6, "split": "event", "event": "save_failed", "reason": "none", "time": 1.0})
    writer.close()

    board = EventAccumulator(str(tmp_path)).Reload()
    by_step = {"loss/train", "train/lr", "train/images_per_s", "loss/eval", "eval/top1", "eval/top5"}
    assert min(by_step) == "eval/top1"  # the first in the table of runs, which TensorBoard sorts
    by_epoch = {f"over_epochs_x100/{name}" for name in ("train_loss", "eval_loss", "eval_top1")}
    assert set(board.Tags()["scalars"]) == by_step | by_epoch  # nothing that has one point
    for tag in by_step | by_epoch:
        found = [(event.step, event.value, event.wall_time) for event in board.Scalars(tag)]
        steps = [25, 50, 75] if tag in by_epoch else [2, 4, 6]
        expected = zip(steps, (2, 4, 6), strict=True)
        assert found == [(at, pytest.approx(step / 3), 1e9 + step) for at, step in expected]
    (content,) = board.PluginTagToContent("hparams").values()
    start = metadata.parse_session_start_info_plugin_data(content)
    assert set(start.hparams) == {name for name in flat_recipe(recipe) if not name.startswith("log.")}
    assert start.hparams["optim.lr"].number_value == recipe.optim.lr
    layout = layout_pb2.Layout()
    (tag,) = board.PluginTagToContent("custom_scalars")
    layout.ParseFromString(board.Tensors(tag)[0].tensor_proto.string_val[0])
    drawn = {tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag}
    assert by_step | by_epoch <= drawn
    of_some_runs = {f"train/{name}" for name in ("data_wait", "mfu", "memory_gib", "weight_norm", "grad_norm")}
    of_some_runs |= {"eval/ema_top1", "eval/ema_top5", "loss/eval_ema", "train/grad_norm/.*"}
    assert drawn == by_step | by_epoch | of_some_runs
    assert np.array_equal(np.asarray(Image.open(tmp_path / "images/first_batch.png")), image)


def test_peak_memory_is_in_gib(monkeypatch):
    monkeypatch.setattr("widemix.run.metrics.peak_resident_bytes", lambda: 3 * 2**29)
    assert peak_memory(torch.device("cpu")) == 1.5
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30 * (1 + device.index))
    assert peak_memory(torch.device("cuda", 3)) == 4


def test_images_and_confusions_are_files_and_a_full_disk_stops_no_run(tmp_path):
    writer, image = MetricsWriter(tmp_path, 0, tensorboard=False), np.zeros((8, 8, 3), np.uint8)
    for name in ("first_batch", "mistakes"):
        writer.add_image(name, image, 1)
    writer.write_confusion({"counts": [[1]]})
    with disk_of(3):
        writer.add_image("another", image, 1)
        writer.write_confusion({"counts": [[2]]})
    writer.close()
    assert {path.stem for path in (tmp_path / "images").glob("*.png")} == {"first_batch", "mistakes"}
    assert json.loads((tmp_path / "confusion.json").read_text()) == {"counts": [[1]]}


def test_lines_that_move_are_nowhere_lost_by_a_kill_between(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    lines = "".join(f"{json.dumps(line(step))}\n" for step in (1, 2, 3))
    (tmp_path / "metrics.jsonl").write_text(lines)
    monkeypatch.setattr(metrics, "atomic_write", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter(tmp_path, 2, tensorboard=False)
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    assert json.loads((tmp_path / SUPERSEDED).read_text()) == line(3)


def test_a_writer_that_is_closed_or_goes_back_leaves_no_file_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    opened = len(os.listdir("/proc/self/fd"))
    for step in (1, 2):
        writer.write(line(step))
        writer.rewind(1)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert writer.superseded == 1
    writer.close()
    assert os.listdir("/proc/self/fd") == before
