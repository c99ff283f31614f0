"""Model sections of the Mixer's relatives."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.recipe.family import Expansion, Family, check_patches
from pipeline.section import Fraction, Positive, key


class PatchedSection(Family):
    """What the relatives with patches and blocks of one size have in common."""

    patch_size: Positive = key(..., "P: side of a patch, pixels; must divide data.image_size")
    channels: Positive = key(..., "C: channels a token has")
    depth: Positive = key(..., "L: blocks")
    drop_path: Fraction = key(0.0, "stochastic depth: probability that a mixing is left out, the same in all blocks")

    def check_image_size(self, side: int) -> None:
        check_patches(side, self.patch_size)


class FfOnlySection(PatchedSection):
    """FF-only: feed-forward layers alone (Melas-Kyriazi 2021)."""

    kind: Literal["ff_only"] = key(..., "ff_only: a ViT with feed-forward layers over tokens in place of attention")
    expansion: Expansion = key(4.0, "hidden width of both feed-forward layers over their own width")


class PermutatorSection(PatchedSection):
    """Vision Permutator (Hou et al. 2021) with blocks of one size."""

    kind: Literal["permutator"] = key(..., "permutator: Vision Permutator, mixing along height, width and channels")
    expansion: Expansion = key(3.0, "hidden width of the channel MLP over C")

    def check_image_size(self, side: int) -> None:
        grid = check_patches(side, self.patch_size)
        if self.channels % grid:
            raise ValueError(f"model.channels {self.channels} do not divide by the grid's side {grid}")


class RepMlpSection(PatchedSection):
    """RepMLP (Ding et al. 2022) with blocks of one size."""

    kind: Literal["repmlp"] = key(..., "repmlp: token mixing trained beside convolutions that fuse into it")
    expansion: Expansion = key(4.0, "hidden width of the channel MLP over C")
    share_sets: Positive = key(..., "G: sets of channels with token-mixing weights of their own; divides C")
    kernels: Annotated[tuple[Positive, ...], Field(strict=False)] = key((1, 3), "odd sides of the convolutions")

    @model_validator(mode="after")
    def sets_and_kernels_fit(self):
        if self.channels % self.share_sets:
            raise ValueError(f"share_sets {self.share_sets} does not divide channels {self.channels}")
        if any(side % 2 == 0 for side in self.kernels):
            raise ValueError(f"kernels {list(self.kernels)} must be odd, so that a place has a middle")
        return self


class TimmSection(Family):
    """Any network of timm that takes img_size: ViT, ResMLP, gMLP, ..."""

    kind: Literal["timm"] = key(..., "timm: a network of timm, by its name there")
    name: str = key(..., "timm's name, such as vit_small_patch16_224, resmlp_12_224 or gmlp_s16_224")
    drop_path: Fraction = key(0.0, "stochastic depth, as that network understands it")
