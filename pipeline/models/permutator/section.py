"""Recipe section of Vision Permutators."""

from typing import ClassVar, Literal, Self

from typing_extensions import override

from widemix.models.layer_costs import NetworkCost
from widemix.models.section import Expansion, ModelSpec, PatchedSection, check_patches
from widemix.section import key


class PermutatorSection(PatchedSection):
    """Vision Permutator (Hou et al. 2021) with blocks of one size."""

    timm_architecture: ClassVar[str] = "permutator_s14_224"
    has_feature_maps: ClassVar[bool] = True

    kind: Literal["permutator"] = key(..., "permutator: Vision Permutator, mixing along height, width and channels")
    expansion: Expansion = key(3.0, "permutator: hidden width of the channel MLP over C")

    @override
    def check_image_size(self, side: int) -> None:
        grid = check_patches(side, self.patch_size)
        if self.channels % grid:
            raise ValueError(f"model.channels {self.channels} do not divide by the grid's side {grid}")

    @override
    def model_spec(self, image_size: int) -> ModelSpec:
        from widemix.models.permutator.network import Permutator

        return Permutator, self.block_arguments(image_size) | {"expansion": self.expansion}

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        from widemix.models.permutator.cost import permutator_costs

        return permutator_costs(self, image_size, num_classes)

    @override
    @classmethod
    def named(cls) -> dict[str, tuple[Self, int]]:
        return {"permutator_s14_224": (cls(kind="permutator", patch_size=14, channels=384, depth=18), 224)}


SECTIONS = (PermutatorSection,)
