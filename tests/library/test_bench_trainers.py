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
from typing import ClassVar

import pytest
import timm
import timm.data
import torch

from tests.layouts import two_classes
from widemix.bench import trainers as bench

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the other packages


@pytest.mark.long
@pytest.mark.parametrize(
    ("pair", "package", "seen"),
    [("_lightning", "lightning", 16), ("_hugging_face", "transformers", 16), ("_ffcv", "ffcv", 48)],
)
def test_each_takes_its_steps_on_both_loaders(pair, package, seen, images: Path, tmp_path: Path, monkeypatch):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert images_of(getattr(bench, pair), images, tmp_path, monkeypatch) == [seen, seen]


def test_timms_train_script_takes_its_steps_on_both_loaders(images: Path, tmp_path: Path, monkeypatch):
    script = os.environ.get("TIMM_TRAIN")
    if not script:
        pytest.skip("TIMM_TRAIN is not set; it names train.py of a timm checkout")
    assert images_of(bench._timm_train(Path(script)), images, tmp_path, monkeypatch) == [48, 48]


def images_of(pair, images: Path, folder: Path, monkeypatch) -> list[int]:
    two_classes(folder / "images")
    (folder / "prepared").symlink_to(images)
    for name, value in {"STEPS": 2, "BATCH": 8, "SIDE": 32}.items():
        monkeypatch.setattr(bench, name, value)
    return [train(0) for train in pair(folder)]


class Pixels(torch.utils.data.Dataset):
    """Twelve images of one colour with their numbers, of which batches of three are taken."""

    def __len__(self):
        return 12

    def __getitem__(self, number):
        return torch.full((3, 4, 4), float(number)), number


BATCHES = [(torch.full((3, 3, 4, 4), float(number)), torch.tensor([number] * 3)) for number in range(4)]


