"""What a preparation may be told about its pictures. The manifest keeps it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipeline.errors import InputError


@dataclass(frozen=True)
class PrepSettings:
    """How pictures are stored. Arrays (digits, ...) are stored raw, whatever stands here."""

    max_size: int = 512  # longest side, pixels; larger pictures are shrunk, 0 shrinks none
    quality: int = 90  # of JPEGs that have to be written anew, 1 to 100
    raw: bool = False  # store pixels in place of JPEGs
    on_bad: Literal["error", "skip"] = "error"  # what an undecodable picture does

    def __post_init__(self) -> None:
        if not 0 <= self.max_size <= 65_535:
            raise InputError(f"max_size {self.max_size}: a picture's side is 1 to 65535 pixels, or 0 for no limit")
        if not 1 <= self.quality <= 100:
            raise InputError(f"quality {self.quality}: JPEG quality is 1 to 100")
        if self.on_bad not in ("error", "skip"):
            raise InputError(f"on_bad {self.on_bad!r}: error or skip")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
