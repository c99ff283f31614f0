"""Whatever happens to a run, TensorBoard has each step of a tag once, in order, as of an undisturbed run."""

import json
import math
import random
import struct
import time
from argparse import Namespace
from functools import partial

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator
from tensorboard.compat.proto.event_pb2 import Event

from tests.shims import disk_of
from widemix.lock import hold
from widemix.plots import tensorboard as of_analyses
from widemix.plots.style import as_png, new_figure
from widemix.plots.tensorboard import add_to_tensorboard
from widemix.recipe import dump_recipe, load_recipe
from widemix.run import tensorboard
from widemix.run.event_files import EventFile
from widemix.run.metrics import SUPERSEDED, MetricsWriter
from widemix.run.tensorboard import is_repeated

RECIPE = load_recipe("digits/mixer")
IMAGE = np.zeros((4, 4, 3), np.uint8)


class Run:
    """A run that is started, rewound and killed; `value` is that of all its figures, which changes at each start."""

    def __init__(self, folder, steps_per_epoch: int):
        self.folder, self.steps_per_epoch, self.value = folder, steps_per_epoch, 0.0
        self.writer: MetricsWriter | None = None
        folder.mkdir()

    def start(self, step: int, evaluates: bool = False) -> None:
        self.value += 1
        self.close()
        self.writer = MetricsWriter(self.folder, step, tensorboard=True, evaluates=evaluates)
        self.writer.add_description(RECIPE, {"start": self.value})
        if evaluates:
            self.write("eval", step)
        self.step = step

    def train(self, to: int, every: int = 1) -> None:
        if self.step == 0:
            self.writer.add_image("first_batch", IMAGE, 1)
        for step in range(self.step + 1, to + 1):
            if step % every == 0:
                self.write("train", step)
            if step % self.steps_per_epoch == 0:
                self.write("eval", step)
        self.step = to

    def write(self, split: str, step: int) -> None:
        epoch = round(step / self.steps_per_epoch, 4)
        figures = {"loss": self.value, "top1": self.value} if split == "eval" else {"loss": self.value, "lr": step}
        if split == "eval":
            self.writer.show("mistakes", IMAGE, step)
        self.writer.write({"step": step, "epoch": epoch, "split": split, "time": 1e9 + step, **figures})

    def rewind(self, step: int) -> None:
        self.value += 1
        self.writer.rewind(step)
        self.step = step

    def close(self) -> None:
        """For ResourceWarnings alone: each line is flushed."""
        if self.writer:
            self.writer.close()


def drawn(folder) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each point of a tag; of images and texts 0. Both of TensorBoard's readers must agree."""
    board = EventAccumulator(str(folder), dict.fromkeys(("scalars", "images", "tensors"), 0)).Reload()  # 0: all
    plugin = PluginEventAccumulator(str(folder), {"tensors": 0}).Reload()
    found = {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    found |= {tag: [(event.step, 0.0) for event in board.Images(tag)] for tag in board.Tags()["images"]}
    found |= {tag: [(event.step, 0.0) for event in board.Tensors(tag)] for tag in board.Tags()["tensors"]}
    for tag, points in found.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), tag
        if tag in plugin.Tags()["tensors"]:
            assert [event.step for event in plugin.Tensors(tag)] == steps, tag
    return found


def undisturbed(folder, steps_per_epoch: int, starts: dict[int, float], last: int, every: int = 1) -> dict:
    """What one start draws, with the value that each step had last: `starts` has those from a step on."""
    run = Run(folder, steps_per_epoch)
    run.start(0)
    for first, end in zip(starts, [*list(starts)[1:], last], strict=True):
        run.value = starts[first]
        run.train(end, every)
    run.close()
    return drawn(folder)


def test_a_run_that_was_killed_before_its_first_checkpoint_has_each_step_once(tmp_path):
    run = Run(tmp_path / "run", 20)
    for last in (15, 15, 40):
        run.start(0)
        run.train(last, every=5)  # and is killed
    assert drawn(run.folder) == undisturbed(tmp_path / "once", 20, {0: 3.0}, 40, every=5)
    assert [step for step, _ in drawn(run.folder)["loss/train"]] == list(range(5, 45, 5))
    run.close()


@pytest.mark.parametrize("steps_per_epoch", [11, 1250])
def test_hundredths_of_an_epoch_stay_when_a_run_goes_on(tmp_path, steps_per_epoch):
    """With 11 steps an epoch 45 and 91 are steps 5 and 10; with 1,250 there are several steps in a hundredth."""
    run, last = Run(tmp_path / "run", steps_per_epoch), 60
    for first, end in ((0, 22), (20, 40), (35, 38), (35, last)):
        run.start(first)
        run.train(end)
    found = drawn(run.folder)
    assert found == undisturbed(tmp_path / "once", steps_per_epoch, {0: 1.0, 20: 2.0, 35: 4.0}, last)
    if steps_per_epoch == 11:
        assert [step for step, _ in found["over_epochs_x100/train_loss"]][:10] == [
            9,
            18,
            27,
            36,
            45,
            55,
            64,
            73,
            82,
            91,
        ]
    run.close()


