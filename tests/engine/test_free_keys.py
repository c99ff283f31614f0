"""Keys that a run may change change no loss; tests/recipe/test_identity.py has all keys."""

import pytest

from tests.engine.ranks import EMA, Setting, overrides_for
from tests.recipe.test_identity import FREE_KEYS

CHANGES = [
    ("data.checksums", "false"),
    ("data.workers", "2"),
    ("data.prefetch_batches", "1"),
    ("data.prefetch_mib", "1"),
    ("train.grad_accum_steps", "2"),
    ("train.activation_checkpointing", "true"),
    ("train.ema_device", "cpu"),
    ("engine.kind", "fsdp"),
    ("engine.memory_layout", "batch_last"),
    ("engine.bucket_cap_mb", "1"),
    ("engine.gradient_as_bucket_view", "false"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_free_keys_change_no_loss(digits):
    def losses(*changes: tuple[str, str]) -> list[float]:
        setting = Setting("mixer", digits, *overrides_for("ddp"), ("model.depth", "1"), *EMA, *changes)
        return setting.run(setting.engine(), range(3))

    expected = losses()
    for change in CHANGES:
        assert change[0] in FREE_KEYS
        assert losses(change) == pytest.approx(expected, rel=1e-6), change
