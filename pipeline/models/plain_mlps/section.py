"""Recipe sections of MLPs on pixels: S-FC, S-LOCAL, the residual MLP of "Scaling MLPs", structured matrices."""

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import model_validator
from typing_extensions import override

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, mlp_layers
from widemix.models.section import Expansion, FamilySection, hidden_width
from widemix.models.structured_factors import split
from widemix.section import Depth, Epsilon, Positive, key

KERNEL, STRIDE, PADDING = 9, 2, 4
HIDDEN = 24  # hidden units over alpha


class LassoSection(FamilySection):
    """The shallow networks of beta-LASSO (Neyshabur 2020)."""

    timm_architecture: ClassVar[str] = "widemix_lasso"

    network = "LassoNet"
    kind: Literal["s_fc", "s_local"] = key(
        ..., "s_fc, s_local: S-CONV made fully, or locally, connected (beta-LASSO)"
    )
    base_channels: Positive = key(
        ..., "alpha: channels of the S-CONV that it comes from; 150 makes S-FC's 256 M weights"
    )

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
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
        layers = [opening, LayerCost(1, first, width, bias=False), LayerCost(1, width, num_classes, mixes=False)]
        norms = [NormCost(1, first, statistics=0), NormCost(1, width, statistics=0)]
        return NetworkCost(layers, norms, width=first, gamma=1.0)

    @override
    def summary(self, image_size: int) -> str:
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


class BottleneckMlpSection(FamilySection):
    """A dense MLP with residual blocks, the network of "Scaling MLPs" (Bachmann et al. 2023)."""

    timm_architecture: ClassVar[str] = "widemix_bottleneck_mlp"

    network = "BottleneckMlp"
    kind: Literal["bottleneck_mlp"] = key(
        ..., 'bottleneck_mlp: residual MLP of "Scaling MLPs", whose published weights train.init_from reads'
    )
    width: Positive = key(..., "m: features of the MLP")
    depth: Depth = key(..., "L: blocks")
    expansion: Expansion = key(4.0, "gamma: hidden width over m")
    norm_eps: Epsilon = key(1e-5, "epsilon of LayerNorm")

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
    def summary(self, image_size: int) -> str:
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


class ShallowSection(FamilySection):
    """x -> Bc B2 ReLU(B1 x) with matrices of a chosen kind (Hayase & Karakida 2024, figure 2d)."""

    timm_architecture: ClassVar[str] = "widemix_shallow"

    network = "ShallowMlp"
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
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        pixels, width = (1 if self.grayscale else 3) * image_size**2, self.width
        first = _matrix(self.matrices, pixels, width)
        first[0] = replace(first[0], input_gradient=False)
        layers = [*first, *_matrix(self.matrices, width, width), LayerCost(1, width, num_classes, mixes=False)]
        unread = 2 * image_size**2 if self.grayscale else 0  # the image is saved with all its channels
        return NetworkCost(layers, [], width=width, gamma=1.0, extra_saved=unread)

    @override
    def summary(self, image_size: int) -> str:
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


def count_positions(side: int) -> int:
    """Number of positions of the 9 x 9 window of stride 2 on an image of `side` pixels."""
    return len(_starts(side)) ** 2


def count_pixels(side: int) -> int:
    """Number of pixels that the windows of all positions have together, without the border around the image."""
    return sum(min(start + KERNEL, side) - max(start, 0) for start in _starts(side)) ** 2


def _starts(side: int) -> range:
    """Where the window begins at each of its positions along a side of the image; below 0 within the border."""
    return range(-PADDING, side + PADDING - KERNEL + 1, STRIDE)


SECTIONS = (LassoSection, BottleneckMlpSection, ShallowSection)
