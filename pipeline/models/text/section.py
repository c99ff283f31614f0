"""Recipe sections of the text models."""

import math
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import model_validator
from typing_extensions import override

from widemix.errors import InputError
from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, mlp_layers
from widemix.models.mixer.section import MixerKeys, MixerSection
from widemix.models.section import Expansion, FamilySection, hidden_width
from widemix.section import Depth, Positive, key


class TextSection(FamilySection):
    """The keys that text models share: token ids, and a width that is given or follows from a budget of weights."""

    takes: ClassVar[Literal["images", "text"]] = "text"

    vocabulary: Positive = key(..., "token ids, counted from 0; 0 is padding")
    tokens: Positive = key(..., "T: tokens of a padded sentence pair")
    depth: Depth = key(..., "L: blocks")
    channels: Positive | None = key(None, "d: width of a token; or null, and budget instead")
    budget: Positive | None = key(
        None, "greatest number of weights of all blocks, without embedding and head; d is the largest that fits"
    )
    expansion: Expansion = key(4.0, "text models: hidden width over the layer's own")

    @model_validator(mode="after")
    def width_is_given_once(self) -> Self:
        """Either channels or a budget, and that is enough for the least width."""
        if (self.channels is None) == (self.budget is None):
            raise ValueError("give either channels or budget")
        if self.budget is not None and self.weights(self.width_multiple) > self.budget:
            raise ValueError(
                f"budget {self.budget}: the narrowest of depth {self.depth} has {self.weights(self.width_multiple)}"
            )
        return self

    @property
    def width_multiple(self) -> int:
        """The number that d must be a multiple of."""
        return 1

    @property
    def width(self) -> int:
        """d: as given, or the largest whose blocks keep within the budget."""
        if self.channels is not None:
            return self.channels
        assert self.budget is not None
        unit = self.width_multiple
        low, high = 1, 2  # in units; weights(low) fits, weights(high) does not
        while self.weights(high * unit) <= self.budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.weights(middle * unit) <= self.budget
            low, high = (middle, high) if fits else (low, middle)
        return low * unit

    @abstractmethod
    def weights(self, width: int) -> int:
        """Number of weights of all blocks at this d."""

    @override
    def check_text(self, path: Path, tokens: int, vocabulary: int) -> None:
        if self.tokens < tokens:
            raise InputError(
                f"model.tokens {self.tokens}: pairs in {path} have up to {tokens} tokens; take that many, "
                f"or prepare with --length {self.tokens}"
            )
        if self.vocabulary < vocabulary:
            raise InputError(
                f"model.vocabulary {self.vocabulary}: the tokenizer.json next to {path} has {vocabulary} words"
            )

    @override
    def input_shape(self, image_size: int) -> tuple[int, ...]:
        return (self.tokens,)

    @override
    def depth_to_width(self) -> float:
        return self.depth / math.log2(self.width)

    @override
    def first_layer(self) -> str:
        return "embedding"

    @override
    @classmethod
    def default_text(cls) -> Self:
        """Of the sizes of recipes/mnli/mixer.yaml."""
        (kind,) = cls.kinds()
        sizes = {"vocabulary": 30522, "tokens": 128, "channels": 64, "depth": 2}
        return cls.model_validate({"kind": kind, **sizes})


class TextMixerSection(TextSection, MixerKeys):
    """A Mixer over the tokens of a sentence pair (Navon & Bronstein 2023)."""

    timm_architecture: ClassVar[str] = "text_mixer"

    network = "TextMixer"
    kind: Literal["text_mixer"] = key(..., "text_mixer: token embedding and a Mixer")

    @property
    def mixer(self) -> MixerSection:
        """A Mixer whose blocks are this one's."""
        own = {name: getattr(self, name) for name in MixerKeys.model_fields if name != "kind"}
        own |= {"channels": self.width, "depth": self.depth, "expansion": self.expansion}
        return MixerSection.model_validate({"kind": "mixer", "patch_size": 1, **own})

    @override
    def weights(self, width: int) -> int:
        norms = 4 * width if self.norm == "layer" else 0
        token, channel = (_mlp_weights(size, hidden_width(self.expansion, size)) for size in (self.tokens, width))
        return self.depth * (token + channel + norms)

    @override
    def depth_to_width(self) -> float:
        return 2 * super().depth_to_width()

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        tokens, width = self.tokens, self.width
        block = mlp_layers(width, tokens, hidden_width(self.expansion, tokens), tokens)
        block += mlp_layers(tokens, width, hidden_width(self.expansion, width), width)
        norms = [NormCost(tokens, width)] * (2 * self.depth + 1) if self.norm == "layer" else []
        return NetworkCost(
            [*block * self.depth, LayerCost(1, width, num_classes, mixes=False)],
            norms,
            width=tokens * width,
            extra_parameters=self.vocabulary * width,
            extra_saved=4 * tokens,  # 64-bit ids, the mask, weights of the mean
            tokens=tokens,
            channels=width,
        )

    @override
    def summary(self, image_size: int) -> str:
        random = "RP " if self.permutation == "random" else ""
        activation = ", sigma_2" if self.activation == "square" else ""
        return f"{random}Mixer, T {self.tokens}, d {self.width}, L {self.depth}{activation}"


class TextTransformerSection(TextSection):
    """A transformer encoder to compare the text Mixer with."""

    timm_architecture: ClassVar[str] = "text_transformer"

    network = "TextTransformer"
    kind: Literal["text_transformer"] = key(..., "text_transformer: token embedding and torch.nn's encoder")
    heads: Positive = key(4, "attention heads; must divide d")

    @model_validator(mode="after")
    def heads_divide(self) -> Self:
        """Heads divide the width."""
        if self.channels is not None and self.channels % self.heads:
            raise ValueError(f"heads {self.heads} does not divide channels {self.channels}")
        return self

    @property
    @override
    def width_multiple(self) -> int:
        return self.heads

    @override
    def weights(self, width: int) -> int:
        attention = 4 * width * (width + 1)
        return self.depth * (attention + _mlp_weights(width, hidden_width(self.expansion, width)) + 4 * width)

    @override
    def layer_costs(self, image_size: int, num_classes: int) -> NetworkCost:
        """Every layer, embedding to head, with PyTorch's flash attention.

        The backward pass of that takes two and a half times the products of the forward pass.
        """
        tokens, width, depth = self.tokens, self.width, self.depth
        block = [LayerCost(tokens, width, 3 * width), LayerCost(tokens, width, width)]
        block += mlp_layers(tokens, width, hidden_width(self.expansion, width), width)
        of_attention = 3 * tokens * width + 2 * self.heads * tokens  # queries, keys, values, log-sums, the mask
        return NetworkCost(
            [*block * depth, LayerCost(1, width, num_classes, mixes=False)],
            [NormCost(tokens, width)] * (2 * depth + 1),
            width=tokens * width,
            extra_parameters=(self.vocabulary + tokens) * width,
            extra_saved=3 * tokens + depth * of_attention,
            extra_forward=4 * depth * tokens**2 * width,
            extra_backward=10 * depth * tokens**2 * width,
            tokens=tokens,
            channels=width,
        )

    @override
    def summary(self, image_size: int) -> str:
        return f"transformer, T {self.tokens}, d {self.width}, L {self.depth}"


def _mlp_weights(width: int, hidden: int) -> int:
    return 2 * width * hidden + hidden + width


SECTIONS = (TextMixerSection, TextTransformerSection)
