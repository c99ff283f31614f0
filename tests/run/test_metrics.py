"""metrics.jsonl and TensorBoard: whatever happens to a run, both have each step once, as of an undisturbed run."""

import itertools
import json
import os
import struct
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata

from tests.run.saved import KILLED, disturbed, position, state
from tests.shims import disk_of
from widemix.lock import hold
from widemix.plots.style import as_png, new_figure
from widemix.recipe import dump_recipe, flat_recipe, load_recipe
from widemix.run import checkpoint
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.metrics import SUPERSEDED, MetricsWriter, peak_memory
from widemix.run.tensorboard import EventFile, add_to_tensorboard

RECIPE = load_recipe("digits/mixer")
IMAGE = np.zeros((4, 4, 3), np.uint8)
EVENTS = "events.out.tfevents*"
TAGS = {
    "train": {"loss": "loss/train", "lr": "train/lr"},
    "eval": {"loss": "loss/eval", "top1": "eval/top1", "ema_loss": "loss/eval_ema"},
}
DESCRIPTION = ("recipe/text_summary", "environment/text_summary", "custom_scalars__config__")


def line(step: int, **others) -> dict:
    return {"step": step, "split": "train", "loss": 1 / step} | others


def encoded(lines) -> bytes:
    return b"".join(f"{json.dumps(each)}\n".encode() for each in lines)


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def drawn(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each point of a tag; of images and texts 0. Both of TensorBoard's readers must agree."""
    board = EventAccumulator(str(folder), dict.fromkeys(("scalars", "images", "tensors"), 0)).Reload()  # 0: all
    plugin = PluginEventAccumulator(str(folder), {"tensors": 0}).Reload()
    found = {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    found |= {tag: [(event.step, 0.0) for event in board.Images(tag)] for tag in board.Tags()["images"]}
    found |= {tag: [(event.step, 0.0) for event in board.Tensors(tag)] for tag in board.Tags()["tensors"]}
    for tag in found.keys() & set(plugin.Tags()["tensors"]):
        assert [event.step for event in plugin.Tensors(tag)] == [step for step, _ in found[tag]], tag
    return found


def steps_of(folder: Path, tag: str = "loss/train") -> list[int]:
    return [step for step, _ in drawn(folder).get(tag, [])]


def points_of(lines: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """What is to be drawn of lines; of several in a hundredth of an epoch the first."""
    found = defaultdict(list)
    for each in lines:
        split, step, place = each["split"], each["step"], round(100 * each["epoch"])
        for name, tag in TAGS[split].items():
            found[tag].append((step, each[name]))
            by_epoch = found[f"over_epochs_x100/{split}_{name}"]
            if name in ("loss", "top1") and place > max([at for at, _ in by_epoch], default=-1):
                by_epoch.append((place, each[name]))
        if split == "eval":
            found["mistakes"].append((step, 0.0))
            found["confusion"].append((step, 0.0))
    return {tag: points for tag, points in found.items() if points}


class Run(RuleBasedStateMachine):
    """A run that is started, rolled back and killed, by any clock; each start has other values."""

    root = system = None  # of the test
    numbers = itertools.count()
    fractions = st.floats(0, 1)

    @initialize(per_epoch=st.sampled_from([7, 11, 1250]))
    def begin(self, per_epoch):
        self.folder, self.per_epoch = self.root / str(next(self.numbers)), per_epoch
        self.folder.mkdir()
        self.step, self.value, self.lines, self.moved = 0, 0.0, list[dict](), b""
        self.has_first_batch, self.writer, self.rest = False, None, b""
        self.start(0, False, 1.5e9, False, b"")

    def cut(self, step: int, evaluates: bool = False, rest: bytes = b"") -> int:
        """Lines beyond a step move; returns how many."""
        keep = [each for each in self.lines if (each["step"], evaluates and each["split"] == "eval") <= (step, False)]
        moved = encoded(each for each in self.lines if each not in keep) + (rest + b"\n" if rest else b"")
        self.moved += moved
        self.lines, self.step = keep, step
        self.has_first_batch &= step > 0
        self.value += 1
        return moved.count(b"\n")

    @rule(
        at=fractions,
        evaluates=st.booleans(),
        now=st.floats(1e9, 2e9),
        unremoved=st.booleans(),
        rest=st.sampled_from([b"", b'{"step": 3, "spl', b"\0\0\0", b"\xff\xfe", b"3", b'{"at": 1}']),
    )
    def start(self, at, evaluates, now, unremoved, rest):
        """After a kill which tore the last line and record, or before an old file was removed."""
        if self.writer:
            self.writer.close()  # for ResourceWarnings alone: each line is flushed
        left = {path: path.read_bytes() for path in sorted(self.folder.glob(EVENTS))}
        if rest:
            with (self.folder / "metrics.jsonl").open("ab") as file:
                file.write(rest)
            for path, content in list(left.items())[-1:]:
                path.write_bytes(content + content[-40 : -len(rest)])
        step = int(at * self.step)
        self.system({"time.time": lambda: now})
        moved = self.cut(step, evaluates, rest)
        self.writer = MetricsWriter(self.folder, step, True, evaluates=evaluates)
        assert self.writer.superseded == moved
        self.writer.add_description(RECIPE, {"start": self.value})
        for path, content in list(left.items())[: int(unremoved)]:
            path.write_bytes(content)
        if evaluates and step:
            self.write("eval", step)

    @rule(count=st.integers(1, 20), every=st.integers(1, 5))
    def train(self, count, every):
        if self.step == 0:
            self.writer.add_image("first_batch", IMAGE, 1)
            self.has_first_batch = True
        for step in range(self.step + 1, self.step + count + 1):
            if step % every == 0:
                self.write("train", step)
            if step % self.per_epoch == 0:
                self.write("eval", step)
        self.step += count

    @rule(at=fractions)
    def rewind(self, at):
        self.cut(int(at * self.step))
        self.writer.rewind(self.step)

    def write(self, split: str, step: int) -> None:
        figures = dict.fromkeys(TAGS[split], self.value)
        epoch = round(step / self.per_epoch, 4)
        if split == "eval":
            self.writer.show("mistakes", IMAGE, step)
            self.writer.show("confusion", IMAGE, step)
        self.lines.append({"step": step, "epoch": epoch, "split": split, "time": 1e9 + step, **figures})
        assert self.writer.write(self.lines[-1]) is None

    def teardown(self):
        if not hasattr(self, "folder"):
            return
        self.rewind(1)
        self.writer.close()
        assert lines_of(self.folder) == self.lines
        assert (self.folder / SUPERSEDED).exists() == bool(self.moved)
        assert not self.moved or (self.folder / SUPERSEDED).read_bytes() == self.moved
        wanted = points_of(self.lines) | {tag: [(0, 0.0)] for tag in DESCRIPTION}
        wanted |= {"first_batch": [(1, 0.0)]} if self.has_first_batch else {}
        assert drawn(self.folder) == wanted
        assert len(list(self.folder.glob(EVENTS))) == 1


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.long)])
def test_any_kills_rollbacks_and_clocks(tmp_path, system, count):
    machine = type("Machine", (Run,), {"root": tmp_path, "system": staticmethod(system)})
    run_state_machine_as_test(machine, settings=settings(max_examples=count, stateful_step_count=8))


