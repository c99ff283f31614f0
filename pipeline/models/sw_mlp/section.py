"""Recipe section of SW-MLPs."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field
from typing_extensions import override

from pipeline.models.layer_costs import NetworkCost
from pipeline.models.section import Expansion, ModelSection, ModelSpec, Seed, hidden_width
from pipeline.section import Positive, key


class SwMlpSection(ModelSection):
    """An MLP with frozen random masks on its weights, or dense (Hayase & Karakida 2024, equations S.16 and S.17)."""

    timm_architecture: ClassVar[str] = "sw_mlp_1619_32"

    kind: Literal["sw_mlp"] = key(..., "sw_mlp: MLP with frozen random masks on its weights")
    width: Positive = key(..., "m: features of the MLP")
    depth: Positive = key(..., "L: blocks")
    density: Annotated[float, Field(gt=0, le=1)] = key(
        ..., "p: fraction of the weights that the mask keeps; 1 is dense"
    )
    expansion: Expansion | None = key(None, "sw_mlp: gamma, hidden width over m; null: single layers (equation S.16)")
    mask_seed: Seed = key(0, "seed of the masks")

    @property
    def hidden_width(self) -> int:
        """gamma * m, rounded."""
        return hidden_width(self.expansion or 1, self.width)

    @override
    def model_spec(self, image_size: int) -> ModelSpec:
        from pipeline.models.sw_mlp.network import SwMlp

        return SwMlp, {
            "img_size": image_size,
            "width": self.width,
            "depth": self.depth,
            "density": self.density,
            "hidden": self.hidden_width if self.expansion else None,
            "mask_seed": self.mask_seed,
        }

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        from pipeline.models.sw_mlp.cost import sw_mlp_costs

        return sw_mlp_costs(self, image_size, num_classes)

    @override
    def summary(self) -> str:
        hidden = f", gamma {self.expansion:g}" if self.expansion else ""
        return f"SW-MLP, m {self.width}, p {self.density:g}, L {self.depth}{hidden}"

    @override
    @classmethod
    def named(cls) -> dict[str, tuple[Self, int]]:
        # Omega = 2^18 at gamma 1; as wide as an S-Mixer of S = C = 64; Omega = 2^21 at gamma 2.
        sizes = ((1619, 0.1, None), (4096, 1 / 64, None), (8192, 1 / 64, 2.0))
        return {
            f"sw_mlp_{width}_32": (cls(kind="sw_mlp", width=width, depth=6, density=density, expansion=gamma), 32)
            for width, density, gamma in sizes
        }

    @override
    def first_layer(self) -> str:
        return "stem"


SECTIONS = (SwMlpSection,)
