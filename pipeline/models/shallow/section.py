"""Recipe section of shallow MLPs of structured matrices."""

from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator
from typing_extensions import override

from widemix.models.layer_costs import LayerCost, NetworkCost
from widemix.models.section import ModelSection
from widemix.models.structured_factors import split
from widemix.section import Positive, key


class ShallowSection(ModelSection):
    """x -> Bc B2 ReLU(B1 x) with matrices of a chosen kind (Hayase & Karakida 2024, figure 2d)."""

    timm_architecture: ClassVar[str] = "widemix_shallow"

    kind: Literal["shallow"] = key(..., "shallow: B2 ReLU(B1 x) of structured matrices, then a linear head")
    width: Positive = key(..., "m: features of the MLP")
    matrices: Literal["dense", "monarch", "kronecker"] = key(..., "kind of B1 and B2 (equation 12)")

    grayscale: bool = key(
        False, "shallow: the input is one channel, for gray images; false: three channels one after the other"
    )

    @model_validator(mode="after")
    def width_splits(self) -> Self:
        """Structured matrices need a width with two factors."""
        if self.matrices != "dense" and split(self.width)[0] == 1:
            raise ValueError(f"width {self.width} is prime: {self.matrices} matrices need two factors")
        return self

    @override
    def build(self, image_size: int, num_classes: int, **timm: Any) -> Any:
        from widemix.models.shallow.network import ShallowMlp

        return ShallowMlp(self, img_size=image_size, num_classes=num_classes, **timm)

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        pixels, width = (1 if self.grayscale else 3) * image_size**2, self.width
        first = _matrix(self.matrices, pixels, width)
        first[0] = replace(first[0], input_gradient=False)
        layers = [*first, *_matrix(self.matrices, width, width), LayerCost(1, width, num_classes, mixes=False)]
        unread = 2 * image_size**2 if self.grayscale else 0  # the image is saved with all its channels
        return NetworkCost(layers, [], width=width, gamma=1.0, extra_saved=unread)

    @override
    def summary(self) -> str:
        return f"{self.matrices} MLP, m {self.width}"

    @override
    @classmethod
    def named(cls) -> dict[str, tuple[Self, int]]:
        return {
            "shallow_dense_4096_32": (cls(kind="shallow", width=4096, matrices="dense"), 32),
            "shallow_monarch_4096_32": (cls(kind="shallow", width=4096, matrices="monarch"), 32),
            "shallow_kronecker_4096_32": (cls(kind="shallow", width=4096, matrices="kronecker"), 32),
        }

    @override
    def first_layer(self) -> str:
        return "stem.0" if self.matrices == "dense" else "stem.0.right"


def _matrix(kind: str, inputs: int, outputs: int) -> list[LayerCost]:
    """The factors of a matrix without bias."""
    if kind == "dense":
        return [LayerCost(1, inputs, outputs, bias=False)]
    (rows, columns), (out_rows, out_columns) = split(inputs), split(outputs)
    shared = kind == "kronecker"
    return [
        LayerCost(rows, columns, out_columns, matrices=1 if shared else rows, bias=False),
        LayerCost(out_columns, rows, out_rows, matrices=1 if shared else out_columns, bias=False),
    ]


SECTIONS = (ShallowSection,)
