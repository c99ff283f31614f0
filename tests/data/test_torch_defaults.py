"""Images, targets, labels and metrics whatever torch's default type and device are, which a program may have set."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

import widemix
from tests.conftest import ROOT, train_lines
from tests.sections import train_section
from widemix.data.grid import training_grid
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.distributed.topology import read_topology
from widemix.evaluation.evaluate import evaluate
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection, TextDataSection

DEFAULTS = ["float64", "bfloat16", "float16", "meta"]
TARGETS = {"class": 10, "multilabel": 3, "regression": 2}


@contextmanager
def default(name: str) -> Iterator[None]:
    """Within it torch has another default type, or another default device."""
    if name == "meta":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def folders(digits, tmp_path_factory) -> dict[str, str]:
    """A prepared folder of each kind of targets, and one of text."""
    base, noise = tmp_path_factory.mktemp("defaults"), np.random.default_rng(0)
    for number in range(24):
        Image.fromarray(noise.integers(0, 256, (8, 8, 3), np.uint8)).save(base / f"{number}.png")
    split = ["train"] * 16 + ["val"] * 8
    numbers = [f"{split[n]},{n}.png,{n / 7},{n % 5}" for n in range(24)]
    words = [
        f"{split[n]},{n}.png,{'|'.join(w for w, has in zip('abc', (n % 2, n % 3, 1), strict=True) if has)}"
        for n in range(24)
    ]
    found = {"class": str(digits)}
    for name, header, rows, settings in (
        ("regression", "split,path,age,height", numbers, PrepSettings(targets="age,height")),
        ("multilabel", "split,path,labels", words, PrepSettings()),
    ):
        (base / f"{name}.csv").write_text("\n".join([header, *rows]) + "\n")
        prepare("csv", base / f"{name}.csv", base / name, settings)
        found[name] = str(base / name)
    (base / "text").mkdir()
    rows = [f"{('entailment', 'neutral', 'contradiction')[n % 3]}\tab cd\t{'ab ' * (1 + n % 4)}" for n in range(24)]
    for name in ("train", "dev_matched"):
        (base / f"text/{name}.tsv").write_text("\n".join(["gold_label\tsentence1\tsentence2", *rows]) + "\n")
    (base / "text/vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nab\ncd\n")
    prepare("mnli", base / "text", base / "tokens", PrepSettings(length=16))
    return found | {"text": str(base / "tokens")}


def batches(folders, kind: str) -> list[torch.Tensor]:
    """What two training batches hold, with all that makes tensors, and the first one as a grid."""
    augment = AugmentSection(mixup=0.8, cutmix=0.5, mix_group=4, smoothing=0.1, re_prob=1.0)
    if kind == "text":
        section = TextDataSection(kind="text", path=folders[kind], eval_split="dev_matched", num_classes=3)
        augment = AugmentSection(smoothing=0.1)
    else:
        split = "test" if kind == "class" else "val"
        section = DataSection(
            path=folders[kind], image_size=8, num_classes=TARGETS[kind], eval_split=split, targets=kind
        )
    if kind in ("multilabel", "regression"):
        augment = augment.model_copy(update={"smoothing": 0.0})
    loader = TrainLoader(section, augment, train_section(8, 1, 3), read_topology())
    with loader.batches(0) as found:
        both = [next(found), next(found)]
    tensors = [tensor for batch in both for tensor in (batch.inputs, batch.targets, batch.keys)]
    return tensors if kind == "text" else [*tensors, torch.from_numpy(training_grid(both[0], 4, section).copy())]


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("kind", ["class", "multilabel", "regression", "text"])
def test_training_batches_do_not_depend_on_them(folders, kind, name):
    expected = batches(folders, kind)
    with default(name):
        found = batches(folders, kind)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("kind", TARGETS)
def test_nor_do_the_figures_of_an_evaluation(folders, kind, name):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, TARGETS[kind]))
    split = "test" if kind == "class" else "val"
    section = DataSection(path=folders[kind], image_size=8, num_classes=TARGETS[kind], eval_split=split, targets=kind)
    found = []
    for context in (nullcontext(), default(name)):
        with context:
            loader = EvalLoader(section, 3 if kind != "class" else 90, read_topology())
            found.append(evaluate(module, nullcontext(), loader, TARGETS[kind]))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", DEFAULTS)
def test_nor_do_training_and_the_evaluation_of_a_checkpoint(digits, name, tmp_path):
    keys = {"data.path": digits, "data.workers": 1, "train.max_steps": 2, "model.depth": 1, "log.every": 1}
    keys |= {"train.ema_decay": 0.9, "train.global_batch": 32, "log.tensorboard": "false", "train.precision": "fp32"}
    recipe = widemix.load_recipe(ROOT / "recipes/digits/rp_mixer.yaml", [(key, str(keys[key])) for key in keys])
    found = []
    for number, context in enumerate((nullcontext(), default(name))):
        with context:
            done = widemix.train(recipe, tmp_path / f"{number}")
            again = widemix.evaluate(tmp_path / f"{number}")
        found.append(([line["loss"] for line in train_lines(tmp_path / f"{number}")], done["loss"], again))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", DEFAULTS)
def test_nor_does_the_loader_of_the_library(digits, name):
    options = {"seed": 3, "mixup": 0.8, "cutmix": 0.5, "smoothing": 0.1, "re_prob": 0.5, "num_workers": 1}
    found = []
    for context in (nullcontext(), default(name)):
        with context:
            loaders = [widemix.Loader(digits, "train", 32, 8, **options), widemix.Loader(digits, "test", 90, 8)]
            found.append([tensor for loader in loaders for pair in islice(loader, 2) for tensor in pair])
    for one, other in zip(*found, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert torch.equal(one, other)
