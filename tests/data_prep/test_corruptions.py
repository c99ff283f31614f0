"""Prepared folders of which a file is changed at random, read as in training: each sample is right, or is named.

Or the folder is not opened, with one line. And `verify` finds whatever it was.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.loading import place, section, text_section
from tests.data_prep.interruptions import PREPARED
from widemix.data.batches import StepPart
from widemix.data.images import AugmentedImages
from widemix.data.tokens import Tokens
from widemix.data_prep.prepare import prepare
from widemix.data_prep.verify import verify
from widemix.errors import InputError
from widemix.recipe.augment import AugmentSection

KINDS = [kind for kind in PREPARED if kind != "arrays"]
Samples = dict[tuple[int, int], Any]  # by epoch and number; None of one that is named as damaged


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, small_pages) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        root, (source, write, settings) = tmp_path_factory.mktemp("corruptions"), PREPARED[kind]
        (root / "in").mkdir()
        write(root / "in")
        prepare(source, root / "in", root / "whole", settings, processes=1)
        return root / "whole"

    return make


def read_all(kind: str, folder: Path) -> Samples:
    """Each sample in two epochs. Raises as opening does."""
    if kind == "text":
        source: Any = Tokens(text_section(folder), "train", place())
    else:
        data = section(folder, targets="regression" if kind == "targets" else "class")
        source = AugmentedImages(data, AugmentSection(), 0, place())
    return {(epoch, n): read(source, n, epoch) for epoch in range(2) for n in range(len(source.file))}


def read(source: Any, sample: int, epoch: int) -> tuple[bytes, bytes] | str | None:
    try:
        host = source.read(StepPart(np.array([sample]), epoch))
    except InputError as error:
        named = f"sample {sample} " in str(error) and "`widemix verify" in str(error)
        return None if named else str(error)
    return host.inputs.numpy().tobytes(), host.labels.numpy().tobytes()


def changes(data: bytes, first: int, rng: random.Random) -> Iterator[bytes]:
    """From `first` on: another bit, bytes, zeros, another part, nothing; exchanged parts; a cut end; more bytes."""
    at, other = sorted(rng.randrange(first, len(data)) for _ in range(2))
    size = min(rng.choice((1, 4, 64, 4096)), len(data) - other, max(1, other - at))
    before, part, after, noise = data[:at], data[other : other + size], data[at + size :], rng.randbytes(size)
    yield before + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    yield from (before + instead + after for instead in (noise, bytes(size), part, b""))
    yield before + part + data[at + size : other] + data[at : at + size] + data[other + size :]
    yield before
    yield before + noise + data[at:]


def content(name: str, data: bytes) -> Any:
    """What a file says: of a manifest not its white space."""
    with contextlib.suppress(ValueError):
        return json.loads(data) if name == "manifest.json" else data
    return data


def corrupt(folder: Path, rng: random.Random) -> None:
    names = sorted(path.name for path in folder.iterdir())
    weights = [12 if name == "train.beton" else 2 if name == "train.crc32c" else 1 for name in names]
    path = folder / rng.choices(names, weights)[0]
    data = path.read_bytes()
    starts = [0, next((i for i, byte in enumerate(data) if byte), 0)]
    if path.name == "train.beton":
        starts += [1 << 16] * 8  # most of a small file lies before its first page
    changed = data
    while content(path.name, changed) == content(path.name, data):
        changed = rng.choice([*changes(data, rng.choice(starts), rng)])
    path.write_bytes(changed)


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_corruption_is_silent(prepared, tmp_path, kind, count):
    whole, outcomes = prepared(kind), []
    right = read_all(kind, whole)
    for number in range(count):
        folder = Path(shutil.copytree(whole, tmp_path / str(number)))
        corrupt(folder, random.Random(f"{kind} {number}"))
        try:
            found = read_all(kind, folder)
            assert {n for n in right if found[n] not in (None, right[n])} == set(), number
            outcomes.append("named" if None in found.values() else "harmless")
        except InputError as error:
            one_line = "\n" not in str(error) and str(folder) in str(error)
            outcomes.append("refused" if one_line else str(error))
        with contextlib.suppress(InputError):
            assert verify(folder), number
        shutil.rmtree(folder)
    assert "named" in outcomes
    assert set(outcomes) <= {"named", "refused", "harmless"}
