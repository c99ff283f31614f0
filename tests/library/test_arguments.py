"""Every argument of every public function, with wrong values of all kinds: one `InputError` that names it.

And every integer type is taken where an integer is meant.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import widemix
from widemix.data_prep.settings import PrepSettings
from widemix.formats.manifest import read_manifest


class NoRepr:
    """A value that cannot be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Raises:
    """A value whose class raises where a number is asked for."""

    def __index__(self) -> int:
        raise OverflowError("no index")


BAD: dict[str, Any] = {
    "none": None,
    "object": object(),
    "bool": True,
    "text": "7",
    "nan": math.nan,
    "infinite": math.inf,
    "fraction": 90.5,
    "negative": -1,
    "huge": 10**30,
    "more digits than Python prints": 10**5000,
    "several lines": np.eye(3),
    "no repr": NoRepr(),
    "no number": torch.empty((), device="meta"),
    "raises": Raises(),
    "masked": np.ma.masked,
    "masked number": np.ma.array(8, mask=True),
    "no time": np.timedelta64("NaT"),
    "record": np.zeros((), dtype=[("x", "i4")]),
    "set": {0.5, 0.25, 0.125},
    "buffer": bytearray(b"789"),
    "bytes": b"7",
    "empty": [],
}
NONE, TEXT, FLAG, OPTIONAL, PATH = map(frozenset, ([], ["text"], ["bool"], ["none"], ["text"]))
# Of each public function: arguments that are right, and for each argument which of BAD are.
LOADER = {
    **dict.fromkeys(inspect.signature(widemix.Loader).parameters, NONE),
    **dict.fromkeys(("is_training", "shuffle", "drop_last"), FLAG | OPTIONAL),
    **dict.fromkeys(
        ("sampling", "rank", "world", "device", "num_classes", "auto_augment", "cutmix_minmax"), OPTIONAL
    ),
    **dict.fromkeys(("path", "split"), TEXT),
    **dict.fromkeys(("mixup", "cutmix"), frozenset(["fraction"])),
    "color_jitter": OPTIONAL | {"fraction", "empty"},
}
SETTINGS = {
    **dict.fromkeys(PrepSettings.__dataclass_fields__, NONE),
    **dict.fromkeys(("raw", "restart_markers", "shuffle"), FLAG),
}
TABLE: dict[str, tuple[Callable[..., Any], dict[str, Any], Mapping[str, Set[str]]]] = {
    "Loader": (widemix.Loader, {"path": "{digits}", "split": "train", "batch_size": 8, "device": "cpu"}, LOADER),
    "prepare": (
        widemix.prepare,
        {"source": "digits", "to": "{tmp}"},
        {
            **SETTINGS,
            "source": {"empty", "several lines", "set", "buffer"},  # pairs, and those are named
            "to": PATH,
            "origin": PATH | OPTIONAL,
            "processes": OPTIONAL,
            "force": FLAG,
            "extend": FLAG,
            "max_bad": NONE,
        },
    ),
    "load_recipe": (widemix.load_recipe, {"path": "digits/mixer"}, {"path": PATH, "overrides": {"empty"}}),
    "build_model": (widemix.build_model, {}, {"recipe": NONE}),
    "choose_memory_layout": (
        widemix.choose_memory_layout,
        {"model": torch.nn.Linear(2, 2), "batch_size": 8},
        dict.fromkeys(("model", "batch_size", "precision", "memory_layout"), NONE),
    ),
    "train": (
        widemix.train,
        {"recipe": "digits/mixer", "run_dir": "{tmp}"},
        {"recipe": NONE, "run_dir": PATH, "resume": TEXT},
    ),
    "evaluate": (
        widemix.evaluate,
        {"path": "{tmp}"},
        {"path": PATH, "data": PATH | OPTIONAL, "split": TEXT | OPTIONAL, "batch_size": OPTIONAL, "ema": FLAG},
    ),
}
CASES = [
    (function, argument, kind)
    for function, (_, _, arguments) in TABLE.items()
    for argument, right in arguments.items()
    for kind in BAD.keys() - right
]


