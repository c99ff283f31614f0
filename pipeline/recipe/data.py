"""Which prepared folder, and how its batches reach the model."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from pipeline.section import Positive, Section, Triple, key

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class PreparedSection(Section):
    """What pictures and text have in common."""

    path: str = key(..., "folder that `widemix prep` wrote (manifest.json and the .beton files)")
    train_split: str = key("train", "split to train on")
    eval_split: str = key("val", "split to evaluate on")
    num_classes: Positive = key(..., "classes that the head tells apart; no fewer than the manifest's")
    workers: Annotated[int, Field(ge=0)] = key(
        0, "decoding threads per rank; 0 shares the allowed CPUs among the ranks of a node"
    )
    order: Literal["auto", "random", "paged"] = key(
        "auto",
        "random: any sample at any time; paged: for files larger than memory, samples near in the file are near in "
        "time; auto: paged where the training file exceeds data.memory_gib",
    )
    memory_gib: Annotated[float, Field(gt=0)] = key(
        128.0,
        "order auto: GiB of the file that a node is taken to keep in memory; stated and not measured, so that a "
        "recipe means the same order on every machine and at every restart",
    )
    shuffle_window_mib: Positive = key(
        4096, "order paged: MiB of the file, over all ranks, within which samples are shuffled"
    )
    prefetch_batches: Positive = key(3, "batches decoded ahead of the step, per rank; one more is on the device")
    prefetch_mib: Positive = key(
        1024, "MiB that the batches decoded ahead may take, per rank: large ones are fewer, but one at least"
    )


class DataSection(PreparedSection):
    """Prepared pictures."""

    kind: Literal["pictures"] = key("pictures", "pictures, or text: sentence pairs as tokens")
    image_size: Positive = key(224, "side of the square picture the model sees, pixels")
    crop_pct: Annotated[float, Field(gt=0, le=1)] = key(
        0.875, "evaluation: side of the centre crop, as a share of the picture's shorter side"
    )
    interpolation: Literal["bilinear", "bicubic", "random"] = key(
        "bilinear", "how crops are resized, antialiased; random: either, drawn for each picture (evaluation: bicubic)"
    )
    on_corrupt: Literal["error", "replace"] = key(
        "error", "a training picture that cannot be read: the end, or another in its place, told and counted"
    )
    mean: Triple = key(IMAGENET_MEAN, "subtracted per RGB channel, on a scale of 0 to 1")
    std: Triple = key(IMAGENET_STD, "divided by per RGB channel, on a scale of 0 to 1")


class TextDataSection(PreparedSection):
    """Prepared sentence pairs."""

    kind: Literal["text"] = key(..., "pictures, or text: sentence pairs as tokens")
    image_size: ClassVar[int] = 0  # no pictures: what builders of text models are given, who do not look at it


def _kind(value: Any) -> Any:
    """A silent recipe means pictures."""
    return value.get("kind", "pictures") if isinstance(value, dict) else getattr(value, "kind", "pictures")


AnyDataSection = Annotated[
    Annotated[DataSection, Tag("pictures")] | Annotated[TextDataSection, Tag("text")], Discriminator(_kind)
]
