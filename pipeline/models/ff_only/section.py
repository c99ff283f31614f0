"""Recipe section of FF-only networks."""

from typing import Any, ClassVar, Literal, Self

from typing_extensions import override

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, mlp_layers, patch_layer
from widemix.models.section import Expansion, PatchedSection, hidden_width
from widemix.section import key


class FfOnlySection(PatchedSection):
    """FF-only: feed-forward layers alone (Melas-Kyriazi 2021)."""

    timm_architecture: ClassVar[str] = "widemix_ff_only"

    kind: Literal["ff_only"] = key(..., "ff_only: a ViT with feed-forward layers over tokens in place of attention")
    expansion: Expansion = key(4.0, "ff_only: hidden width of both feed-forward layers over their own")

    @override
    def build(self, image_size: int, num_classes: int, **timm: Any) -> Any:
        from widemix.models.ff_only.network import FfOnly

        return FfOnly(self, img_size=image_size, num_classes=num_classes, **timm)

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        channels = self.channels
        patches = (image_size // self.patch_size) ** 2
        tokens = patches + 1  # the class token
        layers = [patch_layer(image_size, self.patch_size, self.channels)]
        for _ in range(self.depth):
            layers += mlp_layers(tokens, channels, hidden_width(self.expansion, channels), channels)
            layers += mlp_layers(channels, tokens, hidden_width(self.expansion, tokens), tokens)
        norms = [NormCost(tokens, channels), NormCost(channels, tokens)] * self.depth + [NormCost(tokens, channels)]
        return NetworkCost(
            [*layers, LayerCost(1, channels, num_classes, mixes=False)],
            norms,
            width=tokens * channels,
            extra_parameters=channels + tokens * channels,
            extra_saved=patches * channels,  # the head's input is a view of the last norm's output
            tokens=tokens,
            channels=channels,
        )

    @override
    @classmethod
    def named(cls) -> dict[str, tuple[Self, int]]:
        return {"ff_only_b16_224": (cls(kind="ff_only", patch_size=16, channels=768, depth=12), 224)}


SECTIONS = (FfOnlySection,)
