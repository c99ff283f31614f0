"""SW-MLP: MLPs with frozen random masks on their weights (Hayase & Karakida 2024, equations S.16 and S.17).

Shapes: B batch, S0 patches, C channels of the patch layer, m features.
"""

from collections.abc import Callable
from functools import partial

from timm.layers import PatchEmbed
from torch import Tensor, nn

from widemix.models.layers import LayerNorm
from widemix.models.mlp_base import MlpClassifier
from widemix.models.sw_mlp.sparse import SparseLinear


class MaskedSkip(nn.Module):
    """LN((M * W) x): the skip of the first block where it maps n to m features, [B, n] -> [B, m].

    The skip LN(W X) of Mixers (equation S.15), with a masked matrix in place of I (x) W. It has no bias, as there.
    """

    def __init__(self, inputs: int, width: int, density: float, key: tuple[int, int], norm: Callable[..., nn.Module]):
        super().__init__()
        self.fc = SparseLinear(inputs, width, density, (*key, 2), bias=False)
        self.norm = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n] -> [B, m]."""
        return self.norm(self.fc(x))


class SwMlpBlock(nn.Module):
    """skip(x) + phi((M * W) LN(x)), [B, n] -> [B, m] (S.16), or with `hidden` features an MLP.

    That is skip(x) + phi((M2 * W2) phi((M1 * W1) LN(x))) (S.17), the outer phi only with `outer_activation`. The skip
    is the identity but for a `MaskedSkip` where the block `projects`.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        hidden: int | None,
        density: float,
        key: tuple[int, int],
        *,
        projects: bool,
        outer_activation: bool,
        norm: Callable[..., nn.Module],
    ):
        super().__init__()
        self.skip = MaskedSkip(inputs, width, density, key, norm) if projects else nn.Identity()
        self.norm = norm(inputs)
        self.fc1 = SparseLinear(inputs, hidden or width, density, (*key, 0))
        self.act = nn.GELU()
        self.fc2 = SparseLinear(hidden, width, density, (*key, 1)) if hidden else nn.Identity()
        self.outer_act = nn.GELU() if hidden and outer_activation else nn.Identity()

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

    The patch layer gives S0 tokens of C channels, [B, S0*C] as a vector. m = S0*C, or with `project_tokens` the first
    block maps S0*C features to m. `hidden` is gamma * m, None for single layers. `pool` averages over tokens before
    the head, as table S.1 has it; otherwise the head reads all m features. density 1 is the dense MLP.
    """

    def __init__(
        self,
        *,
        patch_size: int,
        channels: int,
        width: int,
        depth: int,
        density: float,
        hidden: int | None = None,
        outer_activation: bool = True,
        project_tokens: bool = False,
        pool: bool = False,
        norm_eps: float = 1e-6,
        mask_seed: int = 0,
        img_size: int,
        in_chans: int = 3,
        num_classes: int = 1000,
    ):
        stem = PatchEmbed(img_size, patch_size, in_chans, channels)
        norm = partial(LayerNorm, eps=norm_eps)
        embedded = stem.num_patches * channels
        blocks = nn.Sequential(
            *[
                SwMlpBlock(
                    width if i else embedded,
                    width,
                    hidden,
                    density,
                    (mask_seed, i),
                    projects=project_tokens and i == 0,
                    outer_activation=outer_activation,
                    norm=norm,
                )
                for i in range(depth)
            ]
        )
        last = PooledNorm(channels, norm) if pool else norm(width)
        outer = {"img_size": img_size, "in_chans": in_chans, "num_classes": num_classes}
        super().__init__(stem, blocks, last, width=channels if pool else width, **outer)

    def embed(self, x: Tensor) -> Tensor:
        """[B, in_chans, H, W] -> [B, S0*C]."""
        return self.stem(x).flatten(1)
