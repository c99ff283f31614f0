"""A loader of prepared images for any training loop."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import SkipValidation
from torch.utils.data import IterableDataset, get_worker_info

from widemix.api.loader_arguments import (
    ADVICE,
    Device,
    View,
    expand_views,
    jitter_strengths,
    process_topology,
    view_sections,
)
from widemix.arguments import Epoch, FilePath, Numbers, Rank, Size, Whole, build_section, check_arguments
from widemix.data.batches import Batch, Batches
from widemix.data.images import Views
from widemix.data.loader import EvalLoader, TrainLoader
from widemix.data.order import steps_per_epoch
from widemix.data.precision import DTYPES
from widemix.errors import InputError
from widemix.formats.manifest import read_manifest
from widemix.recipe.augment import AugmentSection
from widemix.recipe.class_balance import class_weights
from widemix.recipe.data import IMAGENET_MEAN, IMAGENET_STD, DataSection
from widemix.recipe.sections import TrainSection
from widemix.section import ByClass, Section

EVALUATED = ("val", "valid", "validation", "dev", "eval", "test", "holdout")  # unless a caller says otherwise


class _State(Section):
    """The state of a loader."""

    epoch: Epoch
    step: Whole
    seed: Whole
    global_batch: Whole
    samples: Whole


class Loader(IterableDataset[tuple[Any, torch.Tensor]]):
    """Iterate over the batches of one epoch of a prepared split: (images, targets), on the device.

    images: `img_dtype` [B, 3, image_size, image_size], normalised, channels last in memory. targets: int64 [B], or
    with mixup, CutMix or label smoothing probabilities float32 [B, classes]; of a folder that was prepared with
    targets, float32 [B, targets].

    In training, each iteration is the next epoch, or the one that `set_epoch` names. The images of a step depend on
    `seed`, epoch, step and global batch (`batch_size` x `world`), not on world size, threads or restarts. For
    evaluation (`is_training=False`) there are centre crops in the order of the file, each sample on exactly one rank;
    ranks have the same number of batches, of which the last may be one sample shorter, or empty.

    path, split: the folder that `widemix prep` wrote, and the split in it.
    batch_size: samples per rank.
    is_training: augment and shuffle. Default: for the split train, and not for val, valid, validation, dev, eval,
        test and holdout; of others it has to be said.
    shuffle, drop_last: default: as `is_training`.
    sampling: how often classes are sampled, in epochs of the same length; balanced: each as often; sqrt: by the
        square root of their size; {name: weight}: samples of these classes so many times as often as those of others.
    rank, world: default: those of torch.distributed, or of the launcher's variables.
    device: default: the GPU of this rank if there is one.
    num_workers: decoding threads; 0 divides the CPUs among the ranks of the node.
    views: images of each sample, which is decoded once; each is cropped and augmented by itself. With a number V
        above 1 images are [B, V, 3, H, W]. Or a list of what is other for each view, such as
        `2 * [View(scale=(0.4, 1))] + 8 * [View(image_size=96, scale=(0.05, 0.4))]`: with one size the same, with
        several a list of [B, n, 3, H, W], one for each size, in the order of their first views.
    num_classes: default: as many as the prepared folder has.
    mix_group: images that are mixed with each other; divides `batch_size`. Keep it when `world` changes.

    The other arguments mean what they mean in timm's `create_loader` and `Mixup`; docs/reference/timm_names.md lists
    the names and defaults that differ. Threads end with the iteration, or when it is left. Raises `InputError`, a
    ValueError, where the folder or an argument is wrong.
    """

    @partial(check_arguments, advice=ADVICE)
    def __init__(
        self,
        path: FilePath,
        split: str,
        batch_size: Size,
        image_size: int = 224,
        *,
        is_training: bool | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        sampling: Literal["balanced", "sqrt"] | ByClass | None = None,
        seed: Whole = 0,
        rank: Rank | None = None,
        world: Size | None = None,
        device: Device | None = None,
        img_dtype: torch.dtype = torch.float32,
        num_workers: int = 0,
        num_classes: int | None = None,
        interpolation: Literal["bilinear", "bicubic", "random"] = "bilinear",
        crop_pct: float = 0.875,
        mean: Numbers = IMAGENET_MEAN,
        std: Numbers = IMAGENET_STD,
        scale: Numbers = (0.08, 1.0),
        ratio: Numbers = (3 / 4, 4 / 3),
        hflip: float = 0.5,
        auto_augment: str | None = None,
        color_jitter: float | Numbers | None = 0.0,
        color_jitter_prob: float = 1.0,
        grayscale_prob: float = 0.0,
        gaussian_blur_prob: float = 0.0,
        solarize_prob: float = 0.0,
        num_aug_repeats: int = 0,
        views: Annotated[int | Sequence[View], SkipValidation] = 1,
        re_prob: float = 0.0,
        re_mode: Literal["const", "rand", "pixel"] = "pixel",
        re_count: int = 1,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        cutmix_minmax: Numbers | None = None,
        mixup_prob: float = 1.0,
        mixup_switch_prob: float = 0.5,
        mixup_mode: Literal["batch", "pair", "elem"] = "batch",
        mix_group: int = 32,
        smoothing: float = 0.0,
        on_corrupt: Literal["error", "replace"] = "error",
    ):
        self.manifest = read_manifest(Path(path))
        known = self.manifest.splits.get(split)
        if is_training is None and known and split not in ("train", *EVALUATED):
            raise InputError(
                f"split {split!r}: set is_training=True to augment and shuffle it, False to evaluate on it"
            )
        self.is_training = split == "train" if is_training is None else is_training
        shuffle = self.is_training if shuffle is None else shuffle
        drop_last = self.is_training if drop_last is None else drop_last
        self.topology = process_topology(rank, world, device)
        self.batch_size, self.seed = batch_size, seed
        self.views = expand_views(views)
        targeted = known is not None and "targets" in known.fields and not any(known.per_class)
        data = build_section(
            DataSection,
            path=str(path),
            train_split=split,
            eval_split=split,
            num_classes=num_classes or len(self.manifest.classes),
            workers=num_workers,
            image_size=image_size,
            crop_pct=crop_pct,
            interpolation=interpolation,
            on_corrupt=on_corrupt,
            sampling=sampling,
            targets="regression" if targeted else "class",  # numbers as they are
            mean=mean,
            std=std,
        )
        augment = build_section(
            AugmentSection,
            scale=scale,
            ratio=ratio,
            hflip=hflip,
            auto_augment=auto_augment,
            color_jitter=jitter_strengths(color_jitter),
            color_jitter_prob=color_jitter_prob,
            grayscale_prob=grayscale_prob,
            gaussian_blur_prob=gaussian_blur_prob,
            solarize_prob=solarize_prob,
            aug_repeats=num_aug_repeats,
            re_prob=re_prob,
            re_mode=re_mode,
            re_count=re_count,
            mixup=mixup,
            cutmix=cutmix,
            cutmix_minmax=cutmix_minmax,
            mixup_prob=mixup_prob,
            mixup_switch_prob=mixup_switch_prob,
            mix_mode=mixup_mode,
            mix_group=mix_group,
            smoothing=smoothing,
        )
        if targeted and smoothing > 0:
            raise InputError(f"smoothing {smoothing}: is for classes, and {path} was prepared with targets")
        if sampling:
            self._check_sampling(data, sampling, shuffle, targeted)
        self._soft = augment.mixes_images or smoothing > 0 or targeted
        self._check_batch(split, drop_last, augment, several=views != 1)
        sections = [view_sections(k, view, data, augment) for k, view in enumerate(self.views)] if views != 1 else []
        self._loader = self._open(data, augment, sections, shuffle, drop_last, img_dtype)
        self._steps = steps_per_epoch(len(self._loader), self.global_batch, drop_last)
        self._position = (0, 0)  # epoch, and step after the last one that was yielded
        self._next: tuple[int, int] | None = (0, 0)  # where the next iteration begins; None: with the next epoch

    @property
    def global_batch(self) -> int:
        """Samples of a step on all ranks."""
        return self.batch_size * self.topology.world

    @property
    def samples(self) -> int:
        """Samples of the split."""
        return len(self._loader)

    def __len__(self) -> int:
        """Batches of an epoch, the same number on every rank."""
        return self._steps

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Batches of the next epoch; after `load_state_dict` those that were left of the saved one."""
        if get_worker_info() is not None:
            raise InputError("widemix.Loader has decoding threads of its own; give DataLoader num_workers=0")
        epoch, first = self._next or (self._position[0] + 1, 0)
        self._position, self._next = (epoch, first), None
        with self._batches(epoch, first) as batches:
            for step, batch in zip(range(first, len(self)), batches, strict=False):
                self._position = epoch, step + 1
                targets = batch.targets if self._soft or not self.is_training else self._labels(batch)
                yield self._images(batch), targets

    @check_arguments
    def set_epoch(self, epoch: Epoch) -> None:
        """Begin the next iteration with this epoch; where `load_state_dict` has loaded a step of it, with that."""
        if self._next is None or self._next[0] != epoch:
            self._next = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were yielded, as plain numbers. It is the same on every rank."""
        epoch, step = self._position
        return {"epoch": epoch, "step": step, **self._identity()}

    @check_arguments
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration where `state` was saved; the world size may be another, the global batch not."""
        identity = self._identity()
        if missing := [name for name in ("epoch", "step", *identity) if name not in state]:
            raise InputError(f"the loader's state lacks {', '.join(missing)}; give what state_dict returned")
        given = build_section(_State, "the loader's state: ", **{name: state[name] for name in _State.model_fields})
        for name, value in identity.items():
            if getattr(given, name) != value:
                cure = f": batch_size {self.batch_size} x {self.topology.world}" if name == "global_batch" else ""
                raise InputError(f"the loader's state was saved with {name} {state[name]}, here it is {value}{cure}")
        epoch, step = given.epoch, given.step
        most = steps_per_epoch(self.samples, self.global_batch, drop_last=False)
        if step > most:
            raise InputError(f"the loader's state: step {step}: an epoch has {most} steps")
        self._position = self._next = (epoch, step) if step < len(self) else (epoch + 1, 0)

    def _identity(self) -> dict[str, int]:
        """Return all that the content of a step depends on, but for the augmentation."""
        return {"seed": self.seed, "global_batch": self.global_batch, "samples": self.samples}

    def _images(self, batch: Batch) -> torch.Tensor | list[torch.Tensor]:
        """Return the images to yield: the views, if there are several, by size."""
        if not isinstance(self._loader.source, Views):
            return batch.inputs
        by_size = self._loader.source.unpack(batch.inputs)
        return by_size[0] if len(by_size) == 1 else by_size

    def _check_batch(self, split: str, drop_last: bool, augment: AugmentSection, several: bool) -> None:
        size, group = self.batch_size, augment.mix_group
        if several and not self.is_training:
            raise InputError(f"views {len(self.views)}: an evaluation has one view of each image")
        if augment.mixes_images and size % group:
            fitting = ", ".join(str(fit) for fit in range(2, size + 1, 2) if size % fit == 0)
            cure = f"{fitting} would" if fitting else "take an even batch_size"
            raise InputError(f"mix_group {group} does not divide batch_size {size}; {cure}")
        known = self.manifest.splits.get(split)
        if drop_last and known and known.samples < self.global_batch:
            batch = f"batch_size {size} x {self.topology.world} ranks"
            raise InputError(f"{batch} exceeds the {known.samples} samples of split {split!r}; set drop_last=False")

    def _check_sampling(
        self, data: DataSection, sampling: str | Mapping[str, float], shuffle: bool, targeted: bool
    ) -> None:
        if not (self.is_training and shuffle):
            why = "set shuffle=True" if self.is_training else "an evaluation has each sample once"
            raise InputError(f"sampling {sampling}: is for shuffled training; {why}")
        if targeted:
            raise InputError(f"sampling {sampling}: is by class, and {data.path} was prepared with targets")
        if known := self.manifest.splits.get(data.train_split):
            class_weights("sampling", sampling, known.per_class, self.manifest.classes)

    def _open(
        self,
        data: DataSection,
        augment: AugmentSection,
        views: list[tuple[DataSection, AugmentSection]],
        shuffle: bool,
        drop_last: bool,
        img_dtype: torch.dtype,
    ) -> TrainLoader | EvalLoader:
        precisions = {dtype: name for name, dtype in DTYPES.items()}
        if img_dtype not in precisions:
            raise InputError(f"img_dtype {img_dtype}: must be one of {', '.join(map(str, precisions))}")
        if self.is_training:
            precision, batch = precisions[img_dtype], self.global_batch
            train = build_section(TrainSection, epochs=1, global_batch=batch, seed=self.seed, precision=precision)
            return TrainLoader(data, augment, train, self.topology, shuffle=shuffle, drop_last=drop_last, views=views)
        if shuffle:
            raise InputError("shuffle True: evaluation is in the order of the file; is_training=True shuffles")
        return EvalLoader(data, self.batch_size, self.topology, img_dtype)

    def _batches(self, epoch: int, first: int) -> Batches:
        loader = self._loader
        return loader.batches(epoch, first) if isinstance(loader, TrainLoader) else loader.batches(first)

    def _labels(self, batch: Batch) -> torch.Tensor:
        labels = torch.from_numpy(self._loader.source.file.label[batch.samples]).long()
        return labels.to(batch.targets.device, non_blocking=True)
