"""The catalogue of mistakes in Python: the calls of calls.yaml, each with the one line that says what is wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import widemix
from tests.data.test_sampling import folder, library  # noqa: F401 - a fixture
from tests.data.test_sampling import loader as sampling_loader
from tests.data_prep.test_sources import assert_says
from tests.data_prep.test_subset import NUMBERS, OWN, dataset
from tests.library.test_library_loader import loader
from widemix import plugins
from widemix.data.augment.registry import OPERATIONS
from widemix.data_prep.prepare import select
from widemix.data_prep.samples import Dataset, ImageFiles
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import SOURCES
from widemix.errors import InputError
from widemix.metrics import METRICS
from widemix.models.families import KINDS
from widemix.optim.section import OPTIMIZERS
from widemix.recipe import load_recipe
from widemix.recipe.losses import LOSSES

CALLS = yaml.safe_load(Path(__file__).with_name("calls.yaml").read_text(encoding="utf-8"))
VAL = ImageFiles(Path(), ["v"], [0])
NAMES = vars(plugins) | {"Linear": torch.nn.Linear, "spec": plugins.OptimizerSpec(len, "ours", 1)}
NAMES |= {"np": np, "torch": torch, "widemix": widemix, "dataset": dataset, "numbers": NUMBERS, "own": OWN}
NAMES |= {"val_alone": Dataset(("a",), {"val": VAL}), "text": Dataset(("a",), {"train": VAL}, text=True)}
NAMES |= {
    "of": lambda *labels, split="train": {split: [(b".", label) for label in labels]},
    "select": lambda whole, **settings: select(whole, PrepSettings(**settings)),
}


@pytest.fixture
def names(images, folder, tmp_path):  # noqa: F811
    def states(**changes):
        state = loader(images).state_dict() | changes
        loader(images).load_state_dict({name: value for name, value in state.items() if value is not None})

    def weights(kind, sampling):
        given = f"{{{sampling}}}"
        return sampling_loader(folder, given) if kind else library(folder, sampling=yaml.safe_load(given))

    values = load_recipe("digits/mixer").model_dump()

    def recipe(**changes):
        parts = {
            name: values.get(name, {}) | part if isinstance(part, dict) else part for name, part in changes.items()
        }
        return widemix.Recipe(**values | parts)

    return NAMES | {
        "recipe": recipe,
        "to": tmp_path / "out",
        "loader": lambda **keys: loader(images, **keys),
        "states": states,
        "weights": weights,
        "prepare": lambda pairs, *origin, **more: widemix.prepare(pairs, tmp_path / "out", *origin, **more),
    }


def parts() -> list[list[str]]:
    """What plugins register."""
    return [list(table) for table in (OPTIMIZERS, LOSSES, METRICS, SOURCES, KINDS, OPERATIONS)]


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_has_its_line(call, names, tmp_path):
    before = parts()
    with pytest.raises(InputError) as error:
        eval(call, names)
    assert_says(str(error.value), CALLS[call], tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert parts() == before
