"""The data section: the prepared folder, and how its batches are loaded."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from pipeline.section import Positive, Section, Triple, key

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class PreparedSection(Section):
    """Keys that pictures and text have in common."""

    path: str = key(..., "folder written by `widemix prep` (manifest.json and the .beton files)")
    train_split: str = key("train", "split to train on")
    eval_split: str = key("val", "split to evaluate on")
    num_classes: Annotated[int, Field(ge=0)] = key(
        0, "number of classes of the head; 0: as many as the prepared folder has. Training refuses another number"
    )
    checksums: bool = key(
        True, "compare every sample that is read with its checksum; takes 1 % of a JPEG's decoding, 10 % of pixels'"
    )
    workers: Annotated[int, Field(ge=0)] = key(
        0, "decoding threads per rank; 0 divides the usable CPUs among the ranks of the node"
    )
    order: Literal["auto", "random", "paged"] = key(
        "auto",
        "sample order; random: a permutation of all samples; paged: samples near in the file are near in time, for "
        "files larger than memory; auto: paged if the training file exceeds data.memory_gib",
    )
    memory_gib: Annotated[float, Field(gt=0)] = key(
        128.0,
        "order auto: GiB of the file that a node is assumed to keep in memory; not measured, so that a recipe has "
        "the same order on every machine and after every restart",
    )
    shuffle_window_mib: Positive = key(
        4096, "order paged: MiB of the file, over all ranks, within which samples are shuffled"
    )
    prefetch_batches: Positive = key(3, "batches per rank that are decoded ahead; one more is on the device")
    prefetch_mib: Positive = key(
        1024, "limit of the memory of these batches, MiB per rank; at least one batch is decoded ahead"
    )


class DataSection(PreparedSection):
    """Prepared pictures."""

    kind: Literal["pictures"] = key("pictures", "pictures, or text (sentence pairs as tokens)")
    image_size: Positive = key(224, "side of the model's square input, pixels")
    crop_pct: Annotated[float, Field(gt=0, le=1)] = key(
        0.875, "evaluation: side of the centre crop as a share of the picture's shorter side"
    )
    interpolation: Literal["bilinear", "bicubic", "random"] = key(
        "bilinear",
        "antialiased interpolation of resized crops, and that of policy operations which move pixels; random: drawn "
        "for each picture and operation (evaluation: bicubic)",
    )
    on_corrupt: Literal["error", "replace"] = key(
        "error",
        "training picture that cannot be read: stop with an error, or replace it by another, with a warning",
    )
    mean: Triple = key(IMAGENET_MEAN, "mean of the RGB channels, subtracted; on a scale of 0 to 1")
    std: Triple = key(IMAGENET_STD, "standard deviation of the RGB channels, divided by; on a scale of 0 to 1")


class TextDataSection(PreparedSection):
    """Prepared sentence pairs."""

    kind: Literal["text"] = key(..., "pictures, or text (sentence pairs as tokens)")
    image_size: ClassVar[int] = 0  # passed to builders of text models, which ignore it


def _kind(value: Any) -> Any:
    """The kind of data; a recipe that omits the key means pictures."""
    return value.get("kind", "pictures") if isinstance(value, dict) else getattr(value, "kind", "pictures")


AnyDataSection = Annotated[
    Annotated[DataSection, Tag("pictures")] | Annotated[TextDataSection, Tag("text")], Discriminator(_kind)
]
