"""The data section: the prepared folder, and how its batches are loaded."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from widemix.errors import command
from widemix.section import ByClass, Deviations, Means, Positive, PositiveAmount, Section, key

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class PreparedSection(Section):
    """Keys that images and text have in common."""

    @field_validator("path")
    @classmethod
    def path_is_a_folder(cls, path: str) -> str:
        """Samples are read from a disk; a URL is copied there first."""
        if "\0" in path:
            raise ValueError("has a NUL character; no file name can have one")
        if "://" in path:
            raise ValueError(
                f"{path} is a URL; {command('stage', path, '--to', 'DIR')} copies it to a disk, and prints where"
            )
        return path

    path: str = key(..., "folder written by `widemix prep` (manifest.json and the .beton files)")
    train_split: str = key("train", "split to train on")
    eval_split: str = key("val", "split to evaluate on")
    num_classes: Annotated[int, Field(ge=0, lt=2**31)] = key(
        0, "number of classes of the head; 0: as many as the prepared folder has. Training refuses another number"
    )
    checksums: bool = key(
        True, "compare every sample that is read with its checksum; takes 2 % of JPEGs' decoding time, 5 % of pixels'"
    )
    workers: Annotated[int, Field(ge=0, le=1024)] = key(
        0, "decoding threads per rank; 0 divides the usable CPUs among the ranks of the node"
    )
    order: Literal["auto", "random", "paged"] = key(
        "auto",
        "sample order; random: a permutation of all samples; paged: samples near in the file are near in time, for "
        "files larger than memory; auto: paged if the training file exceeds data.memory_gib",
    )
    memory_gib: PositiveAmount = key(
        128.0,
        "order auto: GiB of the file that a node is assumed to keep in memory; not measured, so that a recipe has "
        "the same order on every machine and after every restart",
    )
    shuffle_window_mib: Positive = key(
        4096, "order paged: MiB of the file, over all ranks, within which samples are shuffled"
    )
    sampling: Literal["balanced", "sqrt"] | ByClass | None = key(
        None,
        "how often classes are sampled, in epochs of the same length; balanced: each as often; sqrt: by the square "
        "root of their size; {name: weight}: samples of these classes so many times as often as those of others; "
        "null: each sample once an epoch",
    )
    prefetch_batches: Positive = key(3, "batches per rank that are decoded ahead; one more is on the device")
    prefetch_mib: Positive = key(
        1024, "limit of the memory of these batches, MiB per rank; at least one batch is decoded ahead"
    )


class DataSection(PreparedSection):
    """Prepared images."""

    kind: Literal["images"] = key("images", "images, or text (sentence pairs as tokens)")
    targets: Literal["class", "multilabel", "regression"] = key(
        "class",
        "what is predicted; class: one of the classes; multilabel: any number of them; regression: numbers. The "
        "last two need a folder prepared with targets; num_classes is their number",
    )
    image_size: Annotated[int, Field(gt=0, le=16_384)] = key(224, "side of the model's square input, pixels")
    crop_pct: Annotated[float, Field(gt=0, le=1)] = key(
        0.875, "evaluation: side of the centre crop as a fraction of the image's shorter side"
    )
    interpolation: Literal["bilinear", "bicubic", "random"] = key(
        "bilinear",
        "antialiased interpolation of resized crops, and that of policy operations which move pixels; random: "
        "sampled for each image and operation (evaluation: bicubic)",
    )
    on_corrupt: Literal["error", "replace"] = key(
        "error",
        "training image that cannot be read: stop with an error, or replace it by another, with a warning",
    )
    mean: Means = key(IMAGENET_MEAN, "mean of the RGB channels, subtracted; on a scale of 0 to 1")
    std: Deviations = key(IMAGENET_STD, "standard deviation of the RGB channels, divided by; on a scale of 0 to 1")
    pixel_order: Literal["original", "patches", "all"] = key(
        "original",
        "order in which the network gets the pixels, in training and evaluation; patches: the patches shuffled, "
        "and the pixels of every patch in the same way; all: all pixels shuffled",
    )
    pixel_patch: Positive = key(16, "pixel_order patches: side of a patch, pixels; that of the network")
    pixel_seed: Annotated[int, Field(ge=0, lt=2**32)] = key(
        0, "pixel_order patches and all: seed of the permutation, the same for all images"
    )

    @model_validator(mode="after")
    def patches_fit(self):
        """Whole patches are shuffled, and nothing is set that is not used."""
        if self.pixel_order == "patches" and self.image_size % self.pixel_patch:
            raise ValueError(f"pixel_patch {self.pixel_patch} does not divide image_size {self.image_size}")
        used = {"original": (), "patches": ("pixel_patch", "pixel_seed"), "all": ("pixel_seed",)}[self.pixel_order]
        for name in ("pixel_patch", "pixel_seed"):
            if name not in used and getattr(self, name) != DataSection.model_fields[name].default:
                raise ValueError(f"{name} is not used with pixel_order {self.pixel_order}")
        return self


class TextDataSection(PreparedSection):
    """Prepared sentence pairs."""

    kind: Literal["text"] = key(..., "images, or text (sentence pairs as tokens)")
    image_size: ClassVar[int] = 0  # passed to builders of text models, which ignore it
    targets: ClassVar[str] = "class"


def _kind(value: Any) -> Any:
    """The kind of data; a recipe that omits the key means images."""
    return value.get("kind", "images") if isinstance(value, dict) else getattr(value, "kind", "images")


AnyDataSection = Annotated[
    Annotated[DataSection, Tag("images")] | Annotated[TextDataSection, Tag("text")], Discriminator(_kind)
]