def test_a_clock_that_was_set_back_changes_nothing(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", 10)
    for number, (first, end) in enumerate(((0, 12), (10, 25), (20, 30))):
        monkeypatch.setattr(time, "time", partial(float, 1.8e9 - 1e6 * number))
        run.start(first)
        run.train(end)
    assert drawn(run.folder) == undisturbed(tmp_path / "once", 10, {0: 1.0, 10: 2.0, 20: 3.0}, 30)
    run.close()


def test_an_evaluation_that_is_repeated_replaces_the_first(tmp_path):
    run = Run(tmp_path / "run", 10)
    run.start(0)
    run.train(20)  # and is killed, after it evaluated, before that was saved
    run.start(20, evaluates=True)
    run.train(25)
    assert drawn(run.folder)["eval/top1"] == [(10, 1.0), (20, 2.0)]
    assert drawn(run.folder)["over_epochs_x100/eval_loss"] == [(100, 1.0), (200, 2.0)]
    lines = [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]
    places = [(line["step"], line["split"]) for line in lines]
    assert len(set(places)) == len(places)
    (moved,) = (run.folder / SUPERSEDED).read_text().splitlines()
    assert json.loads(moved) == {
        "step": 20,
        "epoch": 2.0,
        "split": "eval",
        "time": 1e9 + 20,
        "loss": 1.0,
        "top1": 1.0,
    }
    run.close()


@pytest.mark.parametrize("seed", range(6))
def test_any_kills_rollbacks_and_clocks(tmp_path, monkeypatch, seed):
    """Also a last record that is torn, and an old file that a killed start had no time to remove."""
    chance, run, starts = random.Random(seed), Run(tmp_path / "run", 7), {}
    step = 0
    for _ in range(8):
        now = chance.uniform(1e9, 2e9)
        monkeypatch.setattr(time, "time", partial(float, now))
        left = [(path.name, path.read_bytes()) for path in run.folder.glob("events.out.tfevents*")]
        if step and chance.random() < 0.3:
            run.rewind(first := chance.randint(0, step))
        else:
            run.start(first := chance.randint(0, step))
            for name, content in left[: chance.randint(0, 1)]:
                (run.folder / name).write_bytes(content)
        starts = {begin: value for begin, value in starts.items() if begin < first} | {first: run.value}
        run.train(step := first + chance.randint(1, 20))
        if chance.random() < 0.3:
            newest = max(run.folder.glob("events.out.tfevents*"))
            with newest.open("ab") as file:
                file.write(newest.read_bytes()[-40 : -chance.randint(1, 30)])
    run.rewind(step)
    assert drawn(run.folder) == undisturbed(tmp_path / "once", 7, starts, step)
    run.close()


def test_figures_of_an_analysis_replace_those_of_the_same_step(tmp_path, monkeypatch):
    figure, run = as_png(new_figure(1, 1)[0]), Run(tmp_path / "run", 10)
    run.start(0)
    run.train(5)
    with hold(run.folder):  # while it is trained its own file is left alone
        add_to_tensorboard({"filters": figure}, run.folder)
        run.train(8)
    assert [step for step, _ in drawn(run.folder)["loss/train"]] == list(range(1, 9))
    run.close()
    for _ in range(2):
        add_to_tensorboard({"filters": figure}, run.folder)
    found = drawn(run.folder)
    assert found["analysis/filters"] == [(0, 0.0)]
    assert [step for step, _ in found["loss/train"]] == list(range(1, 9))
    assert found["recipe/text_summary"] == [(0, 0.0)]
    monkeypatch.setattr(of_analyses.checkpoint, "find", lambda run: Namespace(position=Namespace(step=6)))
    for _ in range(2):
        add_to_tensorboard({"filters": figure}, run.folder)
    assert [step for step, _ in drawn(run.folder)["analysis/filters"]] == [0, 6]
    run.close()


def test_a_file_that_a_killed_start_had_not_finished_counts_for_nothing(tmp_path):
    run = Run(tmp_path / "run", 10)
    run.start(0)
    run.train(5)
    before = drawn(run.folder)
    (written,) = run.folder.glob("events.out.tfevents*")
    unfinished = run.folder / f".{written.name}.1"
    unfinished.write_bytes(written.read_bytes()[:300])
    assert drawn(run.folder) == before
    run.start(5)
    assert drawn(run.folder) == before
    assert not unfinished.exists()
    run.close()


def test_what_is_shown_is_on_disk_at_once(tmp_path):
    run = Run(tmp_path / "run", 10)
    run.start(0)
    assert "recipe/text_summary" in drawn(run.folder)
    assert any(b"session_start_info" in path.read_bytes() for path in run.folder.glob("events*"))
    run.writer.show("confusion", IMAGE, 1)
    assert drawn(run.folder)["confusion"] == [(1, 0.0)]
    run.close()


def test_what_is_taken_over_is_on_disk_before_the_files_that_had_it_are_removed(tmp_path):
    run = Run(tmp_path / "run", 10)
    run.start(0)
    run.train(5)
    run.close()
    before = drawn(run.folder)["loss/train"]
    taken = EventFile(run.folder, partial(is_repeated, step=3, evaluates=False))  # and is killed
    assert drawn(run.folder)["loss/train"] == before[:3]
    taken.close()


@pytest.mark.parametrize(
    ("tag", "at", "evaluates", "repeated"),
    [
        ("loss/train", 5, True, False),
        ("loss/train", 6, False, True),
        ("eval/top1", 5, True, True),
        ("eval/top1", 5, False, False),
        ("eval/top1", 4, True, False),
        ("loss/eval_ema", 5, True, True),
        ("over_epochs_x100/eval_top1", 5, True, True),
        ("over_epochs_x100/train_loss", 5, True, False),
        ("mistakes", 5, True, True),
        ("confusion", 5, True, True),
        ("first_batch", 1, True, False),
        ("analysis/filters", 0, True, False),
        ("recipe/text_summary", 0, False, True),
        ("environment/text_summary", 0, False, True),
        ("custom_scalars__config__", 0, False, True),
        ("_hparams_/session_start_info", 0, False, True),
    ],
)
def test_a_start_from_step_5_repeats_what_is_beyond_it_its_evaluation_and_its_description(
    tag, at, evaluates, repeated
):
    assert is_repeated(tag, at, step=5, evaluates=evaluates) is repeated


def test_recipe_and_environment_are_shown_as_what_they_are(tmp_path):
    environment = {"torch": "2.8.0", "ranks": 2}
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    writer.add_description(RECIPE, environment)
    writer.close()
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    said = {
        name: board.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0]
        for name in ("recipe", "environment")
    }
    blocks = {name: text.decode().removesuffix("\n```").split("\n", 1) for name, text in said.items()}
    assert [kind for kind, _ in blocks.values()] == ["```yaml", "```json"]
    assert yaml.safe_load(blocks["recipe"][1]) == yaml.safe_load(dump_recipe(RECIPE))
    assert json.loads(blocks["environment"][1]) == environment


