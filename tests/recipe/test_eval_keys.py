"""Every key of section `eval` does what its help says, with a value that is not its default."""

import pytest

from tests.recipe.small_runs import Row, SmallRun
from widemix.recipe.sections import EvalSection

EVAL = {
    "every_epochs": Row("2", SmallRun.evaluated, [8, 12], (("train.epochs", "3"),)),
    # An epoch takes four minutes: that which ends at 12 does so four minutes after the evaluation at 8.
    "every_minutes": Row("5.0", SmallRun.evaluated, [8, 16, 20], (("train.epochs", "5"),)),
    "batch_size": Row(
        "8", lambda run: [len(images) for images, _ in run.called("stem", training=False)], [8, 8, 4, 8, 8, 4]
    ),
}


@pytest.mark.parametrize("key", EVAL)
def test_a_key_does_what_it_is_for(key, runs):
    EVAL[key].check(f"eval.{key}", runs)


def test_the_table_has_every_key():
    assert set(EVAL) == set(EvalSection.model_fields)
