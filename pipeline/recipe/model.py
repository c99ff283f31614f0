"""The model section: which network, in the papers' letters."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.recipe.family import Expansion, Family, Seed, check_patches, hidden_width
from pipeline.recipe.relatives import FfOnlySection, PermutatorSection, RepMlpSection, TimmSection
from pipeline.recipe.text import TextMixerSection, TextTransformerSection
from pipeline.section import Fraction, Positive, key


class MixerSection(Family):
    """An MLP-Mixer or S-Mixer (Hayase & Karakida 2024, section 2 and appendix A), permutations included."""

    kind: Literal["mixer", "s_mixer"] = key(
        ..., "mixer: two layers a mixing; s_mixer: one layer a mixing (the paper's S-Mixer)"
    )
    patch_size: Positive = key(..., "P: side of a patch, pixels; must divide data.image_size")
    tokens: Positive = key(..., "S: tokens the blocks mix; the picture's own count S0 unless project_tokens")
    channels: Positive = key(..., "C: channels a token has")
    depth: Positive = key(..., "L: blocks")
    expansion: Expansion | None = key(
        None, "gamma: hidden width over the layer's own (S, C or m); not of an s_mixer; null in an sw_mlp is S.16"
    )
    token_hidden: Positive | None = key(None, "D_S: hidden width of token mixing, in place of gamma * S")
    channel_hidden: Positive | None = key(None, "D_C: hidden width of channel mixing, in place of gamma * C")
    project_tokens: bool = key(
        False, "the first token mixing maps S0 to S tokens, with the skip LN(W X) (equations S.14, S.15)"
    )
    permutation: Literal["commutation", "random"] = key(
        "commutation",
        "commutation: the normal Mixer; random: RP, i.i.d. frozen permutations of the S*C entries",
    )
    permutation_seed: Seed = key(0, "seed of the random permutations")
    permuted_blocks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] | None = key(
        None, "blocks with random permutations, counted from 0; null is all of them"
    )
    permuted_mixings: Literal["token", "channel", "both"] = key(
        "both", "which mixings of these blocks have random permutations"
    )
    permuted_layers: Literal["mixing", "each"] = key(
        "mixing",
        "mixing: permutations around a mixing MLP (appendix A.2.3); each: around each of its layers (section 5.2)",
    )
    activation: Literal["gelu", "square"] = key("gelu", "phi; square is |x|^2, sigma_2 of Navon & Bronstein 2023")
    norm: Literal["layer", "none"] = key(
        "layer", "layer: LayerNorm before each mixing and the head; none: the bare residual form of Navon & Bronstein"
    )
    drop_path: Fraction = key(0.0, "stochastic depth: probability that a mixing is left out, the same in all blocks")

    @model_validator(mode="after")
    def hidden_widths_are_given_once(self):
        hidden = (self.token_hidden is not None, self.channel_hidden is not None)
        if self.kind == "s_mixer" and (any(hidden) or self.expansion is not None):
            raise ValueError("an s_mixer has no hidden layer: leave out expansion, token_hidden and channel_hidden")
        if self.kind == "mixer" and (self.expansion is None) != all(hidden):
            raise ValueError("a mixer needs either expansion, or both token_hidden and channel_hidden")
        if self.kind == "mixer" and self.expansion is not None and any(hidden):
            raise ValueError("expansion and token_hidden/channel_hidden say the same thing: give one of them")
        return self

    @model_validator(mode="after")
    def permutations_exist(self):
        beyond = [number for number in self.permuted_blocks or () if number >= self.depth]
        if beyond:
            raise ValueError(f"permuted_blocks {beyond}: a depth of {self.depth} has blocks 0 to {self.depth - 1}")
        if self.kind == "s_mixer" and self.permuted_layers == "each":
            raise ValueError("permuted_layers each: an s_mixer has one layer a mixing; leave it out")
        return self

    @property
    def hidden_widths(self) -> tuple[int | None, int | None]:
        """D_S and D_C (gamma * S and gamma * C, rounded), or None for the S-Mixer's single layers."""
        if self.expansion is None:
            return self.token_hidden, self.channel_hidden
        return hidden_width(self.expansion, self.tokens), hidden_width(self.expansion, self.channels)

    def check_image_size(self, side: int) -> None:
        own = check_patches(side, self.patch_size) ** 2
        if self.tokens != own and not self.project_tokens:
            raise ValueError(
                f"model.tokens {self.tokens}: pictures of {side} in patches of {self.patch_size} have {own} tokens; "
                "set model.tokens to that, or model.project_tokens to true"
            )


class SwMlpSection(Family):
    """An MLP of static random masks, or dense (Hayase & Karakida 2024, equations S.16 and S.17)."""

    kind: Literal["sw_mlp"] = key(..., "sw_mlp: MLP with frozen random masks on its weights")
    width: Positive = key(..., "m: features of the MLP")
    depth: Positive = key(..., "L: blocks")
    density: Annotated[float, Field(gt=0, le=1)] = key(
        ..., "p: share of the weights that the mask leaves; 1 is dense"
    )
    expansion: Expansion | None = key(
        None, "gamma: hidden width over the layer's own (S, C or m); not of an s_mixer; null in an sw_mlp is S.16"
    )
    mask_seed: Seed = key(0, "seed of the masks")

    @property
    def hidden_width(self) -> int:
        """gamma * m, rounded."""
        return hidden_width(self.expansion or 1, self.width)


class ShallowSection(Family):
    """x -> Bc B2 ReLU(B1 x) with matrices of a chosen kind (Hayase & Karakida 2024, figure 2d)."""

    kind: Literal["shallow"] = key(..., "shallow: B2 ReLU(B1 x) of structured matrices, then a linear head")
    width: Positive = key(..., "m: features of the MLP")
    matrices: Literal["dense", "monarch", "kronecker"] = key(..., "kind of B1 and B2 (equation 12)")

    @model_validator(mode="after")
    def width_splits(self):
        if self.matrices != "dense" and _is_prime(self.width):
            raise ValueError(f"width {self.width} is prime: {self.matrices} matrices need two factors")
        return self


class LassoSection(Family):
    """The shallow networks of beta-LASSO (Neyshabur 2020)."""

    kind: Literal["s_fc", "s_local"] = key(
        ..., "s_fc, s_local: S-CONV made fully, or locally, connected (beta-LASSO)"
    )
    base_channels: Positive = key(
        ..., "alpha: channels of the S-CONV that it comes from; 150 makes S-FC's 256 M weights"
    )


ModelSection = Annotated[
    MixerSection
    | SwMlpSection
    | ShallowSection
    | LassoSection
    | FfOnlySection
    | PermutatorSection
    | RepMlpSection
    | TimmSection
    | TextMixerSection
    | TextTransformerSection,
    Field(discriminator="kind"),
]


def _is_prime(number: int) -> bool:
    return all(number % d for d in range(2, int(number**0.5) + 1))
