"""Each two of the matrix's values that go together train, resume and export together; others are refused."""

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


@pytest.mark.one_in(5)
@pytest.mark.parametrize("engine", ENGINES)
def test_unused_parameters_are_refused_by_all_engines_alike(alone, engine):
    result = run_cell(PLAIN | {"network": "unused", "engine": engine})
    assert result.startswith("refused: model: the loss does not depend on 7 of its parameters (token, blocks.0.")
    assert "train.freeze [unused] leaves out" in result


@pytest.mark.parametrize("optimizer", ["timm:cadamw", "timm:sgdp", "timm:clion"])
def test_optimizers_that_cannot_step_on_shards_are_refused(alone, optimizer):
    result = run_cell(PLAIN | {"engine": "fsdp", "optimizer": optimizer})
    assert result.startswith(
        f"refused: optim.name {optimizer}: its step fails on the shards of engine.kind fsdp (aten."
    )
    assert result.endswith("take engine.kind ddp")


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_an_optimizer_with_state_before_slices_is_refused(alone, stage):
    """DeepSpeed would train with another Adagrad, whose rate and decay are not the recipe's."""
    result = run_cell(PLAIN | {"engine": f"deepspeed {stage}", "optimizer": "timm:adagrad"})
    assert result.startswith("refused: optim.name timm:adagrad makes its state when it is built, before ZeRO has cut")


@pytest.mark.parametrize("optimizer", ["timm:adan", "timm:lion", "timm:lamb"])
def test_timms_optimizers_resume_exactly(alone, optimizer):
    assert run_cell(PLAIN | {"optimizer": optimizer}) == "trained"


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed 1"])
def test_buffers_stay_float32_in_half_precision(alone, engine):
    cell = PLAIN | {"network": "tables", "engine": engine, "precision": "bf16", "ema": "0.9"}
    assert run_cell(cell) == "trained"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("engine", "precision"), [("fsdp", "fp32"), ("deepspeed 1", "bf16"), ("deepspeed 3", "fp32")]
)
def test_structured_matrices(alone, engine, precision):
    """With a rate of its own for each factor."""
    cell = PLAIN | {"network": "structured", "engine": engine, "precision": precision, "ema": "0.9", "freeze": ""}
    assert run_cell(cell) == "trained"


TIMM = [
    ("test_nfnet", "fsdp", "fp32"),  # standardised weights; scalars: the part of the toys
    ("test_nfnet", "deepspeed 3", "bf16"),
    ("test_efficientnet", "fsdp", "bf16"),  # batch norms of timm's own
    ("test_efficientnet", "deepspeed 1", "bf16"),
    ("test_vit", "deepspeed 2", "bf16"),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("network", "engine", "precision"), TIMM)
def test_networks_of_timm(alone, network, engine, precision):
    cell = PLAIN | {"network": f"timm:{network}", "engine": engine, "precision": precision, "ema": "0.9"}
    assert run_cell(cell) == "trained"


def test_a_stage_whose_blocks_are_recomputed(alone):
    cell = PLAIN | {"network": "timm:test_efficientnet", "engine": "fsdp", "recompute": "true"}
    assert run_cell(cell) == "trained"
