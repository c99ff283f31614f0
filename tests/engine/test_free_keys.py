"""Keys that a run may change change no loss, on any engine; tests/recipe/test_recipe_hash.py has all keys."""

import pytest

from tests.engine.ranks import EMA, Setting, overrides_for
from tests.recipe.test_recipe_hash import FREE_KEYS

BUCKETS = [("engine.bucket_cap_mb", "1")]
ZERO = [*BUCKETS, ("engine.overlap_comm", "false"), ("engine.cpu_offload", "true")]
CHANGES = {
    "ddp": [
        ("data.checksums", "false"),
        ("data.workers", "2"),
        ("data.prefetch_batches", "1"),
        ("data.prefetch_mib", "1"),
        ("train.grad_accum_steps", "2"),
        ("train.activation_checkpointing", "true"),
        ("train.ema_device", "cpu"),
        ("engine.kind", "fsdp"),
        ("engine.memory_layout", "batch_last"),
        ("engine.gradient_as_bucket_view", "false"),
        ("engine.static_graph", "true"),
        *BUCKETS,
    ],
    "fsdp": [("engine.cpu_offload", "true")],
    "deepspeed 1": ZERO,
    "deepspeed 2": ZERO,
    "deepspeed 3": ZERO,
}
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]


def losses(digits, name, *changes: tuple[str, str]) -> list[float]:
    setting = Setting("mixer", digits, *overrides_for(name), ("model.depth", "1"), *EMA, *changes)
    return setting.run(setting.engine(), range(3))


@pytest.fixture(scope="module")
def expected(alone, digits):
    return losses(digits, "ddp")


@pytest.mark.parametrize(("name", "change"), [(name, each) for name, rows in CHANGES.items() for each in rows])
def test_free_keys_change_no_loss(digits, expected, name, change):
    assert change[0] in FREE_KEYS
    assert losses(digits, name, change) == pytest.approx(expected, rel=1e-6)
