"""Our loader in other libraries' trainers, against the loader that their users have: 50 steps of ImageNet's JPEGs.

RandAugment and erasing, by timm's transforms in the processes of the trainer or by `widemix.Loader` on one decoding
thread; with FFCV crop and flip, which is what it has. The network is the mean of an image's colours and one linear
layer, so that the trainers' own cost and loading are what takes time.
"""

import argparse
import logging
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from widemix.api.loader import Loader
from widemix.bench.sample import jpegs, link_repeatedly, prepare
from widemix.bench.timing import Contestant, compare_loaders

VERSIONS = ("torch", "timm", "lightning", "transformers", "accelerate", "ffcv", "pillow", "numba", "numpy")
# Without mstd: a magnitude of 10 has timm posterize to no bits, which Pillow 13 refuses.
POLICY: dict[str, Any] = {"auto_augment": "rand-m9-inc1", "re_prob": 0.25, "interpolation": "bilinear"}
OWN, OURS = ", its users' own loader", ", widemix.Loader"


class Workload(NamedTuple):
    """Work of each trainer in a round: steps of so many images with sides of so many pixels."""

    side: int = 224
    batch: int = 50
    steps: int = 50


IMAGENET = Workload()
Pair = Callable[[Path, Workload], tuple[Contestant, Contestant]]  # trains on the loader of its users, and on ours


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of `widemix bench trainers`; `ratio` is to the row before with the loader of its users."""
    more = {"timm's train.py": timm_train_pair(arguments.timm_train)} if arguments.timm_train else {}
    return compare_trainers(arguments.origin, arguments.rounds, TRAINERS | more)


def compare_trainers(
    origin: Path, rounds: int, trainers: Mapping[str, Pair], work: Workload = IMAGENET
) -> list[dict[str, Any]]:
    """Return a row for each loader of each trainer, on the JPEGs of a folder."""
    files = jpegs(origin)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        link_repeatedly(files, folder / "images", work.steps * work.batch)
        prepare("image-folder", folder / "images", folder / "prepared", "--max-size=0")
        for trainer, pair in trainers.items():
            own, ours = pair(folder, work)
            rows += compare_loaders({trainer + OWN: own, trainer + OURS: ours}, rounds, peer=trainer + OWN)
    return rows


def _network() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1000))


def timm_files(folder: Path, work: Workload) -> Dataset[Any]:
    """Images of the folder by timm's transforms."""
    from timm.data import create_dataset, create_transform

    transform = create_transform(work.side, is_training=True, **POLICY)
    return create_dataset("", str(folder / "images" / "train"), is_training=True, transform=transform)


def open_loader(folder: Path, work: Workload) -> Loader:
    """Return our loader of the prepared folder, with the same augmentation."""
    return Loader(folder / "prepared", "train", work.batch, work.side, num_workers=1, device="cpu", **POLICY)


def lightning_pair(folder: Path, work: Workload) -> tuple[Contestant, Contestant]:
    """Return Lightning's Trainer on a DataLoader of timm's, and on ours."""
    import lightning.pytorch as lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = _network()

        def training_step(self, batch: Any, _number: int) -> torch.Tensor:
            images, labels = batch
            return nn.functional.cross_entropy(self.network(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

    def trained_on(loader: Any) -> Contestant:
        def process(_number: int) -> int:
            trainer = lightning.Trainer(max_steps=work.steps, accelerator="cpu", enable_checkpointing=False, **quiet)
            trainer.fit(Classifier(), loader)
            return trainer.global_step * work.batch

        return process

    return trained_on(DataLoader(timm_files(folder, work), work.batch, shuffle=True)), trained_on(
        open_loader(folder, work)
    )


def hugging_face_pair(folder: Path, work: Workload) -> tuple[Contestant, Contestant]:
    """Return Hugging Face's Trainer on files by timm's transforms, and on our loader."""
    import transformers

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = _network()

        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.network(pixel_values), labels)}

    class Batches(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return ({"pixel_values": images, "labels": labels} for images, labels in loader)

    class BatchTrainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(Batches(), batch_size=None)

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        images, labels = zip(*samples, strict=True)
        return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}

    loader, files = open_loader(folder, work), timm_files(folder, work)
    settings: Any = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}

    def trained_by(kind: Callable[..., Any]) -> Contestant:
        def process(_number: int) -> int:
            options = transformers.TrainingArguments(
                str(folder / "transformers"),
                max_steps=work.steps,
                per_device_train_batch_size=work.batch,
                use_cpu=True,
                remove_unused_columns=False,
                **settings,
            )
            trainer = kind(Classifier(), options, train_dataset=files, data_collator=collate)
            trainer.train()
            return trainer.state.global_step * work.batch

        return process

    return trained_by(transformers.Trainer), trained_by(BatchTrainer)


