"""`widemix bench trainers`: each trainer takes its steps on both loaders. TIMM_TRAIN=path/to/train.py adds timm's."""

import argparse
import importlib.util
import itertools
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import timm
import timm.data
import torch

from tests.cli.test_arguments import arguments_of
from tests.layouts import two_classes
from widemix.bench import trainers as bench
from widemix.bench.trainers import Workload, hugging_face_pair, lightning_pair, timm_train_pair

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the other packages


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    """The images as files, and prepared."""
    two_classes(tmp_path / "images")
    (tmp_path / "prepared").symlink_to(images)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("trainer", bench.TRAINERS)
def test_each_takes_its_steps_on_both_loaders(trainer, folder):
    package = {"Lightning": "lightning", "FFCV's Loader": "ffcv"}.get(trainer, "transformers")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    seen = 48 if package == "ffcv" else 16
    assert [train(0) for train in bench.TRAINERS[trainer](folder, Workload(32, 8, 2))] == [seen, seen]


def test_timms_train_script_takes_its_steps_on_both_loaders(folder):
    script = os.environ.get("TIMM_TRAIN")
    if not script:
        pytest.skip("TIMM_TRAIN is not set; it names train.py of a timm checkout")
    assert [train(0) for train in timm_train_pair(Path(script))(folder, Workload(32, 8, 2))] == [48, 48]


class Faked:
    """In place of a package's Trainer: takes the steps that it is asked for, and keeps what they were given."""

    given: ClassVar[list] = []

    def take(self, loader, steps: int, step, network, options: dict[str, Any]) -> None:
        """Each with `step`, the loss of which is that of the network."""
        batches = []
        for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
            images, labels = batch.values() if isinstance(batch, dict) else batch
            loss = step(batch)
            torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(network(images), labels))
            loss.backward()
            batches.append(labels.tolist())
        self.given.append((batches, options))


class OfLightning(Faked):
    def __init__(self, **options):
        self.options, self.global_step = options, options["max_steps"]

    def fit(self, module, loader):
        optimizer = module.configure_optimizers()
        before = [parameter.detach().clone() for parameter in module.parameters()]
        step = lambda batch: module.training_step(batch, 0)  # noqa: E731
        self.take(loader, self.options["max_steps"], step, module.network, self.options)
        optimizer.step()
        assert any(not torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))


class OfHuggingFace(Faked):
    def __init__(self, model, options, train_dataset, data_collator):
        self.model, self.options, self.dataset, self.collate = model, options, train_dataset, data_collator
        self.state = SimpleNamespace(global_step=options.max_steps)

    def get_train_dataloader(self):
        size = self.options.per_device_train_batch_size
        return torch.utils.data.DataLoader(self.dataset, size, shuffle=True, collate_fn=self.collate)

    def train(self):
        step = lambda batch: self.model(**batch)["loss"]  # noqa: E731
        self.take(self.get_train_dataloader(), self.options.max_steps, step, self.model.network, vars(self.options))


def options_of(folder, **options):
    return SimpleNamespace(folder=folder, **options)


@pytest.mark.parametrize(
    ("pair", "module", "names", "options"),
    [
        (
            lightning_pair,
            "lightning.pytorch",
            {"LightningModule": torch.nn.Module, "Trainer": OfLightning},
            {"accelerator": "cpu", "enable_checkpointing": False, "logger": False}
            | {"enable_progress_bar": False, "enable_model_summary": False},
        ),
        (
            hugging_face_pair,
            "transformers",
            {"Trainer": OfHuggingFace, "TrainingArguments": options_of},
            {"use_cpu": True, "save_strategy": "no", "report_to": "none"},
        ),
    ],
)
def test_trainers_that_may_not_be_installed_take_their_steps(pair, module, names, options, folder, monkeypatch):
    """With modules in their place: of batches that timm's loader shuffles, or of ours in their order."""
    made, Faked.given = ModuleType(module), []
    made.__dict__.update(names)
    monkeypatch.setitem(sys.modules, module, made)
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(pytorch=made))
    work = Workload(32, 8, 7)  # all of the 53 files
    assert [train(0) for train in pair(folder, work)] == [56, 56]
    (theirs, given), (ours, same) = Faked.given
    labels = [label for batch in theirs for label in batch]
    assert (len(labels), sum(labels)) == (53, 26)
    assert labels != sorted(labels)
    loader = bench.open_loader(folder, work)
    assert ours == [batch.tolist() for _, batch in [*loader, *itertools.islice(loader, 1)]]
    assert given == same
    assert given | options | {"max_steps": 7} == given  # nothing is written or shown


