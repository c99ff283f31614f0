"""Every key of these sections does what its help says, with a value that is not its default."""

import itertools
import json
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import widemix.trainer
from tests.conftest import ROOT
from tests.recipe.small_runs import Row, SmallRun, differs, flat
from widemix.data.batches import Batch
from widemix.data.loader import TrainLoader
from widemix.distributed import watchdog
from widemix.distributed.watchdog import Watchdog
from widemix.engine.batch_norm import _OverRanks
from widemix.engine.ema import Ema
from widemix.models.registry import build_model
from widemix.recipe.key_table import families
from widemix.run import trackers
from widemix.training.loop import Loop


def cosine(steps: int) -> list[float]:
    """The rates of a run of so many steps, from the recipe's 0.004 to 0.00001."""
    return [1e-5 + (4e-3 - 1e-5) * (1 + math.cos(math.pi * step / (steps - 1))) / 2 for step in range(steps)]


def sizes(run: SmallRun) -> list[list[int]]:
    return [[len(batch.inputs) for batch in batches] for batches in run.steps]


def dtypes(run: SmallRun) -> list[torch.dtype]:
    """Of batches and logits, in training and evaluation, and of the weights."""
    pairs = [pair for training in (True, False) for pair in run.called("head", training)]
    batches = [run.called("stem", training)[0][0].dtype for training in (True, False)]
    return [*batches, *{found.dtype for _, found in pairs}, *{value.dtype for value in run.weights[-1].values()}]


def in_float8(run: SmallRun) -> set[str]:
    return {name for name, part in run.loop.engine.module.named_modules() if type(part).__name__ == "Float8Linear"}


def sigmoid_losses(run: SmallRun) -> object:
    logits = [found for _, found in run.called("head", training=True)]
    return pytest.approx(
        [
            binary_cross_entropy_with_logits(found, batch.targets, reduction="none").sum(1).mean().item()
            for found, (batch,) in zip(logits, run.steps, strict=True)
        ]
    )


def weighted_losses(run: SmallRun) -> object:
    logits, weight = [found for _, found in run.called("head", training=True)], torch.tensor([3.0, 0, *[1.0] * 8])
    pairs = zip(logits, run.steps, strict=True)
    return pytest.approx([cross_entropy(found, batch.targets, weight).item() for found, (batch,) in pairs])


def by_sample(run: SmallRun, values: Callable[[Batch], list[Any]]) -> dict[int, Any]:
    """What the samples have in the first epoch."""
    pairs = [zip(batch.samples.tolist(), values(batch), strict=True) for (batch,) in run.steps[:4]]
    return dict(itertools.chain(*pairs))


def saved_average(run: SmallRun) -> dict[str, torch.Tensor] | None:
    path = run.folder / "checkpoints/00000008/ema/model.safetensors"
    return load_file(path) if path.exists() else None


def average(run: SmallRun, decays: Sequence[float]) -> dict[str, torch.Tensor]:
    """Of the weights after each step, from the first ones on."""
    found = run.weights[0]
    for decay, weights in zip(decays, run.weights[1:], strict=True):
        found = {name: decay * found[name] + (1 - decay) * weights[name] for name in found}
    return found


def average_and_loss(run: SmallRun) -> object:
    saved = saved_average(run)
    return [*flat(saved), run.lines("eval")[-1]["ema_loss"]] if saved else None


def expected_average_and_loss(run: SmallRun, decays: Sequence[float]) -> object:
    found = average(run, decays)
    labels = by_sample(run, lambda batch: batch.targets.argmax(1).tolist())
    images = run.called("stem", training=False)[-1][0]
    module = run.loop.engine.module.eval()
    loss = cross_entropy(functional_call(module, found, images), torch.tensor([labels[i] for i in range(20)]))
    return pytest.approx([*flat(found), loss.item()], abs=1e-6)