def ffcv_pair(folder: Path, work: Workload) -> tuple[Contestant, Contestant]:
    """Return FFCV's Loader with its decoder, and with ours: crop and flip, as it has no RandAugment."""
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader as FfcvLoader
    from ffcv.loader import OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor

    from widemix.ffcv import Order, RandomResizedCrop

    def trained_on(order: Any, *image: Any) -> Contestant:
        label = [IntDecoder(), ToTensor(), Squeeze((1,))]
        pipelines = {"image": [*image, ToTensor()], "label": label}
        beton = str(folder / "prepared/train.beton")
        loader = FfcvLoader(beton, work.batch, num_workers=1, os_cache=True, order=order, pipelines=pipelines)
        network = _network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

        def process(_number: int) -> int:
            seen = 0
            for images, labels, *_others in loader:
                optimizer.zero_grad()
                pixels = images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)
                nn.functional.cross_entropy(network(pixels.float()), labels.long()).backward()
                optimizer.step()
                seen += len(images)
            return seen

        return process

    theirs = RandomResizedCropRGBImageDecoder((work.side, work.side)), RandomHorizontalFlip()
    return trained_on(OrderOption.RANDOM, *theirs), trained_on(Order(seed=0), RandomResizedCrop(work.side))


TRAINERS: dict[str, Pair] = {
    "Lightning": lightning_pair,
    "Hugging Face's Trainer": hugging_face_pair,
    "FFCV's Loader": ffcv_pair,
}


def timm_train_pair(script: Path) -> Pair:
    """Return timm's own script, run in this process: with its loader, and with `create_loader` exchanged for ours."""
    import timm.data
    from timm.models import register_model

    seen: list[int] = []

    def colour_mean(pretrained: bool = False, **_options: Any) -> nn.Module:
        network: Any = _network()
        network.num_classes = 1000
        network.register_forward_hook(lambda _network, images, _logits: seen.append(len(images[0])))
        return network

    def pair(folder: Path, work: Workload) -> tuple[Contestant, Contestant]:
        register_model(colour_mean)
        theirs = timm.data.create_dataset, partial(timm.data.create_loader, persistent_workers=False)
        ours = (lambda *_, **__: None), (lambda *_, **__: _TimmLoader(open_loader(folder, work)))
        words = [str(script), str(folder / "images"), "--val-split", "", "--model", "colour_mean", "--epochs", "1"]
        words += ["--num-classes", "1000", "-b", str(work.batch), "--aa", POLICY["auto_augment"], "--workers", "0"]
        words += ["--reprob", str(POLICY["re_prob"]), "--train-interpolation", POLICY["interpolation"]]
        words += ["--img-size", str(work.side), "--device", "cpu", "--warmup-epochs", "0"]
        words += ["--output", str(folder / "timm")]

        def trained_by(create: tuple[Any, Any]) -> Contestant:
            def process(_number: int) -> int:
                seen.clear()
                before = timm.data.create_dataset, timm.data.create_loader, sys.argv
                timm.data.create_dataset, timm.data.create_loader = create
                sys.argv = words
                try:
                    runpy.run_path(words[0], run_name="__main__")
                finally:
                    timm.data.create_dataset, timm.data.create_loader, sys.argv = before
                return sum(seen)

            return process

        return trained_by(theirs), trained_by(ours)

    return pair


class _TimmLoader:
    """Loader with the attributes that train.py uses."""

    sampler = batch_sampler = None

    def __init__(self, loader: Loader):
        self.loader = loader
        self.dataset = loader  # on which it calls set_epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return iter(self.loader)
