"""Recipe section of S-FC and S-LOCAL."""

from typing import Any, ClassVar, Literal, Self

from typing_extensions import override

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost
from widemix.models.section import ModelSection
from widemix.section import Positive, key


class LassoSection(ModelSection):
    """The shallow networks of beta-LASSO (Neyshabur 2020)."""

    timm_architecture: ClassVar[str] = "widemix_lasso"

    kind: Literal["s_fc", "s_local"] = key(
        ..., "s_fc, s_local: S-CONV made fully, or locally, connected (beta-LASSO)"
    )
    base_channels: Positive = key(
        ..., "alpha: channels of the S-CONV that it comes from; 150 makes S-FC's 256 M weights"
    )

    @override
    def build(self, image_size: int, num_classes: int, **timm: Any) -> Any:
        from widemix.models.lasso.network import LassoNet

        return LassoNet(self, img_size=image_size, num_classes=num_classes, **timm)

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        from widemix.models.lasso.network import HIDDEN, KERNEL, count_pixels, count_positions

        positions, width = count_positions(image_size), HIDDEN * self.base_channels
        first = positions * self.base_channels
        if self.kind == "s_fc":
            opening = LayerCost(1, 3 * image_size**2, first, bias=False, input_gradient=False)
        else:
            connections = 3 * count_pixels(image_size) * self.base_channels
            opening = LayerCost(
                positions,
                3 * KERNEL**2,
                self.base_channels,
                matrices=positions,
                bias=False,
                input_gradient=False,
                overlapping=(connections, 3 * image_size**2 * first),
            )
        layers = [
            opening,
            LayerCost(1, first, width, bias=False),
            LayerCost(1, width, num_classes, mixes=False),
        ]
        norms = [NormCost(1, first, statistics=0), NormCost(1, width, statistics=0)]
        return NetworkCost(layers, norms, width=first, gamma=1.0)

    @override
    def summary(self) -> str:
        return f"{self.kind.upper().replace('_', '-')}, alpha {self.base_channels}"

    @override
    @classmethod
    def named(cls) -> dict[str, tuple[Self, int]]:
        return {
            "s_fc_32": (cls(kind="s_fc", base_channels=150), 32),
            "s_local_32": (cls(kind="s_local", base_channels=150), 32),
        }

    @override
    def first_layer(self) -> str:
        return "stem.0"


SECTIONS = (LassoSection,)
