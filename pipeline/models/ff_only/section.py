"""Recipe section of FF-only networks."""

from typing import ClassVar, Literal, Self

from typing_extensions import override

from widemix.models.layer_costs import NetworkCost
from widemix.models.section import Expansion, ModelSpec, PatchedSection
from widemix.section import key


class FfOnlySection(PatchedSection):
    """FF-only: feed-forward layers alone (Melas-Kyriazi 2021)."""

    timm_architecture: ClassVar[str] = "ff_only_b16_224"

    kind: Literal["ff_only"] = key(..., "ff_only: a ViT with feed-forward layers over tokens in place of attention")
    expansion: Expansion = key(4.0, "ff_only: hidden width of both feed-forward layers over their own")

    @override
    def model_spec(self, image_size: int) -> ModelSpec:
        from widemix.models.ff_only.network import FfOnly

        return FfOnly, self.block_arguments(image_size) | {"expansion": self.expansion}

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        from widemix.models.ff_only.cost import ff_only_costs

        return ff_only_costs(self, image_size, num_classes)

    @override
    @classmethod
    def named(cls) -> dict[str, tuple[Self, int]]:
        return {"ff_only_b16_224": (cls(kind="ff_only", patch_size=16, channels=768, depth=12), 224)}


SECTIONS = (FfOnlySection,)
