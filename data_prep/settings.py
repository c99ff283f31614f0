"""The settings of a preparation. The manifest records them."""

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from widemix.arguments import Integer, Whole, check_arguments
from widemix.errors import InputError

PAGE = 8 << 20  # bytes; FFCV's default. No sample crosses a page: FFCV's process cache relies on that
LARGEST_PAGE = 64 << 20


@dataclass(frozen=True)
class PrepSettings:
    """How images and sentence pairs are stored, and which part of train is kept. Wrong values raise `InputError`.

    Sources that are arrays (digits, CIFAR, MNIST, SVHN, STL-10) are stored raw, whatever the settings.
    """

    max_size: Integer = 512  # pixels of the side named by `side`; larger images are shrunk, 0 shrinks none
    side: Literal["longest", "shortest"] = "longest"
    quality: Integer = 90  # of JPEGs that are re-encoded, 1 to 100
    raw: bool = False  # store pixels instead of JPEGs
    # JPEGs, or their quantised coefficients in a form that is decoded faster and restores the JPEG byte for byte.
    encoding: Literal["jpeg", "coefficients"] = "jpeg"
    restart_markers: bool = True  # in JPEGs, with a table of the segments between them; none among coefficients
    max_pixels: Whole = 178_956_970  # that are decoded of an image; one with more is corrupt; the default is Pillow's
    to_8_bit_rgb: bool = False  # of images with deeper levels or more channels, which otherwise count as corrupt
    on_corrupt: Literal["error", "skip"] = "skip"  # an undecodable image stops the preparation, or is left out
    splits: str = ""  # of the source to prepare, separated by commas; empty: all
    targets: str = ""  # csv: columns with numbers to predict, separated by commas; * for all but path and split
    part: str = ""  # "3/32": only the third of 32 parts of each split, to be joined; empty: all
    fraction: float = 1.0  # of train to keep, (0, 1]; with one seed, smaller ones lie within larger ones
    per_class: Whole = 0  # samples of each class of train to keep; 0 keeps all
    holdout: float = 0.0  # fraction of train that becomes the split `holdout`, [0, 1)
    length: Integer = 128  # tokens that a sentence pair is truncated or padded to
    vocab: str = ""  # WordPiece vocabulary file, one word per line; empty: vocab.txt in the source, else learnt
    vocab_size: Integer = 30_522  # most words of a learnt vocabulary
    # Store train in a random order if the source lists it class by class; `widemix prep` does by default.
    shuffle: bool = False
    seed: Whole = 0  # for fraction, per_class, holdout and shuffle

    def __post_init__(self) -> None:
        if not 0 <= self.max_size <= 65_535:
            raise InputError(f"max_size {self.max_size}: an image's side is 1 to 65535 pixels, or 0 for no limit")
        if self.max_pixels < 1:
            raise InputError(f"max_pixels {self.max_pixels}: must be at least 1")
        if self.raw and self.encoding != "jpeg":
            raise InputError(f"raw and encoding {self.encoding}: pixels have no other encoding; set one of the two")
        if not 1 <= self.quality <= 100:
            raise InputError(f"quality {self.quality}: JPEG quality is 1 to 100")
        if self.splits and not all(name.isidentifier() for name in self.splits.split(",")):
            raise InputError(f"splits {self.splits!r}: names are separated by commas, such as train,val")
        number, count = self.part_of
        if self.part and not 1 <= number <= count:
            raise InputError(f"part {self.part!r}: must be such as 3/32, the third of 32 parts")
        if not 0 < self.fraction <= 1:
            raise InputError(f"fraction {self.fraction}: must be above 0 and at most 1 (or 100%)")
        if not 0 <= self.holdout < 1:
            raise InputError(f"holdout {self.holdout}: must be at least 0 and below 1 (or 100%)")
        if self.per_class and self.fraction != 1:
            raise InputError(f"per_class {self.per_class} and fraction {self.fraction} both reduce train: set one")
        if not 8 <= self.length <= 65_536:
            raise InputError(f"length {self.length}: a pair has 8 to 65536 tokens")
        if not 100 <= self.vocab_size <= 1_000_000:
            raise InputError(f"vocab_size {self.vocab_size}: a vocabulary has 100 to a million words")

    @property
    def segments(self) -> bool:
        """Whether JPEGs get restart markers."""
        return self.restart_markers and self.encoding == "jpeg"

    @property
    def reduces_train(self) -> bool:
        """Whether train is not kept whole."""
        return self.fraction != 1 or self.per_class > 0 or self.holdout > 0

    @property
    def part_of(self) -> tuple[int, int]:
        """The number of the part, from 1, and how many there are; (1, 1) for all, (0, 0) if it is none."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.part or "1/1", re.ASCII)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @property
    def page(self) -> int:
        """Bytes of a page where images may be larger than `PAGE`; otherwise 0, for the default."""
        bounded = self.max_size > 0 and self.side == "longest"
        needed = 3 * self.max_size**2 + (1 << 16) if bounded else LARGEST_PAGE  # pixels, or a JPEG and its table
        return 0 if needed <= PAGE else min(LARGEST_PAGE, 1 << (needed - 1).bit_length())

    def shrunk_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """The (width, height) at which an image of that size is stored, in pixels."""
        measured = max(size) if self.side == "longest" else min(size)
        if self.max_size == 0 or measured <= self.max_size:
            return size
        width, height = (max(1, round(pixels * self.max_size / measured)) for pixels in size)
        return width, height

    def as_json(self) -> dict[str, Any]:
        """The settings by name, as the manifest records them."""
        return asdict(self)


PrepSettings.__init__ = check_arguments(PrepSettings.__init__)  # type: ignore[method-assign]


def parse_fraction(text: str) -> float:
    """`0.01` or `1%` as 0.01; raises `InputError` for anything else."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise InputError(f"{text!r} is not a fraction such as 0.01 or 1%") from None
