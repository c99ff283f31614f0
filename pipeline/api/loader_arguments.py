"""The arguments of `Loader`: timm's names of them, strengths, ranks and devices, and views.

`Loader` has timm's names where it has timm's meanings. It has one list of arguments for `create_loader` and `Mixup`,
so those of Mixup have names that say what they are for; and its defaults are those of a recipe, which leave out what
is not asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from typing_extensions import TypedDict

from widemix.arguments import Rank, build_section, numbers, refuse_unknown
from widemix.distributed.topology import Topology, read_topology
from widemix.errors import InputError, shown
from widemix.recipe.augment import AugmentSection
from widemix.recipe.data import DataSection
from widemix.section import plain

# The argument of `create_loader` or `Mixup`: the one of `Loader`.
RENAMED = {
    "dataset": "path and split",
    "input_size": "image_size",
    "fp16": "img_dtype",
    "distributed": "rank and world",
    "mixup_alpha": "mixup",
    "cutmix_alpha": "cutmix",
    "prob": "mixup_prob",
    "switch_prob": "mixup_switch_prob",
    "mode": "mixup_mode",
    "label_smoothing": "smoothing",
}
# The argument of `create_loader` or `Mixup` that `Loader` has no use for: why.
WITHOUT = {
    "no_aug": "is_training=False, or scale=(1, 1), ratio=(1, 1), hflip=0",
    "train_crop_mode": "training crops are random-resized ones",
    "vflip": "there is no vertical flip",
    "re_split": "augmentation splits are views here: views=[View(...), View(re_prob=...)]",
    "num_aug_splits": "augmentation splits are views here: views=2",
    "crop_mode": "evaluation has centre crops",
    "crop_border_pixels": "evaluation has centre crops",
    "collate_fn": "batches are tensors from the start",
    "pin_memory": "batches come on the device, from pinned memory",
    "use_prefetcher": "batches are always prefetched and normalised on the device",
    "use_multi_epochs_loader": "there are no worker processes to keep",
    "persistent_workers": "there are no worker processes to keep",
    "worker_seeding": "the images depend on seed, epoch and sample, whatever the workers",
    "tf_preprocessing": "crops are Pillow's",
    "input_size_choices": "all batches have one size; views may have several",
    "batch_size_choices": "all batches have one size",
    "batch_choice_weights": "all batches have one size",
    "batch_choice_seed": "all batches have one size",
    "batch_choice_schedule": "all batches have one size",
    "batch_schedule_epochs": "all batches have one size",
    "batch_schedule_spread": "all batches have one size",
    "batch_schedule_random_mix": "all batches have one size",
    "num_batches": "leave the loop",
    "correct_lam": "CutMix's proportion is always that of the pixels",
    "multi_label": "targets are those of the prepared folder",
}
# What None, a default of `create_loader`, stands for.
NONE_MEANS = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "crop_pct": 0.875, "color_jitter_prob": 1.0}
ADVICE = {name: f"is timm's; here it is {ours}" for name, ours in RENAMED.items()}
ADVICE |= {name: f"is timm's, and not needed here: {why}" for name, why in WITHOUT.items()}


Device = str | Rank | torch.device  # an int is the number of a GPU


def jitter_strengths(color_jitter: float | Sequence[float] | None) -> tuple[float, ...]:
    """Brightness, contrast, saturation and hue; one number is the first three, None is none, as in timm."""
    strengths = numbers(color_jitter)
    if not isinstance(strengths, tuple):
        return (0.0 if strengths is None else strengths,) * 3 + (0.0,)
    return (*strengths, *(0.0,) * (4 - len(strengths)))


def process_topology(rank: int | None, world: int | None, device: Device | None) -> Topology:
    """Rank and device of this process, from the arguments, torch.distributed, or the launcher's variables."""
    if (rank is None) != (world is None):
        raise InputError(f"rank {rank}, world {world}: give both, or neither")
    found = read_topology()
    if rank is None and dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    if rank is not None and world is not None:
        if rank >= world:
            raise InputError(f"rank {rank}, world {world}: ranks are numbered from 0 to world - 1")
        found = replace(found, rank=rank, world=world)
    return found if device is None else replace(found, device=_usable(device))


def _usable(device: Device) -> torch.device:
    """The device; `InputError` where there is none of this name."""
    try:
        return torch.empty(0, device=device).device
    except (
        RuntimeError,
        AssertionError,
        ValueError,
        OverflowError,
    ) as error:  # AssertionError: torch was built without CUDA
        raise InputError(f"device {str(device)!r}: {str(error).splitlines()[0]}") from None


MOST = 1000  # views of an image


class View(TypedDict, total=False):
    """Arguments of `Loader` that are others for one view of each image. What is left out is as in the loader."""

    image_size: int
    interpolation: Literal["bilinear", "bicubic", "random"]
    scale: Sequence[float]
    ratio: Sequence[float]
    hflip: float
    auto_augment: str | None
    color_jitter: float | Sequence[float] | None
    color_jitter_prob: float
    grayscale_prob: float
    gaussian_blur_prob: float
    solarize_prob: float
    re_prob: float
    re_mode: Literal["const", "rand", "pixel"]
    re_count: int


def expand_views(views: Any) -> list[View]:
    """Return the changes of each view, from the loader's argument. `InputError` where it is none."""
    views = plain(views)
    if type(views) is int and 1 <= views <= MOST:
        return [View()] * views
    if isinstance(views, Sequence) and 1 <= len(views) <= MOST and all(isinstance(view, Mapping) for view in views):
        return list(views)
    raise InputError(f"views {shown(views)}: must be their number, 1 to {MOST}, or a list with a View for each")


def view_sections(
    number: int, view: View, data: DataSection, augment: AugmentSection
) -> tuple[DataSection, AugmentSection]:
    """The sections of a view: those of the loader with what `view` changes. `InputError` where it is wrong."""
    where, known = f"views[{number}]: ", View.__annotations__
    values: dict[str, Any] = dict(view)
    refuse_unknown(values, list(known), ADVICE, where)
    values |= {name: numbers(values[name]) for name in ("scale", "ratio") if name in values}
    if "color_jitter" in values:
        values["color_jitter"] = jitter_strengths(values["color_jitter"])
    of_data = {name: values.pop(name) for name in ("image_size", "interpolation") if name in values}
    return (
        build_section(DataSection, where, **data.model_dump() | of_data),
        build_section(AugmentSection, where, **augment.model_dump() | values),
    )
