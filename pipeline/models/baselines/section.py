"""Recipe sections of the baselines with patches."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, mlp_layers, patch_layer
from widemix.models.section import Expansion, PatchedSection, check_patches, hidden_width
from widemix.section import Positive, key


class FfOnlySection(PatchedSection):
    """FF-only: feed-forward layers alone (Melas-Kyriazi 2021)."""

    timm_architecture: ClassVar[str] = "widemix_ff_only"

    network = "FfOnly"
    kind: Literal["ff_only"] = key(..., "ff_only: a ViT with feed-forward layers over tokens in place of attention")
    expansion: Expansion = key(4.0, "ff_only: hidden width of both feed-forward layers over their own")

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


class PermutatorSection(PatchedSection):
    """Vision Permutator (Hou et al. 2021) with blocks of one size."""

    timm_architecture: ClassVar[str] = "widemix_permutator"
    has_feature_maps: ClassVar[bool] = True

    network = "Permutator"
    kind: Literal["permutator"] = key(..., "permutator: Vision Permutator, mixing along height, width and channels")
    expansion: Expansion = key(3.0, "permutator: hidden width of the channel MLP over C")

    @override
    def check_image_size(self, side: int) -> None:
        grid = check_patches(side, self.patch_size)
        if self.channels % grid:
            raise ValueError(f"model.channels {self.channels} do not divide by the grid's side {grid}")

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


class RepMlpSection(PatchedSection):
    """RepMLP (Ding et al. 2022) with blocks of one size."""

    timm_architecture: ClassVar[str] = "widemix_repmlp"
    has_feature_maps: ClassVar[bool] = True

    network = "RepMlp"
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
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        """Every layer of the training form, stem to head.

        The convolutions in parallel to the mixing do not count as connections: they could be folded into it.
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


SECTIONS = (FfOnlySection, PermutatorSection, RepMlpSection)
