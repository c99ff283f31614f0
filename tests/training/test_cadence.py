"""When a run saves and evaluates."""

import pytest

from widemix.distributed.requests import Request
from widemix.recipe import load_recipe
from widemix.recipe.sections import EvalSection, LogSection, TrainSection
from widemix.training.schedule import Cadence, rarely_kept, suggest_batch


def when(evaluation=None, **train) -> Cadence:
    return Cadence(TrainSection(epochs=3, global_batch=8, **train), EvalSection(**(evaluation or {})))


@pytest.mark.parametrize(("every", "saved"), [(40, None), (1000, None), (30, None), (30, 10), (25, 10), (5, 10)])
def test_a_run_says_which_steps_it_does_not_keep(every, saved):
    """Of keep_every_steps 1000 and epochs of 1251 steps none was kept, without a word."""
    train = TrainSection(epochs=600, global_batch=8, keep_every_steps=every, save_every_steps=saved)
    given = Cadence(train, EvalSection())
    first = next(step for step in range(every, 30_000, every) if given.saves(step, step % 23 == 0, Request.NONE))
    warning = rarely_kept(train, steps_per_epoch=23)
    assert warning == (
        f"train.keep_every_steps {every}: a run that saves every {saved or 23} steps keeps those of every {first}"
        if first > every
        else None
    )
    assert rarely_kept(train.model_copy(update={"keep_every_steps": None}), 23) is None


def test_the_clock_asks_once_for_each_time(system):
    clock = [100.0]
    system({"time.monotonic": lambda: clock[0]})
    given, asked = when({"every_minutes": 2.0}, save_minutes=3.0), {}
    for clock[0] in range(100, 100 + 12 * 60 + 1):
        request = given.requests()
        if Request.EVALUATE in request:
            given.evaluated()
        if request:
            asked[(clock[0] - 100) / 60] = request
    save, evaluate = Request.SAVE, Request.EVALUATE
    assert asked == {
        2: evaluate, 3: save, 4: evaluate, 6: save | evaluate, 8: evaluate, 9: save, 10: evaluate, 12: save | evaluate
    }  # fmt: skip
    assert when().requests() == Request.NONE


def test_the_minutes_count_from_the_last_evaluation(system):
    clock = [0.0]
    system({"time.monotonic": lambda: clock[0]})
    given, asked = when({"every_minutes": 2.0}), []
    for clock[0] in range(0, 9 * 60 + 1, 30):
        if given.requests():
            asked.append(clock[0] / 60)
        if clock[0] == 5 * 60:  # where the epoch ends
            given.evaluated()
    assert asked == [2, 7]


MIXED = {"augment.mixup": 0.2, "augment.mix_group": 8}


@pytest.mark.parametrize(
    ("samples", "ranks", "keys", "said"),
    [
        (300, 1, {}, "4 steps an epoch of 64; --train.global_batch 15 --optim.lr 4.8e-04 makes 20 (the rate by"),
        (300, 1, {"optim.name": "sgd"}, "--optim.lr 2.3e-04 makes 20 (the rate in proportion"),
        (300, 4, {}, "--train.global_batch 12 --optim.lr 4.3e-04 makes 25"),
        (300, 2, MIXED, "--train.global_batch 16 --optim.lr 5.0e-04 makes 18"),
        (40, 1, {}, "one step an epoch of 64; --train.global_batch 2 "),
        (640, 1, {}, None),  # ten steps
        (639, 1, {}, "9 steps an epoch"),
        (300, 64, {}, None),  # no smaller batch divides by the ranks
    ],
)
def test_a_smaller_batch_is_suggested_for_few_samples(samples, ranks, keys, said):
    values = {"train.global_batch": 64, "optim.lr": 1e-3, "optim.name": "adamw", "augment.mixup": 0, **keys}
    recipe = load_recipe("digits/mixer", [(name, str(value)) for name, value in values.items()])
    suggested = suggest_batch(recipe, samples, ranks)
    assert suggested is None if said is None else said in suggested


@pytest.mark.parametrize(
    ("given", "targets", "classes", "shown"),
    [
        (None, "class", 50, 32),
        (None, "class", 51, 0),
        (None, "multilabel", 5, 0),
        (0, "class", 5, 0),
        (7, "class", 1000, 7),
    ],
)
def test_mistakes_of_few_classes_are_shown_by_default(given, targets, classes, shown):
    assert LogSection(mistakes=given).shown_mistakes(targets, classes) == shown