SCRIPT = """
import json, sys
import timm
import timm.data
from pathlib import Path
loader = timm.data.create_loader(timm.data.create_dataset('', root=sys.argv[1]), 224)
model = timm.create_model('colour_mean')
assert model.num_classes == 1000
if hasattr(loader, 'dataset'):
    loader.dataset.set_epoch(7)
for images, labels in loader:
    model(images)
Path(sys.argv[0] + '.json').write_text(json.dumps([sys.argv, len(loader)]))
"""
OPTIONS = (
    "model epochs num-classes aa workers reprob train-interpolation img-size device output warmup-epochs val-split"
)


def test_timms_script_is_run_with_the_options_of_our_loader(folder, system):
    """A script in its place, which trains on whatever loader it makes."""
    (folder / "train.py").write_text(SCRIPT)
    made, before = [], sys.argv
    batches = [(torch.full((3, 3, 4, 4), float(number)), torch.tensor([number] * 3)) for number in range(4)]
    system({"timm.data.create_dataset": lambda *given, **options: made.append((given, options))})
    system({"timm.data.create_loader": lambda *given, **options: made.append((given, options)) or batches})
    create = timm.data.create_loader
    theirs, ours = timm_train_pair(folder / "train.py")(folder, Workload(32, 8, 2))
    assert (theirs(0), theirs(1)) == (12, 12)
    assert made[:2] == [(("",), {"root": str(folder / "images")}), ((None, 224), {"persistent_workers": False})]
    del made[:]
    assert (ours(0), made, sys.argv) == (48, [], before)
    assert timm.data.create_loader is create  # what was there before
    words, length = json.loads((folder / "train.py.json").read_text())
    assert length == 6
    parser = argparse.ArgumentParser()
    for name in ("script", "folder", *(f"--{name}" for name in OPTIONS.split())):
        parser.add_argument(name)
    parser.add_argument("-b", type=int)
    given = parser.parse_args(words)
    expected = {"model": "colour_mean", "epochs": "1", "device": "cpu", "workers": "0", "val_split": "", "b": 8}
    expected |= {"img_size": "32", "num_classes": "1000", "warmup_epochs": "0"}
    assert vars(given) | expected == vars(given)
    policy = {"auto_augment": given.aa, "re_prob": float(given.reprob), "interpolation": given.train_interpolation}
    assert policy == bench.POLICY


def test_both_loaders_augment_by_the_same_policy(folder):
    crop, flip, policy, *_, erase = bench.timm_files(folder, bench.IMAGENET).transform.transforms
    assert (crop.size, crop.interpolation.value, flip.p) == ((224, 224), "bilinear", 0.5)
    assert ({op.magnitude for op in policy.ops}, policy.num_layers, erase.probability) == ({9}, 2, 0.25)
    given = arguments_of(lambda: bench.open_loader(folder, bench.IMAGENET), "api.loader.Loader")
    same = {"auto_augment": "rand-m9-inc1", "re_prob": 0.25, "interpolation": "bilinear"}
    same |= {"split": "train", "batch_size": 50, "image_size": 224, "num_workers": 1, "device": "cpu"}
    assert given | same == given


def test_each_trainer_is_compared_with_the_loader_of_its_users(folder, monkeypatch):
    level, threads, seen = logging.root.manager.disable, torch.get_num_threads(), []

    def pair(place: Path, work: Workload):
        files, prepared = (
            sorted(place.glob("images/train/*/*")),
            json.loads((place / "prepared/manifest.json").read_text()),
        )
        seen.append((len(files), prepared["splits"]["train"]["samples"], prepared["settings"]["max_size"]))
        return (lambda number: seen.append(("own", number)) or 5), lambda number: seen.append(("ours", number)) or 5

    try:
        rows = bench.compare_trainers(folder / "images", 1, {"A": pair}, Workload(32, 4, 3))
        assert torch.get_num_threads() == 1
    finally:
        logging.disable(level)
        torch.set_num_threads(threads)
    assert seen == [(12, 12, 0), ("own", 0), ("ours", 0), ("own", 1), ("ours", 1)]
    assert [row["name"] for row in rows] == ["A, its users' own loader", "A, widemix.Loader"]
    assert rows[0]["ratio"] == 1  # to itself


@pytest.mark.parametrize("script", [None, Path("train.py")])
def test_timms_script_is_compared_where_it_is_named(script):
    arguments = argparse.Namespace(origin=Path("from"), rounds=3, timm_train=script)
    given = arguments_of(lambda: bench.run(arguments), "bench.trainers.compare_trainers")
    assert (given["origin"], given["rounds"], given["work"]) == (Path("from"), 3, (224, 50, 50))
    names = ["Lightning", "Hugging Face's Trainer", "FFCV's Loader", *(["timm's train.py"] if script else [])]
    assert list(given["trainers"]) == names