def filled(values: Mapping[str, Any], digits: Path, tmp: Path) -> dict[str, Any]:
    return {k: v.format(digits=digits, tmp=tmp / "out") if isinstance(v, str) else v for k, v in values.items()}


def test_the_table_has_every_argument() -> None:
    for name, (function, _, arguments) in TABLE.items():
        known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        assert set(known) <= arguments.keys(), name
    public = {name for name in widemix.__all__ if callable(getattr(widemix, name))}
    assert public - TABLE.keys() == {"InputError", "Recipe", "View"}  # the views are below


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("function", "argument", "kind"), sorted(CASES), ids=str)
def test_a_wrong_argument_is_named(digits: Path, tmp_path: Path, function: str, argument: str, kind: str) -> None:
    call, right, _ = TABLE[function]
    with pytest.raises(widemix.InputError) as raised:
        call(**filled(right, digits, tmp_path) | {argument: BAD[kind]})
    assert argument in str(raised.value)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


VIEW = {name: LOADER[name] for name in widemix.View.__annotations__}


@pytest.mark.parametrize(
    ("argument", "kind"), [(a, kind) for a, right in VIEW.items() for kind in sorted(BAD.keys() - right)], ids=str
)
def test_a_wrong_argument_of_a_view_is_named(digits: Path, argument: str, kind: str) -> None:
    views: Any = [{}, {argument: BAD[kind]}]
    with pytest.raises(widemix.InputError, match=rf"^views\[1\]: {argument} "):
        widemix.Loader(digits, "train", 8, 16, device="cpu", views=views)


@pytest.mark.parametrize("kind", BAD)
def test_a_wrong_epoch_or_state_is_named(digits: Path, kind: str) -> None:
    one = widemix.Loader(digits, "train", 8, 16, device="cpu")
    with pytest.raises(widemix.InputError, match=r"^epoch "):
        one.set_epoch(BAD[kind])
    with pytest.raises(widemix.InputError, match=r"^the loader's state lacks" if kind == "empty" else r"^state "):
        one.load_state_dict({} if kind == "empty" else BAD[kind])
    for name in one.state_dict():
        with pytest.raises(widemix.InputError, match=f"^the loader's state: {name} "):
            one.load_state_dict(one.state_dict() | {name: BAD[kind]})


class Number:
    """An integer type that is nobody's."""

    def __init__(self, value: int):
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize(
    "kind",
    [np.int64, np.uint8, torch.tensor, np.array, np.ma.array, Number],
    ids=["int64", "uint8", "tensor", "array", "unmasked", "index"],
)
def test_any_integer_type_is_an_integer(digits: Path, tmp_path: Path, kind: Callable[[int], Any]) -> None:
    keys = {"batch_size": 8, "image_size": 16, "seed": 3, "num_workers": 1, "re_count": 2, "rank": 0, "world": 2}
    expected = widemix.Loader(digits, "train", device="cpu", re_prob=0.5, **keys)  # type: ignore[arg-type]
    found = widemix.Loader(digits, "train", device="cpu", re_prob=0.5, **{name: kind(n) for name, n in keys.items()})  # type: ignore[arg-type]
    found.set_epoch(kind(1))
    expected.set_epoch(1)
    for (a, _), (b, _) in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    state = expected.state_dict()
    found.load_state_dict({name: kind(n) if n < 256 else n for name, n in state.items()})
    manifest = widemix.prepare("digits", tmp_path, per_class=kind(16), max_size=kind(128), processes=kind(1))
    assert read_manifest(tmp_path) == manifest
    assert manifest.splits["train"].samples == 160


def test_numbers_and_bools_may_be_numpys(digits: Path) -> None:
    keys = {
        "hflip": np.float32(0.5),
        "mean": np.full(3, 0.5),
        "std": torch.full((3,), 0.5),
        "scale": np.array([0.5, 1]),
    }
    found = widemix.Loader(digits, "train", 8, 16, device="cpu", shuffle=np.bool_(False), **keys)  # type: ignore[arg-type]
    plain = {"hflip": 0.5, "mean": (0.5,) * 3, "std": (0.5,) * 3, "scale": (0.5, 1)}
    expected = widemix.Loader(digits, "train", 8, 16, device="cpu", shuffle=False, **plain)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(found, expected, strict=True))
