"""Recipe section of SW-MLPs."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, patch_layer
from widemix.models.section import Expansion, FamilySection, Seed, check_patches, hidden_width
from widemix.section import Depth, Epsilon, Positive, key


class SwMlpSection(FamilySection):
    """An MLP with frozen random masks on its weights, or dense (Hayase & Karakida 2024, appendices A.1 and A.2.5)."""

    timm_architecture: ClassVar[str] = "widemix_sw_mlp"

    network = "SwMlp"
    kind: Literal["sw_mlp"] = key(..., "sw_mlp: MLP with frozen random masks on its weights")
    patch_size: Positive = key(..., "P: side of a patch, pixels; must divide data.image_size")
    channels: Positive | None = key(
        None, "C: channels of a token; sw_mlp: null takes those that make S0 * C nearest to width"
    )
    width: Positive = key(..., "m: features of the MLP")
    depth: Depth = key(..., "L: blocks")
    density: Annotated[float, Field(gt=0, le=1)] = key(
        ..., "p: fraction of the weights that the mask keeps; 1 is dense"
    )
    expansion: Expansion | None = key(None, "sw_mlp: gamma, hidden width over m; null: single layers (equation S.16)")
    outer_activation: bool = key(
        True,
        "sw_mlp with expansion: an activation after the second layer too (equation S.17); false: as in the mixings "
        "of an MLP-Mixer (appendix C.1)",
    )
    project_features: bool = key(
        False, "sw_mlp: the first block maps the S0 * C features of the patch layer to m, with the skip LN((M * W) x)"
    )
    pool: bool = key(
        False, "average over the m / C tokens before the head (table S.1); false: the head reads all m features"
    )
    norm_eps: Epsilon = key(
        1e-6, "epsilon of LayerNorm: 1e-6 as in timm and the original code, 1e-5 in Hayase & Karakida 2024 (A.2.1)"
    )
    mask_seed: Seed = key(0, "seed of the masks")

    @model_validator(mode="after")
    def options_apply(self) -> Self:
        """Single layers have one activation, and tokens are whole."""
        if self.expansion is None and not self.outer_activation:
            raise ValueError(
                "outer_activation false: single layers have one activation; set expansion, or leave it out"
            )
        if self.pool and (self.channels is None or self.width % self.channels):
            raise ValueError(f"pool true: width {self.width} must be a multiple of channels {self.channels}")
        return self

    @property
    def hidden_width(self) -> int:
        """gamma * m, rounded."""
        return hidden_width(self.expansion or 1, self.width)

    def patch_channels(self, image_size: int) -> int:
        """C: as given, or what makes S0 * C nearest to m."""
        return self.channels or max(1, round(self.width / (image_size // self.patch_size) ** 2))

    @override
    def check_image_size(self, side: int) -> None:
        patches = check_patches(side, self.patch_size) ** 2
        embedded = patches * self.patch_channels(side)
        if embedded != self.width and not self.project_features:
            raise ValueError(
                f"model.width {self.width}: {patches} patches of {embedded // patches} channels have {embedded} "
                "features; set model.width to that, or model.project_features to true"
            )

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        """Every layer, as a GPU multiplies it; the masks' nonzeros are sampled as the network samples them."""
        import numpy as np
        import torch

        from widemix.models.sw_mlp.sparse import multiplies_sparsely, row_counts

        width, hidden = self.width, self.hidden_width
        channels = self.patch_channels(image_size)
        embedded = (image_size // self.patch_size) ** 2 * channels

        def masked(block: int, number: int, inputs: int, outputs: int, **options: Any) -> LayerCost:
            generator = np.random.default_rng((self.mask_seed, block, number))
            nonzero = int(row_counts(outputs, inputs, self.density, generator).sum())
            dense = not multiplies_sparsely(torch.device("cuda"), self.density, inputs * outputs)
            return LayerCost(1, inputs, outputs, nonzero, multiplied_dense=dense, **options)

        layers = [patch_layer(image_size, self.patch_size, channels)]
        norms = []
        if self.project_features:
            # The norm saves its input.
            layers.append(masked(0, 2, embedded, width, bias=False, mixes=False, saves_input=False))
            norms.append(NormCost(1, width))
        for block in range(self.depth):
            inputs = width if block else embedded
            norms.append(NormCost(1, inputs))
            layers.append(masked(block, 0, inputs, hidden, activated=True))
            if self.expansion is not None:
                layers.append(masked(block, 1, hidden, width, activated=self.outer_activation))
        tokens = width // channels if self.pool else 1
        norms.append(NormCost(tokens, width // tokens))
        layers.append(LayerCost(1, width // tokens, num_classes, mixes=False))
        return NetworkCost(layers, norms, width=width, gamma=self.expansion or 1.0)

    @override
    def summary(self, image_size: int) -> str:
        hidden = f", gamma {self.expansion:g}" if self.expansion else ""
        return f"SW-MLP, P {self.patch_size}, m {self.width}, p {self.density:g}, L {self.depth}{hidden}"

    @override
    @classmethod
    def named(cls) -> dict[str, tuple[Self, int]]:
        figure5 = cls(kind="sw_mlp", patch_size=4, width=1619, density=0.1, depth=8, project_features=True)
        figure2 = cls(
            kind="sw_mlp",
            patch_size=4,
            width=4096,
            channels=64,
            density=1 / 64,
            depth=6,
            expansion=2.0,
            outer_activation=False,
            pool=True,
        )
        return {"sw_mlp_1619_32": (figure5, 32), "sw_mlp_4096_32": (figure2, 32)}

    @override
    def first_layer(self) -> str:
        return "stem.proj"


SECTIONS = (SwMlpSection,)
