"""A Mixer over the tokens of a sentence pair, and a transformer encoder to compare it with.

Both take token ids [B, t], padded with `PAD`, embed them, and classify the mean over the real tokens. Padding never
affects a real token: its features are zeroed before every mixing, or masked in the attention. So t may be less than
the T of the network.

Shapes: B batch, T tokens, t tokens of a batch, C channels (the width d of Navon & Bronstein 2023).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from widemix.models.layers import init_weights
from widemix.models.mixer.blocks import NORMS, MixerBlock, mixer_blocks
from widemix.models.mlp_base import Classifier
from widemix.models.section import hidden_width
from widemix.models.text.section import TextMixerSection, TextSection, TextTransformerSection

PAD = 0


class TextClassifier(Classifier):
    """Embedding, an encoder of [B, T, C], norm, mean over the real tokens, linear head -> logits [B, num_classes]."""

    def __init__(self, section: TextSection, norm: nn.Module, num_classes: int):
        super().__init__()
        channels = section.width
        self.embedding = nn.Embedding(section.vocabulary, channels, padding_idx=PAD)
        self.norm = norm
        self.set_head(channels, num_classes)

    def init_weights(self) -> None:
        """Sample the initial weights."""
        init_weights(self, self.head)
        nn.init.normal_(self.embedding.weight, std=0.02)  # torch's std of 1 is large against what training adds
        with torch.no_grad():
            self.embedding.weight[PAD] = 0

    def encode(self, x: Tensor, real: Tensor) -> Tensor:
        """[B, t, C] and which tokens are real, bool [B, t] -> [B, t, C]."""
        raise NotImplementedError

    def forward_features(self, x: Tensor) -> Tensor:
        """Ids [B, t] -> the mean over the real tokens [B, C]."""
        real = x != PAD
        x = self.norm(self.encode(self.embedding(x), real))
        fraction = real.to(x.dtype) / real.sum(1, keepdim=True).clamp(min=1)
        return (x * fraction[:, :, None]).sum(1)


class TextMixer(TextClassifier):
    """A Mixer of T tokens; token mixing depends on their positions, so that none are embedded."""

    def __init__(self, section: TextMixerSection, *, num_classes: int):
        blocks = section.mixer
        super().__init__(section, NORMS[blocks.norm](blocks.channels), num_classes)
        self.tokens = section.tokens
        self.blocks = mixer_blocks(blocks, section.tokens)
        self.init_weights()

    def encode(self, x: Tensor, real: Tensor) -> Tensor:
        """[B, t, C] and which tokens are real, bool [B, t] -> [B, t, C]."""
        narrow = x.shape[1]
        x = pad(x, (0, 0, 0, self.tokens - narrow))  # [B, T, C]: the mixings are of T tokens
        mask = pad(real, (0, self.tokens - narrow))[:, :, None].to(x.dtype)
        for block in self.blocks:
            assert isinstance(block, MixerBlock)
            x = x + block.drop_path1(block.mlp_tokens(block.norm1(x) * mask))
            mixed = block.mlp_channels(block.norm2(x) * mask)  # random permutations mix tokens here too
            x = x + block.drop_path2(mixed)
        return x[:, :narrow]


class TextTransformer(TextClassifier):
    """A pre-norm transformer encoder of torch.nn with learned positions."""

    def __init__(self, section: TextTransformerSection, *, num_classes: int):
        channels, hidden = section.width, hidden_width(section.expansion, section.width)
        super().__init__(section, NORMS["layer"](channels), num_classes)
        self.positions = nn.Parameter(torch.zeros(1, section.tokens, channels))
        layer = nn.TransformerEncoderLayer(
            channels, section.heads, hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, section.depth, enable_nested_tensor=False)
        self.init_weights()
        nn.init.normal_(self.positions, std=0.02)
        for name, weight in self.encoder.named_parameters():  # torch.nn copies the first layer's weights to all
            if name.endswith("in_proj_weight"):
                nn.init.normal_(weight, std=channels**-0.5)

    def encode(self, x: Tensor, real: Tensor) -> Tensor:
        """[B, t, C] and which tokens are real, bool [B, t] -> [B, t, C]."""
        return self.encoder(x + self.positions[:, : x.shape[1]], src_key_padding_mask=~real)
