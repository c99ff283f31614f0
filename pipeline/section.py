"""What every section of a recipe is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Pair = Annotated[tuple[float, float], Field(strict=False)]
Decays = Annotated[tuple[Decay, Decay], Field(strict=False)]
Triple = Annotated[tuple[float, float, float], Field(strict=False)]
Jitter = Annotated[tuple[float, float, float, float], Field(strict=False)]


def key(default, description: str):
    """A recipe key with its default (`...` for none) and the sentence that `widemix train --help` prints."""
    return Field(default=default, description=description)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