def device_of_average(run: SmallRun) -> str:
    """Of weights on a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        average = Ema(run.loop.recipe.train.model_copy(update={"ema_decay": 0.9}), [torch.ones(2, device="cuda")])
        return average._tensors[0].device.type


def over_ranks(run: SmallRun) -> bool:
    return any(isinstance(part, _OverRanks) for part in run.loop.engine.module.modules())


def other(run: SmallRun) -> dict[str, torch.Tensor]:
    """The last weights of the run that this one starts from."""
    from_run = run.loop.recipe.train.init_from
    return load_file(f"{from_run}/checkpoints/00000008/model.safetensors")


def taken_over(run: SmallRun) -> set[str]:
    theirs = other(run)
    return {name.partition(".")[0] for name, value in run.weights[0].items() if torch.equal(value, theirs[name])}


def trained(run: SmallRun) -> set[str]:
    first, last = run.weights[0], run.weights[-1]
    return {name.rpartition(".")[0] for name in first if not torch.equal(first[name], last[name])}


def seeded_with_7(run: SmallRun) -> list[float]:
    torch.manual_seed(7)
    return flat(build_model(run.loop.recipe.model, 8, 10).state_dict())


def mixup_fractions(run: SmallRun) -> list[float]:
    """The smaller of the two of each step, in which all images are mixed by the same ones."""
    return [batch.targets[batch.targets > 0].min().item() for (batch,) in run.steps]


def losses_2_1_4_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluations find these."""
    losses = iter((2.0, 1.0, 4.0, 3.0))
    monkeypatch.setattr(widemix.trainer, "evaluate_engine", lambda *_, **__: {"loss": next(losses), "top1": 50.0})