def test_lines_on_a_full_disk_are_written_later(tmp_path):
    writer, path, number = MetricsWriter(tmp_path, 0, False), tmp_path / "metrics.jsonl", itertools.count(1)
    assert writer.write(line(next(number))) is None
    for _ in range(2):
        with disk_of(path.stat().st_size + 10):
            said = [writer.write(line(next(number))) for _ in range(300)]
            assert "metrics.jsonl: cannot be written to" in said[0]
            assert said[1:] == [None] * 299  # reported once
        assert writer.write(line(next(number))) is None
    writer.close()
    assert lines_of(tmp_path) == [line(step) for step in range(1, 604)]


def test_curves_on_a_full_disk_are_written_later(tmp_path):
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    writer.write(line(1))
    with disk_of(max(path.stat().st_size for path in tmp_path.iterdir()) + 10):
        for step in range(2, 400):
            writer.write(line(step))
    writer.write(line(400))
    writer.close()
    assert steps_of(tmp_path) == list(range(1, 401))


def test_images_and_confusions_that_do_not_fit_stop_no_run(tmp_path):
    writer, images = MetricsWriter(tmp_path, 0, tensorboard=False), {}
    for name in ("first_batch", "mistakes"):
        images[name] = np.random.default_rng(len(name)).integers(0, 255, (5, 7, 3), np.uint8)
        writer.add_image(name, images[name], 1)
    writer.write_confusion({"counts": [[1]]})
    with disk_of(3):
        writer.add_image("another", IMAGE, 1)
        writer.write_confusion({"counts": [[2]]})
    writer.close()
    written = {path.stem: np.asarray(Image.open(path)) for path in (tmp_path / "images").glob("*.png")}
    assert all(np.array_equal(written.pop(name), image) for name, image in images.items())
    assert not written
    assert json.loads((tmp_path / "confusion.json").read_text()) == {"counts": [[1]]}


def test_lines_are_on_disk_before_they_leave_their_file(tmp_path, system):
    lines, flushed = [line(step) for step in (1, 2, 3)], []
    (tmp_path / "metrics.jsonl").write_bytes(encoded(lines))
    files = (tmp_path / SUPERSEDED, tmp_path / "metrics.jsonl")

    def fsync(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), *(file.read_bytes() for file in files)))

    system({"os.fsync": fsync})
    MetricsWriter(tmp_path, 2, tensorboard=False).close()
    assert flushed[0] == (str(files[0]), encoded(lines[2:]), encoded(lines))


