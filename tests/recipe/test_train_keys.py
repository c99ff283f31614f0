"""Every key of section `train` does what its help says, with a value that is not its default."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import widemix.trainer
from tests.conftest import ROOT
from tests.recipe.small_runs import Row, SmallRun, differs, flat
from widemix.data.batches import Batch
from widemix.engine.batch_norm import _OverRanks
from widemix.engine.ema import Ema
from widemix.models.registry import build_model
from widemix.recipe.sections import TrainSection


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
ROWS = [(key, row) for key, rows in TRAIN.items() for row in (rows if isinstance(rows, tuple) else (rows,))]


@pytest.mark.parametrize(("key", "row"), ROWS, ids=[key for key, _ in ROWS])
def test_a_key_does_what_it_is_for(key, row, runs):
    if key == "fp8" and not hasattr(torch.nn.functional, "ScalingType"):
        pytest.skip("torchao 0.18 needs a newer torch than 2.9")
    row.check(f"train.{key}", runs)


def test_the_table_has_every_key():
    assert set(TRAIN) == set(TrainSection.model_fields)