def test_values_of_keys_are_what_tensorboard_can_show():
    values = (True, 3, 2.5, "name", None, math.inf, [1, 2])
    assert [tensorboard._plain(value) for value in values] == [True, 3, 2.5, "name", "None", "inf", "[1, 2]"]
    assert tensorboard._plain(True) is True


def test_losses_stand_after_the_accuracies_also_that_of_the_average(tmp_path):
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    writer.write({"step": 3, "epoch": 1.0, "split": "eval", "loss": 1.5, "ema_loss": 0.5, "ema_top1": 60.0})
    writer.close()
    found = {tag: points[0][1] for tag, points in drawn(tmp_path).items()}
    assert found == {"loss/eval": 1.5, "loss/eval_ema": 0.5, "eval/ema_top1": 60.0, "over_epochs_x100/eval_loss": 1.5}


@pytest.mark.parametrize("damage", ["a bit of the last", "a bit of the last, and a torn one behind it", "the third"])
def test_records_are_taken_over_up_to_the_first_that_is_damaged(tmp_path, damage):
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    for step in range(1, 6):
        writer.write({"step": step, "split": "train", "loss": 1.0})
    writer.close()
    (path,) = tmp_path.glob("events.out.tfevents*")
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
    writer.write({"step": 6, "split": "train", "loss": 1.0})
    writer.close()
    left = [1, 2] if damage == "the third" else [1, 2, 3, 4]
    assert [step for step, _ in drawn(tmp_path)["loss/train"]] == [*left, 6]


def test_a_file_is_closed_also_on_a_full_disk(tmp_path):
    events = EventFile(tmp_path, None)
    with disk_of(10):
        events.add_event(Event(step=1, file_version=100 * "x"))
        events.close()
    assert events._file.closed


def test_a_new_file_is_the_last_by_its_name_whatever_the_clock_says(tmp_path, monkeypatch):
    """As two starts within a second, and after a clock was set back twice."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    names = [f"events.out.tfevents.{seconds}" for seconds in ("1500000000.here.1.0", "1600000000.here.1.1", "mine")]
    for name in names:
        (tmp_path / name).touch()
    hidden = tmp_path / ".events.out.tfevents.1700000000.here.1.2"  # which another process writes
    hidden.touch()
    for _ in range(3):
        EventFile(tmp_path, None).close()
    assert hidden.exists()
    hidden.unlink()
    *found, _ = sorted(path.name for path in tmp_path.iterdir())
    seconds = [int(name.split(".")[3]) for name in found]
    assert seconds == [1_500_000_000, 1_600_000_000, 1_600_000_001, 1_600_000_002, 1_600_000_003]
