"""Recipe section of Vision Permutators."""

from typing import Any, ClassVar, Literal, Self

from typing_extensions import override

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, mlp_layers, patch_layer
from widemix.models.section import Expansion, PatchedSection, check_patches, hidden_width
from widemix.section import key


class PermutatorSection(PatchedSection):
    """Vision Permutator (Hou et al. 2021) with blocks of one size."""

    timm_architecture: ClassVar[str] = "widemix_permutator"
    has_feature_maps: ClassVar[bool] = True

    kind: Literal["permutator"] = key(..., "permutator: Vision Permutator, mixing along height, width and channels")
    expansion: Expansion = key(3.0, "permutator: hidden width of the channel MLP over C")

    @override
    def check_image_size(self, side: int) -> None:
        grid = check_patches(side, self.patch_size)
        if self.channels % grid:
            raise ValueError(f"model.channels {self.channels} do not divide by the grid's side {grid}")

    @override
    def build(self, image_size: int, num_classes: int, **timm: Any) -> Any:
        from widemix.models.permutator.network import Permutator

        return Permutator(self, img_size=image_size, num_classes=num_classes, **timm)

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        channels, tokens = self.channels, (image_size // self.patch_size) ** 2
        block = [LayerCost(tokens, channels, channels, bias=False)] * 3
        block += [LayerCost(1, channels, channels // 4, mixes=False, activated=True)]
        block += [LayerCost(1, channels // 4, 3 * channels, mixes=False), LayerCost(tokens, channels, channels)]
        block += mlp_layers(tokens, channels, hidden_width(self.expansion, channels), channels)
        stem = patch_layer(image_size, self.patch_size, self.channels)
        head = LayerCost(1, channels, num_classes, mixes=False)
        return NetworkCost(
            [stem, *block * self.depth, head],
            [NormCost(tokens, channels)] * (2 * self.depth + 1),
            width=tokens * channels,
            extra_saved=self.depth * (3 * tokens * channels + 3 * channels),  # the three branches and their weights
            tokens=tokens,
            channels=channels,
        )

    @override
    @classmethod
    def named(cls) -> dict[str, tuple[Self, int]]:
        return {"permutator_s14_224": (cls(kind="permutator", patch_size=14, channels=384, depth=18), 224)}


SECTIONS = (PermutatorSection,)