@pytest.mark.parametrize("at", range(1, 8))
def test_a_kill_while_lines_move_loses_none(tmp_path, at):
    lines = [line(step) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(encoded(lines))
    ended = disturbed(lambda: MetricsWriter(tmp_path, 2, tensorboard=False).close(), at, KILLED)
    left, moved = tmp_path / "metrics.jsonl", tmp_path / SUPERSEDED
    assert left.read_bytes() in (encoded(lines), encoded(lines[:2]))
    moves = moved.exists() and moved.read_bytes() == encoded(lines[2:])
    assert moves or left.read_bytes() == encoded(lines)
    assert moves or ended == KILLED


@pytest.mark.parametrize("space", [10, 10**9])
def test_a_writer_leaves_no_file_open(tmp_path, space):
    """Also on a full disk."""
    before = os.listdir("/proc/self/fd")
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    opened = len(os.listdir("/proc/self/fd"))
    for step in (1, 2):
        writer.write(line(step))
        writer.rewind(1)
    assert len(os.listdir("/proc/self/fd")) == opened
    with disk_of(space):
        writer.write(line(3))
        writer.close()
    assert os.listdir("/proc/self/fd") == before


def test_peak_memory_is_in_gib(system):
    system({"torch.cuda.max_memory_allocated": lambda device: 2**30 * (1 + device.index)})
    assert peak_memory(torch.device("cuda", 3)) == 4
    with open("/proc/self/status") as status:
        (peak,) = [int(text.split()[1]) / 2**20 for text in status if text.startswith("VmHWM")]
    assert peak_memory(torch.device("cpu")) == pytest.approx(peak, rel=0.05)


def test_tensorboard_has_what_the_lines_say(tmp_path):
    writer, environment = MetricsWriter(tmp_path, 0, tensorboard=True), {"torch": "2.8.0", "ranks": 2}
    writer.add_description(RECIPE, environment)
    metrics = {
        "train": ("loss", "lr", "images_per_s"),
        "eval": ("loss", "top1", "top5", "ema_loss", "ema_top1"),
    }
    for step, split in itertools.product((2, 4, 6), metrics):
        place = {"step": step, "epoch": step / 8, "split": split, "time": 1e9 + step}
        writer.write(place | dict.fromkeys(metrics[split], step / 3))
    writer.write({"step": 6, "split": "event", "event": "save_failed", "reason": "none", "time": 1.0})
    writer.show("confusion", IMAGE, 1)
    board = EventAccumulator(str(tmp_path)).Reload()  # all is on disk at once
    by_step = {"loss/train", "train/lr", "train/images_per_s", "loss/eval", "eval/top1", "eval/top5"}
    by_step |= {"loss/eval_ema", "eval/ema_top1"}
    assert board.Tags()["images"] == ["confusion"]
    assert min(by_step) == "eval/ema_top1"  # accuracies first in the table of runs, which TensorBoard sorts
    by_epoch = {f"over_epochs_x100/{name}" for name in ("train_loss", "eval_loss", "eval_top1")}
    assert set(board.Tags()["scalars"]) == by_step | by_epoch  # nothing that has one point
    for tag in by_step | by_epoch:
        found = [(event.step, event.value, event.wall_time) for event in board.Scalars(tag)]
        steps = [25, 50, 75] if tag in by_epoch else [2, 4, 6]
        expected = zip(steps, (2, 4, 6), strict=True)
        assert found == [(at, pytest.approx(step / 3), 1e9 + step) for at, step in expected]
    (content,) = board.PluginTagToContent("hparams").values()
    start = metadata.parse_session_start_info_plugin_data(content)
    shown = {name: _value(found) for name, found in start.hparams.items()}
    kinds = (bool, int, float, str)
    assert shown == {
        name: value if type(value) in kinds else str(value)
        for name, value in flat_recipe(RECIPE).items()
        if not name.startswith("log.")
    }
    layout = layout_pb2.Layout()
    (tag,) = board.PluginTagToContent("custom_scalars")
    layout.ParseFromString(board.Tensors(tag)[0].tensor_proto.string_val[0])
    charts = {tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag}
    of_some_runs = {f"train/{name}" for name in ("data_wait", "mfu", "memory_gib", "weight_norm", "grad_norm")}
    assert charts == by_step | by_epoch | of_some_runs | {"eval/ema_top5", "train/grad_norm/.*"}
    said = [board.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0] for name in ("recipe", "environment")]
    (yaml_, recipe), (json_, machine) = (text.decode().removesuffix("\n```").split("\n", 1) for text in said)
    assert (yaml_, json_) == ("```yaml", "```json")
    assert yaml.safe_load(recipe) == yaml.safe_load(dump_recipe(RECIPE))
    assert json.loads(machine) == environment
    writer.close()


