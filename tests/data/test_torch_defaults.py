"""Images, targets, labels and metrics whatever torch's default type and device are, which a program may have set."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.utils._pytree import tree_leaves

import widemix
from tests.conftest import ROOT, train_lines
from tests.data.loading import SMOOTH, place, section, text_section, train_loader
from tests.data.test_targets import folders as of_targets  # noqa: F401 - a fixture
from tests.data.test_targets import numbers, pngs, several, table  # noqa: F401 - fixtures
from tests.sections import train_section
from widemix.data.grid import training_grid
from widemix.data.loader import EvalLoader
from widemix.evaluation.evaluate import evaluate
from widemix.recipe.augment import AugmentSection

DEFAULTS = {
    **{str(kind): lambda kind=kind: torch.set_default_dtype(kind) for kind in (torch.float64, torch.bfloat16)},
    "float16": lambda: torch.set_default_dtype(torch.float16),
    "meta": lambda: torch.set_default_device("meta"),
}
TARGETS = {"class": 2, "multilabel": 3, "regression": 2}


@pytest.fixture(params=DEFAULTS)
def assert_independent(request):
    """What a function returns is bit for bit the same with another default type, or another default device."""

    def check(work: Callable[[], object]) -> None:
        expected = tree_leaves(work())
        try:
            DEFAULTS[request.param]()
            found = tree_leaves(work())
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, torch.Tensor):
                assert (one.dtype, one.device) == (other.dtype, other.device)
                assert torch.equal(one, other)
            else:
                assert one == other

    return check


@pytest.fixture(scope="module")
def folders(images, pairs, of_targets) -> dict[str, str]:  # noqa: F811
    """A prepared folder of each kind of targets, and one of text."""
    return {"class": images, "text": pairs} | of_targets


def section_of(folders, kind: str):
    return section(folders[kind], image_size=8, num_classes=TARGETS[kind], targets=kind)


@pytest.mark.parametrize("kind", [*TARGETS, "text"])
def test_training_batches_do_not_depend_on_torchs_defaults(folders, kind, assert_independent):
    """What two batches hold, with all that makes tensors, and the first one as a grid."""
    augment = AugmentSection(mixup=0.8, cutmix=0.5, mix_group=4, re_prob=1.0, smoothing=0.1 * (kind == "class"))
    data = text_section(folders[kind]) if kind == "text" else section_of(folders, kind)

    def work():
        loader = train_loader(data, SMOOTH if kind == "text" else augment, train=train_section(8, 1, 3))
        with loader.batches(0) as found:
            both = [next(found), next(found)]
        grid = [] if kind == "text" else training_grid(both[0], 4, data).tolist()
        return grid, [(batch.inputs, batch.targets, batch.keys) for batch in both]

    assert_independent(work)


@pytest.mark.parametrize("kind", TARGETS)
def test_evaluations_do_not_depend_on_torchs_defaults(folders, kind, assert_independent):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, TARGETS[kind]))
    loader = lambda: EvalLoader(section_of(folders, kind), 3, place())  # noqa: E731
    assert_independent(lambda: evaluate(module, nullcontext(), loader(), TARGETS[kind]))


def test_training_does_not_depend_on_torchs_defaults(digits, assert_independent, tmp_path):
    keys = {"data.path": digits, "data.workers": 1, "train.max_steps": 2, "model.depth": 1, "log.every": 1}
    keys |= {"train.ema_decay": 0.9, "train.global_batch": 32, "log.tensorboard": "false", "train.precision": "fp32"}
    recipe = widemix.load_recipe(ROOT / "recipes/digits/rp_mixer.yaml", [(key, str(keys[key])) for key in keys])

    def work():
        run = tmp_path / str(len([*tmp_path.iterdir()]))
        done = widemix.train(recipe, run)
        return [line["loss"] for line in train_lines(run)], done["loss"], widemix.evaluate(run)

    assert_independent(work)
