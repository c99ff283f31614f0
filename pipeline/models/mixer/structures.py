"""The keys of structured mixing matrices."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from widemix.models.factors import Structure, Weights
from widemix.models.section import ModelSection
from widemix.section import key

_NEEDS = {"rank": {"low_rank", "btt"}, "blocks": {"block_diagonal"}}


class StructuredWeights(ModelSection):
    """What matrices the mixings have (Qiu et al. 2024): `widemix.models.factors` defines them."""

    token_weights: Weights = key(
        "dense",
        "structure of the token mixings' matrices: dense, low_rank, kronecker, monarch, btt (block tensor train) or "
        "block_diagonal (Qiu et al. 2024)",
    )
    channel_weights: Weights = key("dense", "the same of the channel mixings' matrices")
    rank: Annotated[int, Field(gt=0, le=100_000)] | Literal["as_dense"] | None = key(
        None, "rank of low_rank and btt matrices; as_dense: the greatest that costs no more than a dense matrix"
    )
    blocks: Annotated[int, Field(ge=2, le=100_000)] | None = key(
        None, "blocks of a block_diagonal matrix; divides the widths on both sides"
    )

    @model_validator(mode="after")
    def sizes_are_those_of_the_structures(self) -> Self:
        """rank and blocks are there for the structures that have them, and for no others."""
        kinds = {self.token_weights, self.channel_weights}
        for name, takers in _NEEDS.items():
            given = getattr(self, name) is not None
            if given != bool(kinds & takers):
                verb = "is for" if given else "is needed by"
                raise ValueError(f"{name} {verb} token_weights or channel_weights of {' or '.join(sorted(takers))}")
        return self

    def structure(self, name: str) -> Structure:
        """The structure that the key `token_weights` or `channel_weights` says."""
        return Structure(getattr(self, name), self.rank, self.blocks)


def check_structure(name: str, structure: Structure, widths: Sequence[int]) -> None:
    """ValueError for widths of a mixing that its matrices cannot have."""
    for inputs, outputs in pairwise(widths):
        if fault := structure.fault(inputs, outputs):
            raise ValueError(f"{name} {structure.kind}: {fault}; take another number")