def _value(found) -> object:
    return getattr(found, found.WhichOneof("kind"))


def test_figures_of_an_analysis_replace_those_of_the_same_step(tmp_path):
    figure, writer = as_png(new_figure(1, 1)[0]), MetricsWriter(tmp_path, 0, tensorboard=True)
    writer.add_description(RECIPE, {})
    for step in range(1, 9):
        if step == 6:
            with hold(tmp_path):  # while it is trained its own file is left alone
                add_to_tensorboard({"filters": figure}, tmp_path)
        writer.write(line(step))
    writer.close()
    for analysed in ([0], [0, 6]):
        for _ in range(2):
            add_to_tensorboard({"filters": figure}, tmp_path)
        assert steps_of(tmp_path, "analysis/filters") == analysed
        assert steps_of(tmp_path) == list(range(1, 9))
        assert steps_of(tmp_path, "recipe/text_summary") == [0]
        checkpoint.save(tmp_path, state(), position(6), RetentionPolicy(1))


@pytest.mark.parametrize(
    ("tag", "at", "evaluates", "kept"),
    [
        ("loss/train", 5, True, True),
        ("loss/train", 6, False, False),
        ("eval/top1", 5, True, False),
        ("eval/top1", 5, False, True),
        ("eval/top1", 4, True, True),
        ("loss/eval_ema", 5, True, False),
        ("mistakes", 5, True, False),
        ("confusion", 5, True, False),
        ("first_batch", 1, True, True),
    ],
)
def test_a_start_takes_over_what_it_does_not_repeat(tmp_path, tag, at, evaluates, kept):
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    split, name = {"loss/train": ("train", "loss"), "loss/eval_ema": ("eval", "ema_loss")}.get(tag) or (
        tag.split("/") if "/" in tag else (None, tag)
    )
    writer.write({"step": at, "split": split, name: 1.0}) if split else writer.show(name, IMAGE, at)
    writer.close()
    MetricsWriter(tmp_path, 5, tensorboard=True, evaluates=evaluates).close()
    assert steps_of(tmp_path, tag) == [at] * kept


@pytest.mark.parametrize("damage", ["a bit of the last", "a bit of the last, and a torn one behind it", "the third"])
def test_records_are_taken_over_up_to_a_damaged_one(tmp_path, damage):
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    for step in range(1, 6):
        writer.write(line(step))
    writer.close()
    (path,) = tmp_path.glob(EVENTS)
    data, places = bytearray(path.read_bytes()), [0]
    while places[-1] < len(data):  # each has its length, data and two checksums
        places.append(places[-1] + 16 + struct.unpack_from("<Q", data, places[-1])[0])
    if damage == "the third":
        begin, end = places[-4] + 12, places[-3] - 4
        data[begin:end] = b"\xff" * (end - begin)
    else:
        data[places[-2] + 14] ^= 1  # of the time
        data += data[:10] if "torn" in damage else b""
    path.write_bytes(data)
    writer = MetricsWriter(tmp_path, 5, tensorboard=True)
    writer.write(line(6))
    writer.close()
    assert steps_of(tmp_path) == ([1, 2, 6] if damage == "the third" else [1, 2, 3, 4, 6])


@pytest.mark.parametrize("at", range(1, 8))
def test_a_kill_while_curves_are_taken_over_loses_none(tmp_path, at):
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    for step in range(1, 6):
        writer.write(line(step))
    writer.close()
    disturbed(lambda: EventFile(tmp_path, lambda tag, step: step > 3), at, KILLED)  # which is never closed
    assert steps_of(tmp_path) in ([1, 2, 3], [1, 2, 3, 4, 5])
    MetricsWriter(tmp_path, 3, tensorboard=True).close()
    assert steps_of(tmp_path) == [1, 2, 3]
    assert not list(tmp_path.glob(f".{EVENTS}"))


def test_a_new_file_is_last_whatever_the_clock_says(tmp_path, system):
    """As two starts within a second, and after a clock was set back twice."""
    system({"time.time": lambda: 1e9})
    for name in ("1500000000.here.1.0", "1600000000.here.1.1", "mine"):
        (tmp_path / f"events.out.tfevents.{name}").touch()
    hidden = tmp_path / ".events.out.tfevents.1700000000.here.1.2"  # which another process writes
    hidden.touch()
    for _ in range(3):
        EventFile(tmp_path, None).close()
    hidden.unlink()  # which is there
    *found, _ = sorted(path.name for path in tmp_path.iterdir())
    seconds = [int(name.split(".")[3]) for name in found]
    assert seconds == [1_500_000_000, 1_600_000_000, 1_600_000_001, 1_600_000_002, 1_600_000_003]