MIXUP = (("augment.mixup", "0.8"), ("augment.mix_group", "10"), ("train.global_batch", "10"))
WARMED_UP = [min(0.9, 1 - step ** (-2 / 3)) for step in range(1, 9)]
ALL_KEPT = ("train.keep_last", "9")
EACH_SAVED = ("train.save_every_steps", "1")
FOUR_EPOCHS = ("train.epochs", "4"), ("train.keep_best", "loss")
TRAIN: dict[str, Row | tuple[Row, ...]] = {
    "epochs": Row("3", lambda run: run.rates, pytest.approx(cosine(12))),
    "global_batch": Row("10", sizes, [[10]] * 4),
    "grad_accum_steps": Row("5", sizes, [[1] * 5] * 8),
    "precision": Row("bf16", dtypes, [torch.bfloat16] * 3 + [torch.float32]),
    "fp8": Row(
        "true",
        in_float8,
        {
            f"blocks.{block}.mlp_{mixing}.fc{i}"
            for block in (0, 1)
            for mixing in ("tokens", "channels")
            for i in (1, 2)
        },
        (("train.precision", "bf16"), ("model.channels", "16")),
    ),
    "loss": Row("sigmoid", lambda run: run.column("train", "loss"), sigmoid_losses),
    "class_weights": Row("{0: 3, 1: 0}", lambda run: run.column("train", "loss"), weighted_losses),
    "matmul_precision": Row(
        "high", lambda run: (run.settings["matmul_precision"], run.settings["tf32"]), ("high", True)
    ),
    "head_bias": Row("-3.0", lambda run: run.weights[0]["head.bias"].tolist(), [-3.0] * 10),
    "activation_checkpointing": Row("true", lambda run: run.entered, 2 * 8),
    "compile": Row("true", lambda run: run.compiled, 8 + 2),
    "ema_decay": Row("0.5", average_and_loss, lambda run: expected_average_and_loss(run, [0, *[0.5] * 7])),
    "ema_warmup": Row(
        "true",
        average_and_loss,
        lambda run: expected_average_and_loss(run, WARMED_UP),
        (("train.ema_decay", "0.9"),),
    ),
    "ema_device": Row("cpu", device_of_average, "cpu"),
    "sync_batch_norm": Row("false", over_ranks, False, recipe=ROOT / "tests/engine/repmlp.yaml"),
    "deterministic": Row(
        "true",
        lambda run: [run.settings[name] for name in ("deterministic", "benchmark", "cublas", "nccl")],
        [True, False, ":4096:8", "^NVLS,NVLSTree"],
    ),
    "init_from": Row("OTHER", lambda run: flat(run.weights[0]), lambda run: flat(other(run))),
    "reset_head": Row("true", taken_over, {"stem", "blocks", "norm"}, (("train.init_from", "OTHER"),)),
    "freeze": Row(
        "[stem.*, blocks.0.*, blocks.1.norm*]",
        trained,
        {*(f"blocks.1.mlp_{mixing}.fc{i}" for mixing in ("tokens", "channels") for i in (1, 2)), "norm", "head"},
    ),
    "seed": (
        Row("7", lambda run: flat(run.weights[0]), seeded_with_7),
        differs("7", SmallRun.samples),
        differs("7", lambda run: by_sample(run, lambda batch: batch.inputs.tolist())),
        differs("7", mixup_fractions, *MIXUP),
        differs("7", lambda run: by_sample(run, lambda batch: batch.keys.tolist())),
    ),
    "profile": Row(
        "2:4",
        lambda run: [path.name for path in (run.folder / "profile").glob("*")],
        ["steps-2-4.pt.trace.json.gz"],
    ),
    "max_steps": Row("3", lambda run: run.rates, pytest.approx(cosine(8)[:3])),
    "save_every_steps": Row("3", SmallRun.kept, [3, 6, 8], (ALL_KEPT,)),
    # What a rank asks for is done one step later.
    "save_minutes": Row("2.0", SmallRun.kept, [3, 5, 7, 8], (ALL_KEPT,)),
    "keep_last": Row("1", SmallRun.kept, [8], (EACH_SAVED,)),
    "keep_best": Row(
        "loss",
        SmallRun.kept,
        [8, 16],
        (("train.epochs", "4"), ("train.keep_last", "1"), ("train.save_every_steps", "3")),
        patch=losses_2_1_4_3,
    ),
    "patience_epochs": Row("1", SmallRun.evaluated, [4, 8, 12], FOUR_EPOCHS, patch=losses_2_1_4_3),
    "patience_gain": Row(
        "1.5", SmallRun.evaluated, [4, 8, 12], (*FOUR_EPOCHS, ("train.patience_epochs", "2")), patch=losses_2_1_4_3
    ),
    "keep_every_steps": Row("3", SmallRun.kept, [3, 6, 7, 8], (EACH_SAVED,)),
}


EVAL = {
    "every_epochs": Row("2", SmallRun.evaluated, [8, 12], (("train.epochs", "3"),)),
    # An epoch takes four minutes: that which ends at 12 does so four minutes after the evaluation at 8.
    "every_minutes": Row("5.0", SmallRun.evaluated, [8, 16, 20], (("train.epochs", "5"),)),
    "batch_size": Row(
        "8", lambda run: [len(images) for images, _ in run.called("stem", training=False)], [8, 8, 4, 8, 8, 4]
    ),
}


