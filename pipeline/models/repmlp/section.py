"""Recipe section of RepMLPs."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, patch_layer
from widemix.models.section import Expansion, PatchedSection, hidden_width
from widemix.section import Positive, key


class RepMlpSection(PatchedSection):
    """RepMLP (Ding et al. 2022) with blocks of one size."""

    timm_architecture: ClassVar[str] = "widemix_repmlp"
    has_feature_maps: ClassVar[bool] = True

    kind: Literal["repmlp"] = key(..., "repmlp: token mixing trained in parallel to convolutions that fuse into it")
    expansion: Expansion = key(4.0, "repmlp: hidden width of the channel MLP over C")
    share_sets: Positive = key(..., "G: sets of channels with token-mixing weights of their own; divides C")
    kernels: Annotated[tuple[Positive, ...], Field(strict=False)] = key((1, 3), "odd sides of the convolutions")

    @model_validator(mode="after")
    def sets_and_kernels_fit(self) -> Self:
        """Sets divide the channels, and kernels have a middle."""
        if self.channels % self.share_sets:
            raise ValueError(f"share_sets {self.share_sets} does not divide channels {self.channels}")
        if any(side % 2 == 0 for side in self.kernels):
            raise ValueError(f"kernels {list(self.kernels)} must be odd")
        return self

    @override
    def build(self, image_size: int, num_classes: int, **timm: Any) -> Any:
        from widemix.models.repmlp.network import RepMlp

        return RepMlp(self, img_size=image_size, num_classes=num_classes, **timm)

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        """Every layer of the training form, stem to head.

        The convolutions in parallel to the mixing do not count as connections: `RepMlp.fused` folds them into it.
        """
        channels, tokens, sets = self.channels, (image_size // self.patch_size) ** 2, self.share_sets
        hidden = hidden_width(self.expansion, channels)
        of_set = NormCost(channels * tokens // sets, sets, statistics=0)
        block = [
            LayerCost(1, channels, channels // 4, mixes=False),
            LayerCost(1, channels // 4, channels, mixes=False),
        ]
        block += [LayerCost(channels, tokens, tokens, matrices=sets, bias=False)]
        entries = channels * tokens
        block += [
            LayerCost(entries, side**2, 1, matrices=sets, bias=False, mixes=False, saves_input=False)
            for side in self.kernels
        ]
        block += [LayerCost(tokens, channels, hidden, bias=False), LayerCost(tokens, hidden, channels, bias=False)]
        norms = [of_set] * (1 + len(self.kernels))
        norms += [NormCost(tokens, width, statistics=0) for width in (channels, channels, hidden, channels)]
        stem = patch_layer(image_size, self.patch_size, self.channels)
        head = LayerCost(1, channels, num_classes, mixes=False)
        return NetworkCost(
            [stem, *block * self.depth, head],
            [*norms * self.depth, NormCost(tokens, channels)],
            width=entries,
            extra_saved=self.depth * (entries + channels + tokens * hidden),  # what gate and GELU multiply
            tokens=tokens,
            channels=channels,
        )

    @override
    @classmethod
    def named(cls) -> dict[str, tuple[Self, int]]:
        return {"repmlp_s16_224": (cls(kind="repmlp", patch_size=16, channels=512, depth=8, share_sets=32), 224)}


SECTIONS = (RepMlpSection,)
