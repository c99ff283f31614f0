"""Model sections of the text models."""

from typing import Literal

from pydantic import model_validator

from pipeline.recipe.family import Expansion, Family, Seed, hidden_width
from pipeline.section import Fraction, Positive, key


class TextSection(Family):
    """What text models have in common: tokens in, and a width given outright or by a budget of weights."""

    vocabulary: Positive = key(..., "token ids, counted from 0; 0 is padding")
    tokens: Positive = key(..., "T: tokens of a padded sentence pair")
    depth: Positive = key(..., "L: blocks")
    channels: Positive | None = key(None, "d: width of a token; or null, and budget instead")
    budget: Positive | None = key(
        None, "weights of all blocks at most (embedding and head left out): makes d as large as fits"
    )
    expansion: Expansion = key(4.0, "hidden width over the layer's own")

    @model_validator(mode="after")
    def width_is_given_once(self):
        if (self.channels is None) == (self.budget is None):
            raise ValueError("give either channels or budget")
        if self.budget is not None and self.weights(self.step) > self.budget:
            raise ValueError(
                f"budget {self.budget}: the narrowest of depth {self.depth} has {self.weights(self.step)}"
            )
        return self

    @property
    def step(self) -> int:
        """What the width must be a multiple of."""
        return 1

    @property
    def width(self) -> int:
        """d: as given, or the largest whose blocks keep within the budget."""
        if self.channels is not None:
            return self.channels
        assert self.budget is not None
        low, high = 1, 2  # in steps; weights(low) fits, weights(high) does not
        while self.weights(high * self.step) <= self.budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.weights(middle * self.step) <= self.budget
            low, high = (middle, high) if fits else (low, middle)
        return low * self.step

    def weights(self, width: int) -> int:
        """Weights of all blocks at this width."""
        raise NotImplementedError


class TextMixerSection(TextSection):
    """A Mixer over the tokens of a sentence pair (Navon & Bronstein 2023)."""

    kind: Literal["text_mixer"] = key(..., "text_mixer: token embedding and a Mixer")
    permutation: Literal["commutation", "random"] = key("commutation", "as of a mixer")
    permutation_seed: Seed = key(0, "seed of the random permutations")
    activation: Literal["gelu", "square"] = key("gelu", "phi; square is |x|^2, sigma_2 of Navon & Bronstein 2023")
    norm: Literal["layer", "none"] = key("layer", "as of a mixer")
    drop_path: Fraction = key(0.0, "stochastic depth: probability that a mixing is left out, the same in all blocks")

    def weights(self, width: int) -> int:
        norms = 4 * width if self.norm == "layer" else 0
        token, channel = (_mlp_weights(size, hidden_width(self.expansion, size)) for size in (self.tokens, width))
        return self.depth * (token + channel + norms)


class TextTransformerSection(TextSection):
    """A transformer encoder to hold against the text Mixer."""

    kind: Literal["text_transformer"] = key(..., "text_transformer: token embedding and torch.nn's encoder")
    heads: Positive = key(4, "attention heads; must divide d")

    @model_validator(mode="after")
    def heads_divide(self):
        if self.channels is not None and self.channels % self.heads:
            raise ValueError(f"heads {self.heads} does not divide channels {self.channels}")
        return self

    @property
    def step(self) -> int:
        return self.heads

    def weights(self, width: int) -> int:
        attention = 4 * width * (width + 1)
        return self.depth * (attention + _mlp_weights(width, hidden_width(self.expansion, width)) + 4 * width)


def _mlp_weights(width: int, hidden: int) -> int:
    return 2 * width * hidden + hidden + width