class OfLightning:
    """In place of Lightning's Trainer: takes the steps that it is asked for, and keeps what they were given."""

    given: ClassVar[list] = []

    def __init__(self, **options):
        self.options, self.global_step = options, 0

    def fit(self, module, loader):
        optimizer, batches = module.configure_optimizers(), []
        before = [parameter.detach().clone() for parameter in module.parameters()]
        for images, labels in itertools.islice(itertools.cycle(loader), self.options["max_steps"]):
            loss = module.training_step((images, labels), self.global_step)
            expected = torch.nn.functional.cross_entropy(module.network(images), labels)
            torch.testing.assert_close(loss, expected)
            loss.backward()
            optimizer.step()
            self.global_step += 1
            batches.append(labels.tolist())
        assert any(not torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
        self.given.append((batches, self.options))


class OfHuggingFace:
    """In place of Hugging Face's."""

    given: ClassVar[list] = []

    def __init__(self, model, options, train_dataset, data_collator):
        self.model, self.options, self.dataset, self.collate = model, options, train_dataset, data_collator
        self.state = SimpleNamespace(global_step=0)

    def get_train_dataloader(self):
        size = self.options.per_device_train_batch_size
        return torch.utils.data.DataLoader(self.dataset, size, shuffle=True, collate_fn=self.collate)

    def train(self):
        batches = []
        for batch in itertools.islice(itertools.cycle(self.get_train_dataloader()), self.options.max_steps):
            loss = self.model(**batch)["loss"]
            expected = torch.nn.functional.cross_entropy(self.model.network(batch["pixel_values"]), batch["labels"])
            torch.testing.assert_close(loss, expected)
            loss.backward()
            self.state.global_step += 1
            batches.append(batch["labels"].tolist())
        self.given.append((batches, vars(self.options)))


@pytest.mark.parametrize(("pair", "trainer"), [("_lightning", OfLightning), ("_hugging_face", OfHuggingFace)])
def test_trainers_that_may_not_be_installed_take_their_steps_on_both_loaders(pair, trainer, tmp_path, monkeypatch):
    """With modules in their place: five steps of batches that timm's loader shuffles, or of ours in their order."""
    modules = {
        "lightning.pytorch": {"LightningModule": torch.nn.Module, "Trainer": OfLightning},
        "transformers": {
            "Trainer": OfHuggingFace,
            "TrainingArguments": lambda folder, **options: SimpleNamespace(folder=folder, **options),
        },
    }
    for name, own in modules.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__dict__.update(own)
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(pytorch=sys.modules["lightning.pytorch"]))
    monkeypatch.setattr(trainer, "given", [])
    monkeypatch.setattr(bench, "_files", lambda folder: Pixels())
    monkeypatch.setattr(bench, "_loader", lambda folder: BATCHES)
    monkeypatch.setattr(bench, "STEPS", 5)
    monkeypatch.setattr(bench, "BATCH", 3)
    assert [train(0) for train in getattr(bench, pair)(tmp_path)] == [15, 15]
    (theirs, options), (ours, same) = trainer.given
    assert sorted(number for batch in theirs[:4] for number in batch) == list(range(12))
    assert theirs[:4] != [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert ours == [[number] * 3 for number in (0, 1, 2, 3, 0)]
    assert options == same
    on_a_cpu = {"accelerator": "cpu"} if trainer is OfLightning else {"use_cpu": True}
    off = {"enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary"}
    nothing = dict.fromkeys(off, False) if trainer is OfLightning else {"save_strategy": "no", "report_to": "none"}
    assert options | {"max_steps": 5} | on_a_cpu | nothing == options  # nothing is written or shown


class Batches(list):
    """A loader of these batches, which is told of epochs."""

    def set_epoch(self, epoch):
        """Note it."""
        self.epoch = epoch


def test_timms_script_is_run_with_the_options_of_our_loader(tmp_path, monkeypatch):
    """A script in its place, which trains on whatever loader it makes."""
    script = tmp_path / "train.py"
    script.write_text(
        "import json, sys\nimport timm\nimport timm.data\nfrom pathlib import Path\n"
        "loader = timm.data.create_loader(timm.data.create_dataset('', root=sys.argv[1]), 224)\n"
        "model = timm.create_model('colour_mean')\nassert model.num_classes == 1000\n"
        "if hasattr(loader, 'dataset'):\n    loader.dataset.set_epoch(7)\n"
        "for images, labels in loader:\n    model(images)\n"
        "Path(sys.argv[0] + '.json').write_text(json.dumps(sys.argv))\n"
    )
    made, before = [], sys.argv
    own = timm.data.create_dataset, timm.data.create_loader
    monkeypatch.setattr(timm.data, "create_dataset", lambda *given, **options: made.append((given, options)))
    monkeypatch.setattr(
        timm.data, "create_loader", lambda *given, **options: made.append((given, options)) or BATCHES
    )
    batches = Batches(BATCHES[:3])
    monkeypatch.setattr(bench, "_loader", lambda folder: batches)
    theirs, ours = bench._timm_train(script)(tmp_path)
    assert (theirs(0), theirs(1)) == (12, 12)
    assert made[:2] == [(("",), {"root": str(tmp_path / "images")}), ((None, 224), {"persistent_workers": False})]
    del made[:]
    assert (ours(0), made, sys.argv) == (9, [], before)
    assert batches.epoch == 7
    assert timm.data.create_loader is not own[1]  # what was there before
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    parser.add_argument("folder")
    for name in ("model", "epochs", "num-classes", "aa", "workers", "reprob", "train-interpolation", "img-size"):
        parser.add_argument(f"--{name}")
    for name in ("device", "output", "warmup-epochs", "val-split"):
        parser.add_argument(f"--{name}")
    parser.add_argument("-b", type=int)
    given = parser.parse_args(json.loads((tmp_path / "train.py.json").read_text()))
    assert (given.model, given.epochs, given.device, given.workers, given.val_split) == (
        "colour_mean",
        "1",
        "cpu",
        "0",
        "",
    )
    assert (given.b, given.img_size, given.num_classes, given.warmup_epochs) == (bench.BATCH, "224", "1000", "0")
    policy = {"auto_augment": given.aa, "re_prob": float(given.reprob), "interpolation": given.train_interpolation}
    assert policy == bench.POLICY


def test_both_loaders_augment_by_the_same_policy(tmp_path, monkeypatch):
    two_classes(tmp_path / "images/train")
    crop, flip, policy, *_, erase = bench._files(tmp_path).transform.transforms
    assert (crop.size, crop.interpolation.value, flip.p) == ((224, 224), "bilinear", 0.5)
    assert ({op.magnitude for op in policy.ops}, policy.num_layers, erase.probability) == ({9}, 2, 0.25)
    given = []
    monkeypatch.setattr(bench, "Loader", lambda *places, **options: given.append((places, options)))
    bench._loader(tmp_path)
    same = {"auto_augment": "rand-m9-inc1", "re_prob": 0.25, "interpolation": "bilinear"}
    assert given == [((tmp_path / "prepared", "train", 50, 224), {"num_workers": 1, "device": "cpu"} | same)]


@pytest.mark.parametrize("script", [None, Path("train.py")])
def test_each_trainer_is_compared_with_the_loader_of_its_users(script, tmp_path, monkeypatch):
    linked, prepared, threads, level = [], [], [], logging.root.manager.disable
    monkeypatch.setattr(bench, "jpegs", lambda origin: [origin])
    monkeypatch.setattr(
        bench, "link_repeatedly", lambda files, folder, count: linked.append((files, folder.name, count))
    )
    monkeypatch.setattr(bench, "prepare", lambda *given: prepared.append(given))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for name in ("_lightning", "_hugging_face", "_ffcv"):
        monkeypatch.setattr(bench, name, lambda folder, name=name: (f"own{name}", f"ours{name}"))
    monkeypatch.setattr(bench, "_timm_train", lambda given: lambda folder: (f"own {given}", f"ours {given}"))
    monkeypatch.setattr(bench, "compare_loaders", lambda contestants, rounds, peer: [(contestants, rounds, peer)])
    try:
        rows = bench.run(argparse.Namespace(origin="from", rounds=3, timm_train=script))
    finally:
        logging.disable(level)
    names = {"Lightning": "_lightning", "Hugging Face's Trainer": "_hugging_face", "FFCV's Loader": "_ffcv"}
    names |= {"timm's train.py": " train.py"} if script else {}
    assert rows == [
        ({f"{name}, its users' own loader": f"own{own}", f"{name}, widemix.Loader": f"ours{own}"}, 3,
         f"{name}, its users' own loader")
        for name, own in names.items()
    ]  # fmt: skip
    [(source, images, folder, option)] = prepared
    assert (source, images.name, folder.name, option) == ("image-folder", "images", "prepared", "--max-size=0")
    assert (linked, threads) == ([(["from"], "images", 2500)], [1])
