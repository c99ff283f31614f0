"""Recipe section of MLP-Mixers and S-Mixers."""

import math
from collections.abc import Callable, Container, Mapping
from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator
from typing_extensions import override

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, mlp_layers, patch_layer
from widemix.models.mixer.published import NOTES, SIZES, named_mixers
from widemix.models.section import DropPathSection, Expansion, PatchedSection, Seed, hidden_width
from widemix.models.structured_factors import Structure, Weights
from widemix.section import Epsilon, Positive, key

if TYPE_CHECKING:
    from torch import nn

MixingKind = Literal["token", "channel"]
MIXINGS: tuple[MixingKind, ...] = ("token", "channel")

_NEEDS = {"rank": {"low_rank", "btt"}, "blocks": {"block_diagonal"}}  # keys of structures
# Keys that change nothing but random permutations.
_OF_RANDOM = ("permuted_blocks", "permuted_mixings", "permuted_layers", "permuted_skips")


class MixerKeys(DropPathSection):
    """The keys that Mixers of images and of texts share."""

    permutation: Literal["commutation", "random"] = key(
        "commutation", "commutation: the normal Mixer; random: RP, i.i.d. frozen permutations of the S*C entries"
    )
    permutation_seed: Seed = key(0, "seed of the random permutations")
    activation: Literal["gelu", "gelu_tanh", "square"] = key(
        "gelu", "phi; gelu_tanh: GELU by tanh, the default of JAX; square: |x|^2, sigma_2 of Navon & Bronstein 2023"
    )
    norm: Literal["layer", "none"] = key(
        "layer", "layer: LayerNorm before each mixing and the head; none: the bare residual form of Navon & Bronstein"
    )


