"""SW-MLP: MLPs with frozen random masks on their weights (Hayase & Karakida 2024, equations S.16 and S.17).

Shapes: B batch, S0 patches, C channels of the patch layer, m features.
"""

from collections.abc import Callable
from functools import partial

from timm.layers import PatchEmbed
from torch import Tensor, nn

from widemix.models.layers import LayerNorm
from widemix.models.mlp_base import MlpClassifier
from widemix.models.sw_mlp.section import SwMlpSection
from widemix.models.sw_mlp.sparse import SparseLinear


class MaskedSkip(nn.Module):
    """LN((M * W) x): the skip of the first block where it maps n to m features, [B, n] -> [B, m].

    The skip LN(W X) of Mixers (equation S.15), with a masked matrix in place of I (x) W. It has no bias, as there.
    """

    def __init__(self, section: SwMlpSection, inputs: int, norm: Callable[..., nn.Module]):
        super().__init__()
        self.fc = SparseLinear(inputs, section.width, section.density, (section.mask_seed, 0, 2), bias=False)
        self.norm = norm(section.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n] -> [B, m]."""
        return self.norm(self.fc(x))


class SwMlpBlock(nn.Module):
    """skip(x) + phi((M * W) LN(x)), [B, n] -> [B, m] (S.16), or with `expansion` an MLP.

    That is skip(x) + phi((M2 * W2) phi((M1 * W1) LN(x))) (S.17), the outer phi only with `outer_activation`. The skip
    is the identity but for a `MaskedSkip` of the first block with `project_features`.
    """

    def __init__(self, section: SwMlpSection, number: int, inputs: int, norm: Callable[..., nn.Module]):
        super().__init__()
        width, density, key = section.width, section.density, (section.mask_seed, number)
        hidden = section.hidden_width if section.expansion else None
        projects = section.project_features and number == 0
        self.skip = MaskedSkip(section, inputs, norm) if projects else nn.Identity()
        self.norm = norm(inputs)
        self.fc1 = SparseLinear(inputs, hidden or width, density, (*key, 0))
        self.act = nn.GELU()
        self.fc2 = SparseLinear(hidden, width, density, (*key, 1)) if hidden else nn.Identity()
        self.outer_act = nn.GELU() if hidden and section.outer_activation else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, n] -> [B, m]."""
        return self.skip(x) + self.outer_act(self.fc2(self.act(self.fc1(self.norm(x)))))


class PooledNorm(nn.Module):
    """LN over the C channels of each of m / C tokens, then their average, as in Mixers: [B, m] -> [B, C]."""

    def __init__(self, channels: int, norm: Callable[..., nn.Module]):
        super().__init__()
        self.channels = channels
        self.norm = norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, m] -> [B, C]."""
        return self.norm(x.unflatten(1, (-1, self.channels))).mean(1)


class SwMlp(MlpClassifier):
    """Patch layer, vectorisation, L static-mask blocks, LN, linear head (appendices A.1 and A.2.5).

    The patch layer gives S0 tokens of C channels, [B, S0*C] as a vector. m = S0*C, or with `project_features` the
    first block maps S0*C features to m. `pool` averages over tokens before the head, as table S.1 has it; otherwise
    the head reads all m features. density 1 is the dense MLP.
    """

    def __init__(self, section: SwMlpSection, *, img_size: int, num_classes: int, in_chans: int = 3):
        width, channels = section.width, section.patch_channels(img_size)
        stem = PatchEmbed(img_size, section.patch_size, in_chans, channels)
        norm = partial(LayerNorm, eps=section.norm_eps)
        inputs = [stem.num_patches * channels] + [width] * (section.depth - 1)
        blocks = [SwMlpBlock(section, number, inputs[number], norm) for number in range(section.depth)]
        last = PooledNorm(channels, norm) if section.pool else norm(width)
        outer = {"img_size": img_size, "in_chans": in_chans, "num_classes": num_classes}
        super().__init__(stem, nn.Sequential(*blocks), last, width=channels if section.pool else width, **outer)

    def embed(self, x: Tensor) -> Tensor:
        """[B, in_chans, H, W] -> [B, S0*C]."""
        return self.stem(x).flatten(1)
