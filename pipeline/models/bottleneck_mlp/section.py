"""Recipe section of the residual MLPs of "Scaling MLPs"."""

from typing import Any, ClassVar, Literal, Self

from typing_extensions import override

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, mlp_layers
from widemix.models.section import Expansion, ModelSection, hidden_width
from widemix.section import Depth, Epsilon, Positive, key


class BottleneckMlpSection(ModelSection):
    """A dense MLP with residual blocks, the network of "Scaling MLPs" (Bachmann et al. 2023)."""

    timm_architecture: ClassVar[str] = "widemix_bottleneck_mlp"

    kind: Literal["bottleneck_mlp"] = key(
        ..., 'bottleneck_mlp: residual MLP of "Scaling MLPs", whose published weights train.init_from reads'
    )
    width: Positive = key(..., "m: features of the MLP")
    depth: Depth = key(..., "L: blocks")
    expansion: Expansion = key(4.0, "gamma: hidden width over m")
    norm_eps: Epsilon = key(1e-5, "epsilon of LayerNorm")

    @override
    def build(self, image_size: int, num_classes: int, **timm: Any) -> Any:
        from widemix.models.bottleneck_mlp.network import BottleneckMlp

        return BottleneckMlp(self, img_size=image_size, num_classes=num_classes, **timm)

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        width = self.width
        block = mlp_layers(1, width, hidden_width(self.expansion, width), width)
        layers = [
            LayerCost(1, 3 * image_size**2, width, mixes=False, input_gradient=False),
            *(layer for _ in range(self.depth) for layer in block),
            LayerCost(1, width, num_classes, mixes=False),
        ]
        return NetworkCost(layers, [NormCost(1, width)] * self.depth, width=width, gamma=self.expansion)

    @override
    def summary(self) -> str:
        return f"MLP, m {self.width}, gamma {self.expansion:g}, L {self.depth}"

    @override
    @classmethod
    def named(cls) -> dict[str, tuple[Self, int]]:
        return {
            f"mlp_b{depth}_wi{width}_64": (cls(kind="bottleneck_mlp", width=width, depth=depth), 64)
            for depth in (6, 12)
            for width in (512, 1024)
        }

    @override
    def first_layer(self) -> str:
        return "stem"


SECTIONS = (BottleneckMlpSection,)
