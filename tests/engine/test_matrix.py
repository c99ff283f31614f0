"""Each two of the matrix's values that go together train, resume and export together; others are refused."""

import re

import pytest

from tests.engine.matrix import ENGINES, run_cell

pytestmark = pytest.mark.filterwarnings("ignore")

PLAIN = {"network": "plain", "engine": "ddp", "precision": "fp32", "optimizer": "adamw"}
NEVER = {
    "deepspeed 0": {"bf16", "fp16"},
    "deepspeed 1": {"fp16", "lamb", "muon"},  # fp16 on a GPU
    "deepspeed 2": {"fp16", "lamb", "muon"},
    "deepspeed 3": {"fp16", "lamb", "muon", "schedule_free", "true"},  # compiled: not tried here
    "schedule_free": {"0.9"},  # it has an average of its own
}


@pytest.mark.long
@pytest.mark.parametrize(("job", "count"), [("matrix_begun", 6), ("matrix", 67)])
def test_each_two_values_train_on_two_ranks(job, count, ranks):
    cells, never = ranks(2, job)
    assert {cell: result for cell, result in cells.items() if result != "trained"} == {}
    assert len(cells) == count
    found: dict[str, set[str]] = {}
    for (_, one), (_, other) in never:
        found.setdefault(one, set()).add(other)
    assert found == NEVER


UNUSED = (
    r"model: the loss does not depend on 7 of its parameters \(token, blocks.0..*train.freeze \[unused\] leaves out"
)
SHARDS = r"optim.name {}: its step fails on the shards of engine.kind fsdp \(aten\..*take engine.kind ddp$"
# DeepSpeed would train with another Adagrad, whose rate and decay are not the recipe's.
SLICES = r"optim.name timm:adagrad makes its state when it is built, before ZeRO has cut"
EMA = {"ema": "0.9"}


def some(n: int, *rows: tuple) -> list:
    """Of which each n-th runs in `make test`."""
    return [pytest.param(*row, marks=pytest.mark.one_in(n)) for row in rows]


@pytest.mark.parametrize(
    ("network", "engine", "others", "refused"),
    [
        *some(5, *(("unused", engine, {}, UNUSED) for engine in ENGINES)),
        *(
            ("plain", "fsdp", {"optimizer": name}, SHARDS.format(name))
            for name in ("timm:cadamw", "timm:sgdp", "timm:clion")
        ),
        *(("plain", f"deepspeed {stage}", {"optimizer": "timm:adagrad"}, SLICES) for stage in (1, 2, 3)),
        *(("plain", "ddp", {"optimizer": name}, None) for name in ("timm:adan", "timm:lion", "timm:lamb")),
        # Weights in another order in memory are saved in theirs, and one number has a rank to itself.
        ("channels_last", "ddp", {}, None),
        ("scalar", "fsdp", {}, None),
        # Buffers stay float32 in half precision.
        *(("tables", engine, {"precision": "bf16", **EMA}, None) for engine in ("fsdp", "deepspeed 1")),
        # A stage whose blocks are called from outside when they are recomputed.
        ("timm:test_efficientnet", "fsdp", {"recompute": "true"}, None),
        # Matrices of factors, with a rate of its own for each; standardised weights; batch norms of timm's own.
        *some(
            2,
            ("structured", "fsdp", {"freeze": "", **EMA}, None),
            ("structured", "deepspeed 1", {"precision": "bf16", "freeze": "", **EMA}, None),
            ("structured", "deepspeed 3", {"freeze": "", **EMA}, None),
            ("timm:test_nfnet", "fsdp", EMA, None),
            ("timm:test_nfnet", "deepspeed 3", {"precision": "bf16", **EMA}, None),
            ("timm:test_efficientnet", "fsdp", {"precision": "bf16", **EMA}, None),
            ("timm:test_efficientnet", "deepspeed 1", {"precision": "bf16", **EMA}, None),
            ("timm:test_vit", "deepspeed 2", {"precision": "bf16", **EMA}, None),
        ),
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_cell_trains_or_is_refused_with_a_reason(network, engine, others, refused):
    result = run_cell(PLAIN | {"network": network, "engine": engine} | others)
    assert re.match(f"refused: {refused}", result) if refused else result == "trained"
