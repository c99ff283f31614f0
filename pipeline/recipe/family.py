"""What the sections of all model families share."""

from typing import Annotated

from pydantic import Field

from pipeline.section import Section

Expansion = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0)]


class Family(Section):
    """What all model sections answer to."""

    def check_image_size(self, side: int) -> None:
        """Complain when the network cannot take square pictures of `side` pixels."""


def check_patches(side: int, patch: int) -> int:
    """Patches along a side of `side` pixels, or a complaint when they do not fit."""
    if side % patch:
        fitting = ", ".join(str(d) for d in range(2, side + 1) if side % d == 0)
        raise ValueError(f"model.patch_size {patch} does not divide data.image_size {side}; {fitting} would")
    return side // patch


def hidden_width(expansion: float, size: int) -> int:
    """gamma * size, to the nearest whole number, at least 1."""
    return max(1, round(expansion * size))
