"""MLP-Mixer and S-Mixer (Tolstikhin et al. 2021; Hayase & Karakida 2024), with any permutations.

Shapes: B batch, S tokens, C channels.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from timm.layers import Mlp
from timm.models import mlp_mixer
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from widemix.errors import InputError
from widemix.models.layers import init_weights
from widemix.models.mixer.blocks import MixerBlock, MixerShape, mixer_blocks
from widemix.models.mixer.grow import Method, grow_blocks


class Mixer(MlpMixer):
    """Patch layer, L mixing blocks, LN, global average, linear head: images [B, 3, H, W] -> logits [B, classes].

    Interface (features, head, classifier, checkpointing) and weight names are those of timm's MlpMixer. `shape` are
    the fields of `MixerShape`, from which the blocks are built.
    """

    def __init__(
        self,
        *,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        drop_rate: float = 0.0,
        global_pool: str = "avg",
        **shape,
    ):
        blocks = MixerShape(**shape)
        super().__init__(
            num_classes=num_classes,
            img_size=img_size,
            in_chans=in_chans,
            patch_size=patch_size,
            num_blocks=0,
            embed_dim=blocks.channels,
            norm_layer=cast(type[nn.Module], blocks.norm_layer),
            drop_rate=drop_rate,
            global_pool=global_pool,
        )
        self.shape = blocks
        self.blocks = mixer_blocks(blocks, self.stem.num_patches)
        step = {"num_chs": blocks.channels, "reduction": self.stem.feat_ratio()}
        self.feature_info = [{"module": f"blocks.{i}", **step} for i in range(blocks.depth)]
        self.init_weights()

    @torch.jit.ignore
    def init_weights(self, nlhb: bool = False) -> None:
        """Weights N(0, 1 / inputs), biases and head zero, norms one and zero: a function of torch's seed.

        `nlhb` is timm's: a head bias of -log(classes).
        """
        init_weights(self, self.head, -math.log(self.num_classes) if nlhb else 0.0)

    def layout_blocks(self) -> list[MixerBlock]:
        """The blocks whose memory layout in training can be chosen: those that also compute with the batch last."""
        return cast(list[MixerBlock], list(self.blocks))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """timm's, for `features_only` and probes; `InputError` for projected tokens as NCHW, which have no grid."""
        if self.shape.tokens is not None and output_fmt == "NCHW":
            raise InputError(
                "features of a Mixer with projected tokens: its tokens are mixtures of patches and have no grid; "
                "ask forward_intermediates for output_fmt='NLC'"
            )
        return super().forward_intermediates(x, indices, norm, stop_early, output_fmt, intermediates_only)

    @torch.no_grad()
    def grown(self, factor: int, method: Method = "copies") -> "Mixer":
        """Return the network for images `factor` times as high and wide, with this one's weights.

        `InputError` for bilinear growing of random permutations or projected tokens, which have no grid, and of
        groups of channels; and for structured token mixings, since block-diagonal copies of a structured matrix have
        no structure of these. Structured channel mixings stay as they are.
        """
        shape, parts = self.shape, factor**2
        if shape.token_weights != "dense":
            raise InputError(
                f"growing: copies of {shape.token_weights} token_weights are no such matrix; take a network with "
                "dense ones (channel_weights may be structured)"
            )
        weight = next(self.parameters())
        small = copy.deepcopy(self).cpu()
        if method == "copies":
            hidden = None if shape.token_hidden is None else shape.token_hidden * parts
            tokens = None if shape.tokens is None else shape.tokens * parts
            shape = replace(shape, token_hidden=hidden, tokens=tokens)
        elif shape.permutation == "random" or shape.tokens is not None:
            raise InputError(
                "growing by bilinear: random permutations and projected tokens have no grid; take copies"
            )
        elif shape.token_groups > 1:
            raise InputError("growing by bilinear: is not offered for token_groups; take copies")
        grown = Mixer(
            img_size=self.stem.img_size[0] * factor,
            patch_size=self.stem.patch_size[0],
            in_chans=self.in_chans,
            num_classes=self.num_classes,
            drop_rate=self.head_drop.p,
            global_pool=self.global_pool,
            **vars(shape),
        )
        grown.to(weight.dtype)
        large = grown.state_dict()
        same = {name: tensor for name, tensor in small.state_dict().items() if tensor.shape == large[name].shape}
        grown.load_state_dict(same, strict=False)
        grid = cast(tuple[int, int], small.stem.grid_size)
        grow_blocks(small.layout_blocks(), grown.layout_blocks(), shape.tokens, grid, factor, method)
        return grown.to(weight.device).train(self.training)

    def smaller_for(self, weights: Mapping[str, Tensor]) -> "tuple[Mixer, int, Method] | None":
        """The Mixer for smaller images that has these weights, and the arguments of `grown` that make it this one.

        None where they are not a Mixer's with these patches, or have as many tokens. ValueError where no growing
        leads here.
        """
        wanted, stem = self.state_dict(), "stem.proj.weight"
        expected, loaded = _tokens_in(wanted), _tokens_in(weights)
        if not loaded or stem not in weights or weights[stem].shape != wanted[stem].shape:
            return None
        factor = math.isqrt(expected // loaded)
        if factor**2 * loaded != expected:
            raise ValueError(
                f"reads images of {loaded} tokens, the recipe's are {expected}; they may be 2, 3, ... times as high "
                f"and wide, with {4 * loaded}, {9 * loaded}, ... tokens"
            )
        if factor == 1:
            return None
        shape, method, parts = self.shape, self._method(weights, factor), factor**2
        if method == "copies":
            hidden = None if shape.token_hidden is None else shape.token_hidden // parts
            tokens = None if shape.tokens is None else shape.tokens // parts
            shape = replace(shape, token_hidden=hidden, tokens=tokens)
        side, patch = cast(tuple[int, int], self.stem.img_size)[0], self.stem.patch_size[0]
        classes = len(weights["head.bias"]) if "head.bias" in weights else self.num_classes
        small = Mixer(img_size=side // factor, patch_size=patch, num_classes=classes, **vars(shape))
        return small, factor, method

    def _method(self, weights: Mapping[str, Tensor], factor: int) -> Method:
        """The method by which this network's hidden width of token mixing, D_S, can be reached."""
        hidden, name = self.shape.token_hidden, "blocks.0.mlp_tokens.fc1.weight"
        if hidden is None or name not in weights:
            return "copies"
        loaded = weights[name].shape[0]
        if hidden not in (loaded, loaded * factor**2):
            raise ValueError(
                f"its D_S is {loaded}, the recipe's {hidden}; model.token_hidden {loaded * factor**2} grows it by "
                f"block-diagonal copies, {loaded} bilinearly"
            )
        return "bilinear" if hidden == loaded else "copies"


def from_timm(network: Any) -> Any:
    """Return timm's own MLP-Mixer as a `Mixer` with its weights, for what knows our blocks; others as they are."""
    if type(network) is not MlpMixer or type(network.stem.norm) is not nn.Identity:
        return network
    if not all(type(block) is mlp_mixer.MixerBlock for block in network.blocks):
        return network
    blocks: Any = network.blocks
    mixings = [mixing for block in blocks for mixing in (block.mlp_tokens, block.mlp_channels)]
    if not all(type(mixing) is Mlp and type(mixing.act) is nn.GELU for mixing in mixings):
        return network
    with torch.device("meta"):
        mixer = Mixer(
            img_size=network.stem.img_size[0],
            patch_size=network.stem.patch_size[0],
            in_chans=network.in_chans,
            num_classes=network.num_classes,
            global_pool=network.global_pool,
            channels=network.embed_dim,
            depth=len(network.blocks),
            token_hidden=mixings[0].fc1.out_features,
            channel_hidden=mixings[1].fc1.out_features,
            norm_eps=cast(nn.LayerNorm, network.norm).eps,
        )
    mixer.load_state_dict(network.state_dict(), assign=True)
    return mixer


def _tokens_in(weights: Mapping[str, Tensor]) -> int:
    """S0, the number of tokens that the first token-mixing layer reads; 0 if there is no such layer."""
    names = ("blocks.0.skip.fc.weight", "blocks.0.mlp_tokens.fc1.weight", "blocks.0.mlp_tokens.fc.weight")
    return next((weights[name].shape[1] for name in names if name in weights), 0)
