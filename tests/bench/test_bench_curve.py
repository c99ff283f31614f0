"""`widemix bench curve`: the model of a loader's threads has the speed that follows from its stages."""

import json

import pytest

from widemix.bench.curve import Stages
from widemix.cgroups import usable_cpus

NOTHING = {"augment": 0.0, "python": 0.0, "task": 0.0, "finish": 0.0, "alone": 0.0, "ahead": 2}


@pytest.mark.parametrize(
    ("decode", "others", "threads", "read", "finished"),
    [
        ([1, 1, 1, 1], {}, 1, 1, 1),
        ([1, 1, 1, 1], {}, 4, 4, 4),
        ([1, 1, 1, 1], {"augment": 4}, 2, 1, 1),
        ([3, 1, 3, 1], {}, 2, 1, 1),  # 6 and 2 s of each batch: the other is read meanwhile
        ([3, 1, 1, 1], {"ahead": 1}, 4, 4 / 3, 4 / 3),  # three threads wait for the slowest
        ([3, 1, 1, 1], {}, 4, 2 + 2 / 3, 2 + 2 / 3),
        ([1, 1, 1, 1], {"python": 4}, 1, 0.5, 0.5),
        ([1, 1, 1, 1], {"python": 4}, 64, 1, 1),
        ([1, 1, 1, 1], {"task": 0.5}, 4, 2, 1),  # finishing has tasks too
        ([1, 1, 1, 1], {"alone": 8}, 4, 4, 0.5),
        ([1, 1, 1, 1], {"finish": 4}, 1, 1, 1),  # by another thread
        ([1, 1, 1, 1], {"finish": 4}, 2, 2, 1),
    ],
)
def test_speed_follows_from_the_stage_that_takes_longest(decode, others, threads, read, finished):
    stages = Stages(decode, **(NOTHING | others))
    found = stages.images_per_s(threads, finishing=False), stages.images_per_s(threads)
    assert found == pytest.approx((read, finished), rel=0.05)


def test_stages_are_those_of_the_recipes_loader(digits, tmp_path, widemix):
    assert widemix("bench", "curve", "digits/mixer", "--data.path", digits, "--json", tmp_path / "rows.json")[0] == 0
    first, *others = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["name"] for row in (first, *others)] == ["1 thread", *(f"{n} threads" for n in (2, 4, 8, 16, 32, 64))]
    assert first["read_per_s"] == pytest.approx(1e6 / (first["decode_us"] + first["python_us"]), rel=0.05)
    measured = [row["measured_per_s"] for row in (first, *others)]
    assert [bool(each) for each in measured] == [n <= usable_cpus() for n in (1, 2, 4, 8, 16, 32, 64)]
    assert min(first["task_us"], first["finish_us"]) > 0
    assert first["augment_us"] < first["decode_us"]  # there is no policy for digits