class MixerSection(MixerKeys, PatchedSection):
    """An MLP-Mixer or S-Mixer (Hayase & Karakida 2024, section 2 and appendix A), permutations included."""

    timm_architecture: ClassVar[str] = "widemix_mixer"
    has_feature_maps: ClassVar[bool] = True

    network = "Mixer"
    kind: Literal["mixer", "s_mixer"] = key(
        ..., "mixer: two layers a mixing; s_mixer: one layer a mixing (the paper's S-Mixer)"
    )
    expansion: Expansion | None = key(None, "mixer: gamma, hidden width over the layer's own (S or C)")
    token_hidden: Positive | None = key(None, "D_S: hidden width of token mixing, in place of gamma * S")
    channel_hidden: Positive | None = key(None, "D_C: hidden width of channel mixing, in place of gamma * C")
    project_tokens: Positive | None = key(
        None,
        "S: the first token mixing maps the image's S0 to S tokens, with the skip LN(W X) (equations S.14, S.15)",
    )
    permuted_blocks: Annotated[tuple[Annotated[int, Field(ge=0, lt=10_000)], ...], Field(strict=False)] | None = key(
        None, "blocks with random permutations, counted from 0; null is all of them"
    )
    permuted_mixings: Literal["token", "channel", "both"] = key(
        "both", "which mixings of these blocks have random permutations"
    )
    permuted_layers: Literal["mixing", "each"] = key(
        "mixing",
        "mixing: permutations around a mixing MLP (appendix A.2.3); each: around each of its layers (section 5.2)",
    )
    permuted_skips: bool = key(
        False, "random permutations of the skips too (pi_r in equation 3 of Navon & Bronstein 2023)"
    )
    token_groups: Positive = key(
        1, "groups of channels with token-mixing weights of their own; 1: all share them, C: untied; divides C"
    )
    token_weights: Weights = key(
        "dense",
        "structure of the token mixings' matrices: dense, low_rank, kronecker, monarch, btt (block tensor train) or "
        "block_diagonal (Qiu et al. 2024)",
    )
    channel_weights: Weights = key("dense", "the same of the channel mixings' matrices")
    rank: Annotated[int, Field(gt=0, le=100_000)] | Literal["as_dense"] | None = key(
        None, "rank of low_rank and btt matrices; as_dense: the greatest that costs no more than a dense matrix"
    )
    blocks: Annotated[int, Field(ge=2, le=100_000)] | None = key(
        None, "blocks of a block_diagonal matrix; divides the widths on both sides"
    )
    norm_eps: Epsilon = key(
        1e-6, "epsilon of LayerNorm: 1e-6 as in timm and the original code, 1e-5 in Hayase & Karakida 2024 (A.2.1)"
    )

    @model_validator(mode="after")
    def hidden_widths_are_given_once(self) -> Self:
        """A mixer has expansion or both hidden widths, an s_mixer neither."""
        hidden = (self.token_hidden is not None, self.channel_hidden is not None)
        if self.kind == "s_mixer" and (any(hidden) or self.expansion is not None):
            raise ValueError("an s_mixer has no hidden layer: leave out expansion, token_hidden and channel_hidden")
        if self.kind == "mixer" and (self.expansion is None) != all(hidden):
            raise ValueError("a mixer needs either expansion, or both token_hidden and channel_hidden")
        if self.kind == "mixer" and self.expansion is not None and any(hidden):
            raise ValueError("expansion and token_hidden/channel_hidden say the same thing: give one of them")
        return self

    @model_validator(mode="after")
    def permutations_exist(self) -> Self:
        """Blocks and layers to permute are there."""
        beyond = [number for number in self.permuted_blocks or () if number >= self.depth]
        if beyond:
            raise ValueError(f"permuted_blocks {beyond}: a depth of {self.depth} has blocks 0 to {self.depth - 1}")
        if self.kind == "s_mixer" and self.permuted_layers == "each":
            raise ValueError("permuted_layers each: an s_mixer has one layer a mixing; leave it out")
        for name in () if self.permutation == "random" else _OF_RANDOM:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: is for an RP Mixer; set permutation to random")
        return self

    @model_validator(mode="after")
    def groups_divide(self) -> Self:
        """Groups of equal size."""
        if self.channels % self.token_groups:
            raise ValueError(f"token_groups {self.token_groups} does not divide channels {self.channels}")
        return self

    @model_validator(mode="after")
    def structures_fit(self) -> Self:
        """Structured matrices of widths that they can have, with what they need and no more; no groups of tokens."""
        kinds = {self.token_weights, self.channel_weights}
        for name, takers in _NEEDS.items():
            given = getattr(self, name) is not None
            if given != bool(kinds & takers):
                verb = "is for" if given else "is needed by"
                raise ValueError(f"{name} {verb} token_weights or channel_weights of {' or '.join(sorted(takers))}")
        if self.token_groups > 1 and self.token_weights != "dense":
            raise ValueError("token_groups are dense matrices: leave out token_weights")
        return self

    def tokens(self, image_size: int) -> int:
        """Return S: `project_tokens`, or the image's own number."""
        return self.tokens_from(self._own_tokens(image_size))

    def tokens_from(self, tokens_in: int) -> int:
        """Return S of an image of `tokens_in` patches: what the first token mixing makes of them, or all of them."""
        return self.project_tokens or tokens_in

    def _own_tokens(self, image_size: int) -> int:
        return (image_size // self.patch_size) ** 2

    def structure(self, kind: MixingKind) -> Structure:
        """Of the matrices of a block's token or channel mixing."""
        return Structure(getattr(self, f"{kind}_weights"), self.rank, self.blocks)

    def mixing_widths(self, kind: MixingKind, tokens_in: int) -> list[int]:
        """Widths of the layers of a mixing on a row, first to last, in a block that reads `tokens_in` tokens."""
        tokens = self.tokens_from(tokens_in)
        token_hidden, channel_hidden = self.hidden_widths(tokens)
        widths = (self.channels, channel_hidden, self.channels)
        if kind == "token":
            widths = (tokens_in, token_hidden, tokens)
        return [width for width in widths if width]

    def hidden_widths(self, tokens: int) -> tuple[int | None, int | None]:
        """D_S and D_C at S tokens (gamma * S and gamma * C, rounded); None for the S-Mixer's single layers."""
        if self.expansion is None:
            return self.token_hidden, self.channel_hidden
        return hidden_width(self.expansion, tokens), hidden_width(self.expansion, self.channels)

    def is_permuted(self, block: int, mixing: MixingKind) -> bool:
        """Whether a mixing of a block, from 0, has random permutations."""
        chosen = self.permuted_blocks is None or block in self.permuted_blocks
        return self.permutation == "random" and chosen and self.permuted_mixings in (mixing, "both")

    @override
    def check_image_size(self, side: int) -> None:
        super().check_image_size(side)
        blocks = {self._own_tokens(side), self.tokens(side)}
        for kind, tokens_in in product(MIXINGS, sorted(blocks)):
            structure = self.structure(kind)
            for inputs, outputs in pairwise(self.mixing_widths(kind, tokens_in)):
                if fault := structure.fault(inputs, outputs):
                    raise ValueError(f"model.{kind}_weights {structure.kind}: {fault}; take another number")

    @override
    @classmethod
    def from_keys(cls, keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> Self:
        if keys.keys() & {"token_hidden", "channel_hidden"}:  # in place of the expansion
            defaults = {**defaults, "expansion": None}
        return super().from_keys(keys, defaults)

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        tokens, own_tokens, channels = self.tokens(image_size), self._own_tokens(image_size), self.channels
        token_hidden, channel_hidden = self.hidden_widths(tokens)
        layers = [patch_layer(image_size, self.patch_size, self.channels)]
        norms = [NormCost(own_tokens, channels)] + [NormCost(tokens, channels)] * (2 * self.depth)
        if self.project_tokens:
            # The skip's input is saved already: by the norm before the token mixing, or by an unpermuted mixing.
            own_copy = self.norm == "none" and self.is_permuted(0, "token")
            layers.append(LayerCost(channels, own_tokens, tokens, bias=False, mixes=False, saves_input=own_copy))
            norms.append(NormCost(tokens, channels))
        for block in range(self.depth):
            inputs = own_tokens if block == 0 else tokens
            token, channel = self.structure("token"), self.structure("channel")
            layers += mlp_layers(channels, inputs, token_hidden, tokens, self.token_groups, token)
            layers += mlp_layers(tokens, channels, channel_hidden, channels, structure=channel)
        layers.append(LayerCost(1, channels, num_classes, mixes=False))
        if self.norm == "none":
            norms = []
        # Not the gamma that gives Omega where the section states it: a first token mixing of S0 tokens shifts that.
        gamma = 1.0 if self.kind == "s_mixer" else self.expansion
        return NetworkCost(layers, norms, width=tokens * channels, gamma=gamma, tokens=tokens, channels=channels)

    @override
    def structured_matrices(self, image_size: int) -> list[tuple[str, Structure, int, int]]:
        return [
            (f"{kind}_weights", self.structure(kind), inputs, outputs)
            for kind in MIXINGS
            for inputs, outputs in pairwise(self.mixing_widths(kind, self.tokens(image_size)))
            if self.structure(kind).kind != "dense"
        ]

    @override
    def summary(self, image_size: int) -> str:
        random = "RP " if self.permutation == "random" else ""
        name = "S-Mixer" if self.kind == "s_mixer" else "Mixer"
        hidden = f", gamma {self.expansion:g}" if self.expansion else ""
        if self.token_hidden:
            hidden = f", D {self.token_hidden}/{self.channel_hidden}"
        groups = f", {self.token_groups} token groups" if self.token_groups > 1 else ""
        structures = [(kind, self.structure(kind).kind) for kind in MIXINGS]
        groups += "".join(f", {name} {kind} weights" for kind, name in structures if name != "dense")
        activation = ", sigma_2" if self.activation == "square" else ""
        shape = f"P {self.patch_size}, S {self.tokens(image_size)}, C {self.channels}, L {self.depth}"
        return f"{random}{name}, {shape}{hidden}{groups}{activation}"

    @override
    def depth_to_width(self) -> float:
        return 2 * self.depth / math.log2(self.channels)

    @override
    def timm_twin(self, image_size: int, num_classes: int) -> "Callable[[], nn.Module] | None":
        from timm.models.mlp_mixer import MlpMixer

        ratios = self._timm_ratios(image_size)
        return ratios and partial(
            MlpMixer,
            num_classes=num_classes,
            img_size=image_size,
            patch_size=self.patch_size,
            num_blocks=self.depth,
            embed_dim=self.channels,
            mlp_ratio=ratios,
        )

    def _timm_ratios(self, image_size: int) -> tuple[float, float] | None:
        """Hidden widths of token and channel mixing over C, by which timm makes them; None if it has other blocks."""
        hidden = [width for width in self.hidden_widths(self.tokens(image_size)) if width is not None]
        if (
            self.project_tokens
            or not hidden
            or (self.activation, self.norm, self.norm_eps) != ("gelu", "layer", 1e-6)
        ):
            return None
        # timm multiplies the ratios by the channels, and cuts off the fraction.
        return cast(tuple[float, float], tuple((width + 0.5) / self.channels for width in hidden))

    @override
    def timm_spec(self, image_size: int, own_names: Container[str]) -> tuple[str, dict[str, Any]]:
        letters = {sizes[:2]: letter for letter, sizes in SIZES.items()}  # which timm has for patches of 16 and 32
        letter = letters.get((self.channels, self.depth)) if self.patch_size in (16, 32) else None
        plain = self.permutation == "commutation" and self.token_groups == 1
        plain = plain and self.token_weights == self.channel_weights == "dense"
        ratios = self._timm_ratios(image_size)
        if not (letter and plain and ratios):  # its entries take no other arguments than these
            return super().timm_spec(image_size, own_names)
        rate = {} if self.drop_path_rises else {"drop_path_rate": self.drop_path}
        return f"mixer_{letter}{self.patch_size}_224", {"img_size": image_size, "mlp_ratio": ratios, **rate}

    @override
    def published_note(self, image_size: int) -> str | None:
        plain, named = self.model_copy(update={"permutation": "commutation"}), named_mixers(type(self))
        return next((note for name, note in NOTES.items() if named[name] == (plain, image_size)), None)

    @override
    @classmethod
    def named(cls) -> dict[str, tuple["MixerSection", int]]:
        return named_mixers(cls)


SECTIONS = (MixerSection,)
