"""Every argument of `widemix.Loader`, and every key of `data` and `augment` that is none of it, has its effect."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import widemix
from tests.cli.test_arguments import arguments_of
from tests.data.loading import place, read, section, train_loader
from widemix.data.loader import EvalLoader
from widemix.errors import InputError
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection

TABLES = yaml.safe_load(Path(__file__).with_name("loading_keys.yaml").read_text())
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = TABLES["arguments"] | {"img_dtype": (torch.bfloat16, {})}
KEYS: dict[str, tuple[Any, dict[str, Any], str, Any]] = TABLES["keys"]
# Which no batch shows: their values in the sections and the topology that the trainer's loader is given.
UNSEEN: dict[str, tuple[Any, Any]] = {
    "path": (lambda data, topology: data.path, None),
    "device": (lambda data, topology: topology.device, torch.device("cpu")),
    "num_workers": (lambda data, topology: data.workers, 3),
    "on_corrupt": (lambda data, topology: data.on_corrupt, "replace"),
}
BASE = {"split": "train", "batch_size": 8, "image_size": 24, "seed": 7, "device": "cpu", "num_workers": 1}
PARAMETERS = inspect.signature(widemix.Loader.__init__).parameters


def batches(images: Path, keys: dict[str, Any]) -> list[Any]:
    """Each batch's tensors as bytes of their type."""
    loader = widemix.Loader(images, **{**BASE, **keys})
    return [(x.dtype, x.float().numpy().tobytes(), y.dtype, y.numpy().tobytes()) for x, y in loader]


def test_the_tables_have_every_argument_and_key() -> None:
    assert {*CHANGES, *UNSEEN, "self"} == set(PARAMETERS)
    theirs = {"kind", "targets"}  # properties of the prepared folder, which is refused with others
    for name, of in (("data", DataSection), ("augment", AugmentSection)):
        missing = {key for key in of.model_fields if OTHERWISE_NAMED.get(key, key) not in PARAMETERS}
        assert missing - theirs == {key.partition(".")[2] for key in KEYS if key.startswith(f"{name}.")}


@pytest.mark.parametrize("argument", CHANGES)
def test_another_value_gives_other_batches(images: Path, argument: str) -> None:
    value, others = CHANGES[argument]
    before = {"world": 3, "rank": 0, "mix_group": 8}.get(argument, PARAMETERS[argument].default)
    fixed = {} if argument in BASE or before is inspect.Parameter.empty else {argument: before}
    expected = batches(images, others | fixed)
    assert batches(images, others | fixed) == expected
    assert batches(images, others | {argument: value}) != expected


@pytest.mark.parametrize("argument", UNSEEN)
def test_what_no_batch_shows_reaches_the_trainers_loader(images: Path, argument: str) -> None:
    seen, value = UNSEEN[argument]

    def found(**keys: Any) -> Any:
        given = arguments_of(lambda: widemix.Loader(images, **{**BASE, **keys}), "data.loader.TrainLoader")
        return seen(given["data"], given["topology"])

    assert found(**({argument: value} if value else {})) == (value or str(images))
    assert argument not in ("num_workers", "on_corrupt") or found() == {"num_workers": 1}.get(argument, "error")


def error(loader) -> str:
    with pytest.raises(InputError) as raised:
        read(loader, 0)
    return re.split("[:;]", str(raised.value).partition("cannot be read: ")[2])[0]


SEEN = {
    "images": lambda loader: [batch.inputs.tolist() for batch in read(loader, 0)],
    "order": lambda loader: type(loader.order).__name__,
    "window": lambda loader: arguments_of(lambda: train_loader(loader.data), "data.paged.PagedOrder")["window_bytes"],
    "ahead": lambda loader: arguments_of(lambda: loader.batches(0), "data.batches.Prefetch")["ahead"],
    "evaluated": lambda loader: len(EvalLoader(loader.data, 8, place())),
    "damage": error,
}
OTHERWISE_NAMED = {"train_split": "split", "workers": "num_workers", "aug_repeats": "num_aug_repeats"}
OTHERWISE_NAMED |= {"mix_mode": "mixup_mode"}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_does_what_it_is_for(images, damaged, key):
    value, others, seen, expected = KEYS[key]
    part, _, name = key.partition(".")

    def found(**keys):
        folder = damaged if seen == "damage" else images
        data, augment = (section(folder, **keys), {}) if part == "data" else (section(folder), keys)
        return SEEN[seen](train_loader(data, AugmentSection(**augment)))

    plain, other = found(**others), found(**others | {name: value})
    assert plain != other
    assert expected is None or other == expected