def nan_at_6_and_7(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of the sixth and the seventh step are NaN."""
    to_device = TrainLoader._to_device

    def faulty(self, host):
        batch = to_device(self, host)
        for epoch, step in (divmod(step, self.steps) for step in (5, 6)):
            if host.epoch == epoch and host.view_ids[0] in self.order.step(epoch, step):
                batch.inputs.fill_(float("nan"))
        return batch

    monkeypatch.setattr(TrainLoader, "_to_device", faulty)


def stuck_at_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step takes 10 s by the watchdog's clock; it looks at it twice in each 2.5 s, and ends nothing."""
    train_step, clock, looks = Loop._train_step, [0.0], threading.Semaphore(0)

    def stuck(self, iterator):
        train_step(self, iterator)
        if self.step == 3:
            for _ in range(4):
                clock[0] += 2.5
                while looks.acquire(blocking=False):  # those from before
                    pass
                for _ in range(2):
                    assert looks.acquire(timeout=60)
            self._watchdog.beat()

    monkeypatch.setattr(watchdog._Countdown, "begin", lambda *_: looks.release())
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(Watchdog, "_exit_with_stacks", lambda self, reason: self._stacks.write(reason))
    monkeypatch.setattr(Loop, "_train_step", stuck)


def hung(run: SmallRun) -> set[str]:
    path = run.folder / "stacks/rank-0.txt"
    return set(re.findall(r"finished in \d+ s", path.read_text())) if path.exists() else set()


def spikes(run: SmallRun) -> list[int]:
    return [step for event, step in run.events() if event == "loss_spike"]


def losses_above(run: SmallRun) -> list[int]:
    """The steps whose loss is half a standard deviation above the mean of those before, of which there are 20."""
    losses = np.array(run.losses)
    found = [step + 1 for step in range(20, 40) if losses[step] > losses[:step].mean() + 0.5 * losses[:step].std()]
    assert 0 < len(found) < 20
    return found


ROLLS_BACK = ("faults.max_skipped_steps", "0")
FAULTS = {
    "max_skipped_steps": Row("1", SmallRun.events, [("rollback", 4)], patch=nan_at_6_and_7),
    "max_rollbacks": Row(
        "0",
        lambda run: (run.events(), run.error[:25]),
        ([("diverged", 6)], "the loss is nan at step 6"),
        (ROLLS_BACK,),
        patch=nan_at_6_and_7,
    ),
    "loss_spike_std": Row(
        "0.5", spikes, losses_above, (("train.epochs", "10"), ("schedule.name", "constant"), ("optim.lr", "0.1"))
    ),
    "hang_timeout_s": Row("5", hung, {"finished in 5 s"}, patch=stuck_at_3),
}


def every_third(run: SmallRun) -> list[Any]:
    """The steps and losses of lines of three steps, and of the two that are left."""
    return [3, 6, 8, *(pytest.approx(fmean(run.losses[first:last])) for first, last in ((0, 3), (3, 6), (6, 8)))]


def in_tensorboard(run: SmallRun) -> list[Any]:
    """Steps, losses of training, and accuracies of evaluations."""
    board = EventAccumulator(str(run.folder), {"scalars": 0})
    board.Reload()
    names = [name for name in ("loss/train", "eval/top1") if name in board.Tags()["scalars"]]
    return [[(event.step, pytest.approx(event.value)) for event in board.Scalars(name)] for name in names]


def in_metrics(run: SmallRun) -> list[Any]:
    pairs = (("train", "loss"), ("eval", "top1"))
    return [list(zip(run.column(split, "step"), run.column(split, name), strict=True)) for split, name in pairs]


def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases and MLflow write their lines into files of the run folder."""

    def tracker(name: str) -> type:
        class Recorder:
            id = name

            def __init__(self, run_dir, *_):
                self.path = run_dir / f"{name}.jsonl"

            def add_line(self, line):
                with self.path.open("a") as file:
                    file.write(f"{json.dumps(line)}\n")

            def close(self, failed):
                return None

        return Recorder

    monkeypatch.setattr(trackers, "_TRACKERS", {name: tracker(name) for name in ("wandb", "mlflow")})


def in_file_of(name: str) -> Row:
    def seen(run: SmallRun) -> list[str]:
        return [
            path.read_text()
            for path in (run.folder / f"{each}.jsonl" for each in ("wandb", "mlflow"))
            if path.exists()
        ]

    def expected(run: SmallRun) -> list[str]:
        assert [path.stem for path in run.folder.glob("*.jsonl") if path.stem in ("wandb", "mlflow")] == [name]
        return [(run.folder / "metrics.jsonl").read_text()]

    return Row("true", seen, expected, patch=in_files)


def block_norms(run: SmallRun) -> list[dict[str, float]]:
    lines = run.lines("train")
    return [{key: value for key, value in line.items() if key.startswith("grad_norm/")} for line in lines]


def gradients_by_block(run: SmallRun) -> object:
    """Of the steps 3, 6 and 8, from what plain SGD has subtracted from the weights."""
    found = []
    for step in (3, 6, 8):
        squares: dict[str, float] = defaultdict(float)
        before, after = run.weights[step - 1 : step + 1]
        for name in before:
            block = ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])
            gradient = (before[name] - after[name]).double() / run.rates[step - 1]
            squares[f"grad_norm/{block}"] += gradient.square().sum().item()
        found.append(pytest.approx({name: math.sqrt(square) for name, square in squares.items()}, rel=1e-3))
    return found


def tiles(run: SmallRun, name: str) -> int:
    """Images of 8 x 8 pixels in a grid of one row, each 14 times as large, with gaps of 8."""
    path = run.folder / f"images/{name}.png"
    if not path.exists():
        return 0
    with Image.open(path) as image:
        return (image.width - 8) // (14 * 8 + 8)


def confusions_and_mistakes(run: SmallRun) -> tuple[Any, int]:
    path = run.folder / "confusion.json"
    return json.loads(path.read_text())["counts"] if path.exists() else None, tiles(run, "mistakes")


def expected_confusions(run: SmallRun) -> tuple[Any, int]:
    labels = {int(i): int(j) for (b,) in run.steps for i, j in zip(b.samples, b.targets.argmax(1), strict=True)}
    counts = np.zeros((10, 10), int)
    for number, guess in enumerate(run.called("head", training=False)[-1][1].argmax(1).tolist()):
        counts[labels[number], guess] += 1
    assert counts.sum() - counts.trace() > 3
    return counts.tolist(), 3


PLAIN_SGD = (
    ("schedule.name", "constant"),
    ("optim.name", "sgd"),
    ("optim.momentum", "0"),
    ("optim.weight_decay", "0"),
    ("optim.lr", "0.5"),
)
LOG = {
    "every": Row("3", lambda run: [*run.column("train", "step"), *run.column("train", "loss")], every_third),
    "tensorboard": Row("true", in_tensorboard, in_metrics),
    "wandb": in_file_of("wandb"),
    "mlflow": in_file_of("mlflow"),
    "block_norms": Row("true", block_norms, gradients_by_block, (("log.every", "3"), *PLAIN_SGD)),
    "mistakes": Row("3", confusions_and_mistakes, expected_confusions),
    "images": Row("3", lambda run: tiles(run, "first_batch"), 3),
}


def layouts(run: SmallRun) -> list[bool]:
    return [block.batch_last for block in run.loop.engine.module.blocks]


ENGINE = {  # what reaches a whole run; tests/engine/test_section_keys.py has every key
    "timeout_s": Row("2345", lambda run: run.settings["timeout_s"], 2345.0),
    "memory_layout": Row("batch_last", layouts, [True, True]),
}
TABLES = {"train": TRAIN, "eval": EVAL, "faults": FAULTS, "log": LOG}
ROWS = [
    pytest.param(f"{section}.{key}", row, id=f"{section}.{key}")
    for section, table in (TABLES | {"engine": ENGINE}).items()
    for key, rows in table.items()
    for row in (rows if isinstance(rows, tuple) else (rows,))
]


@pytest.mark.parametrize(("key", "row"), ROWS)
def test_a_key_does_what_it_is_for(key, row, runs):
    if key == "train.fp8" and not hasattr(torch.nn.functional, "ScalingType"):
        pytest.skip("torchao 0.18 needs a newer torch than 2.9")
    row.check(key, runs)


@pytest.mark.parametrize("section", TABLES)
def test_the_tables_have_every_key(section):
    assert TABLES[section].keys() == families(section)[0].model_fields.keys()
