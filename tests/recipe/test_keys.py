"""Every key of these sections does what its help says, with a value that is not its default.

Where other tests compare the numbers that a key leads to (tests/engine, tests/training), a run differs with it.
"""

import itertools
import json
import math
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import widemix.trainer
from tests.recipe.small_runs import Row, SmallRun, differs, flat, isolate
from tests.run.test_trackers import Server
from widemix.data.loader import TrainLoader
from widemix.distributed.watchdog import Watchdog
from widemix.models.registry import build_model
from widemix.recipe.key_table import families


def cosine(steps: int) -> list[float]:
    """The rates of a run of so many steps, from the recipe's 0.004 to 0.00001."""
    return [1e-5 + (4e-3 - 1e-5) * (1 + math.cos(math.pi * step / (steps - 1))) / 2 for step in range(steps)]


def sizes(run: SmallRun) -> list[list[int]]:
    return [[len(batch.inputs) for batch in batches] for batches in run.steps]


def losses(run: SmallRun) -> list[float]:
    return run.column("train", "loss")


def averaged_losses(run: SmallRun) -> list[float]:
    return run.column("eval", "ema_loss")


def by_sample(run: SmallRun, name: str) -> dict[int, Any]:
    """What the samples have in the first epoch."""
    pairs = [zip(batch.samples.tolist(), getattr(batch, name).tolist(), strict=True) for (batch,) in run.steps[:4]]
    return dict(itertools.chain(*pairs))


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
ALL_KEPT = ("train.keep_last", "9")
EACH_SAVED = ("train.save_every_steps", "1")
FOUR_EPOCHS = ("train.epochs", "4"), ("train.keep_best", "loss")
TRAIN: dict[str, Row | tuple[Row, ...]] = {
    "epochs": Row("3", lambda run: run.rates, pytest.approx(cosine(12))),
    "global_batch": Row("10", sizes, [[10]] * 4),
    "grad_accum_steps": Row("5", sizes, [[1] * 5] * 8),
    "precision": differs("bf16", losses),
    "fp8": differs("true", losses, ("train.precision", "bf16"), ("model.channels", "16")),
    "loss": differs("sigmoid", losses),
    "class_weights": differs("{0: 3, 1: 0}", losses),
    "matmul_precision": Row(
        "high", lambda run: (run.settings["matmul_precision"], run.settings["tf32"]), ("high", True)
    ),
    "head_bias": Row("-3.0", lambda run: run.weights[0]["head.bias"].tolist(), [-3.0] * 10),
    "activation_checkpointing": Row("true", lambda run: run.entered, 2 * 8),
    "compile": Row("true", lambda run: run.compiled, 8 + 2),
    "ema_decay": differs("0.5", averaged_losses, ("train.ema_decay", "0.9")),
    "ema_warmup": differs("true", averaged_losses, ("train.ema_decay", "0.9")),
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
        differs("7", lambda run: by_sample(run, "inputs")),
        differs("7", mixup_fractions, *MIXUP),
        differs("7", lambda run: by_sample(run, "keys")),
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
    "batch_size": Row("8", lambda run: run.evaluated_sizes, [8, 8, 4] * 2),
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


def noted_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog writes down after how long it ends a rank."""

    class Noted(Watchdog):
        def __init__(self, run_dir, topology, store, timeout_s, *rest, **others):
            super().__init__(run_dir, topology, store, timeout_s, *rest, **others)
            (run_dir / "timeout.txt").write_text(f"{timeout_s}")

    monkeypatch.setattr(widemix.trainer, "Watchdog", Noted)


def spikes(run: SmallRun) -> list[int]:
    return [step for event, step in run.events() if event == "loss_spike"]


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
    "loss_spike_std": differs(
        "0.5", spikes, ("train.epochs", "10"), ("schedule.name", "constant"), ("optim.lr", "0.1")
    ),
    "hang_timeout_s": Row("5", lambda run: (run.folder / "timeout.txt").read_text(), "5", patch=noted_timeout),
}


def every_third(run: SmallRun) -> list[Any]:
    """The steps and losses of lines of three steps, and of the two that are left."""
    means = (np.mean(run.losses[first:last]) for first, last in ((0, 3), (3, 6), (6, 8)))
    return [3, 6, 8, *map(pytest.approx, means)]


def faked_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases and MLflow, with a server that gives each run a number."""
    isolate(monkeypatch, "WANDB_PROJECT", *(f"MLFLOW_{name}" for name in MLFLOW))
    Server(monkeypatch)
    for name in ("wandb", "mlflow"):
        monkeypatch.setattr(f"{name}.__spec__", ModuleSpec(name, None), raising=False)


MLFLOW = ("TRACKING_URI", "EXPERIMENT_NAME", "HTTP_REQUEST_MAX_RETRIES", "HTTP_REQUEST_TIMEOUT")


def tracked(run: SmallRun) -> Any:
    path = run.folder / "trackers.json"
    return json.loads(path.read_text()) if path.exists() else None


def block_norms(run: SmallRun) -> list[list[str]]:
    return [[key for key in line if key.startswith("grad_norm/")] for line in run.lines("train")]


def tiles(run: SmallRun, name: str) -> int:
    """Images of 8 x 8 pixels in a grid of one row, each 14 times as large, with gaps of 8."""
    path = run.folder / f"images/{name}.png"
    if not path.exists():
        return 0
    with Image.open(path) as image:
        return (image.width - 8) // (14 * 8 + 8)


BLOCKS = ("stem", "blocks.0", "blocks.1", "norm", "head")
LOG = {
    "every": Row("3", lambda run: [*run.column("train", "step"), *run.column("train", "loss")], every_third),
    "tensorboard": Row("true", lambda run: len([*run.folder.glob("events*")]), 1),
    "wandb": Row("true", tracked, {"wandb": "wandb 1"}, patch=faked_trackers),
    "mlflow": Row("true", tracked, {"mlflow": "mlflow 1"}, patch=faked_trackers),
    "block_norms": Row("true", block_norms, [[f"grad_norm/{name}" for name in BLOCKS]] * 8),
    "mistakes": Row("3", lambda run: tiles(run, "mistakes"), 3),
    "images": Row("3", lambda run: tiles(run, "first_batch"), 3),
}


def layouts(run: SmallRun) -> list[bool]:
    return [block.batch_last for block in run.loop.engine.module.blocks]


ENGINE = {  # what reaches a whole run; tests/engine/test_section_keys.py has every key
    "timeout_s": Row("2345", lambda run: run.settings["timeout_s"], 2345.0),
    "memory_layout": Row("batch_last", layouts, [True, True]),
}
ELSEWHERE = {"ema_device", "sync_batch_norm"}  # of train: which the engines of tests/engine read too
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
    left_out = ELSEWHERE if section == "train" else set()
    assert TABLES[section].keys() | left_out == families(section)[0].model_fields.keys()
