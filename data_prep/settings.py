"""What a preparation may be told about its pictures and their number. The manifest keeps it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipeline.errors import InputError


@dataclass(frozen=True)
class PrepSettings:
    """How pictures are stored. Arrays (digits, ...) are stored raw, whatever stands here."""

    max_size: int = 512  # of that side, pixels; larger pictures are shrunk, 0 shrinks none
    side: Literal["longest", "shortest"] = "longest"
    quality: int = 90  # of JPEGs that have to be written anew, 1 to 100
    raw: bool = False  # store pixels in place of JPEGs
    restart_markers: bool = True  # in JPEGs, with the places of the segments between them
    on_bad: Literal["error", "skip"] = "skip"  # an undecodable picture ends the preparation, or is left out
    fraction: float = 1.0  # share of train to keep, (0, 1]; the same seed nests smaller ones in larger
    per_class: int = 0  # samples of each class of train to keep; 0 keeps all
    holdout: float = 0.0  # share of train that becomes the split `holdout`, [0, 1)
    length: int = 128  # tokens that a sentence pair is cut or padded to
    vocab: str = ""  # WordPiece vocabulary, a word a line; empty takes vocab.txt beside the source, or learns one
    vocab_size: int = 30_522  # words at most, where it is learnt
    seed: int = 0  # of fraction, per_class and holdout

    def __post_init__(self) -> None:
        if not 0 <= self.max_size <= 65_535:
            raise InputError(f"max_size {self.max_size}: a picture's side is 1 to 65535 pixels, or 0 for no limit")
        if not 1 <= self.quality <= 100:
            raise InputError(f"quality {self.quality}: JPEG quality is 1 to 100")
        if not 0 < self.fraction <= 1:
            raise InputError(f"fraction {self.fraction}: a share above 0 and up to 1 (or 100%)")
        if not 0 <= self.holdout < 1:
            raise InputError(f"holdout {self.holdout}: a share from 0 to below 1 (or 100%)")
        if self.per_class < 0 or self.seed < 0:
            raise InputError(f"per_class {self.per_class}, seed {self.seed}: neither may be negative")
        if self.per_class and self.fraction != 1:
            raise InputError(f"per_class {self.per_class} and fraction {self.fraction} both cut train: give one")
        if not 8 <= self.length <= 65_536:
            raise InputError(f"length {self.length}: a pair has 8 to 65536 tokens")
        if not 100 <= self.vocab_size <= 1_000_000:
            raise InputError(f"vocab_size {self.vocab_size}: a vocabulary has 100 to a million words")
        if self.side not in ("longest", "shortest"):
            raise InputError(f"side {self.side!r}: longest or shortest")
        if self.on_bad not in ("error", "skip"):
            raise InputError(f"on_bad {self.on_bad!r}: error or skip")

    @property
    def cut(self) -> bool:
        """Whether train is not kept whole."""
        return self.fraction != 1 or self.per_class > 0 or self.holdout > 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_share(text: str) -> float:
    """`0.01` or `1%` as 0.01, or `InputError`."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise InputError(f"{text!r} is not a share such as 0.01 or 1%") from None
