"""MLP-Mixer and S-Mixer (Tolstikhin et al. 2021; Hayase & Karakida 2024), with any permutations.

Shapes: B batch, S tokens, C channels.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from timm.layers import Mlp
from timm.models import mlp_mixer
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from widemix.errors import InputError
from widemix.models.layers import init_weights
from widemix.models.mixer.blocks import MixerBlock, mixer_blocks, norm_layer
from widemix.models.mixer.grow import Method, grow_blocks
from widemix.models.mixer.section import MixerSection


class Mixer(MlpMixer):
    """Patch layer, L mixing blocks, LN, global average, linear head: images [B, 3, H, W] -> logits [B, classes].

    Interface (features, head, classifier, checkpointing) and weight names are those of timm's MlpMixer, and so are
    the arguments.
    """

    def __init__(self, section: MixerSection, **timm):
        super().__init__(
            patch_size=section.patch_size,
            num_blocks=0,
            embed_dim=section.channels,
            norm_layer=cast(type[nn.Module], norm_layer(section)),
            **timm,
        )
        self.section = section
        self.tokens = section.tokens_from(self.stem.num_patches)  # S
        self.blocks = mixer_blocks(section, self.stem.num_patches)
        step = {"num_chs": section.channels, "reduction": self.stem.feat_ratio()}
        self.feature_info = [{"module": f"blocks.{i}", **step} for i in range(section.depth)]
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
        if self.section.project_tokens and output_fmt == "NCHW":
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
        section = self.section
        if section.token_weights != "dense":
            raise InputError(
                f"growing: copies of {section.token_weights} token_weights are no such matrix; take a network with "
                "dense ones (channel_weights may be structured)"
            )
        if method == "bilinear" and (section.permutation == "random" or section.project_tokens):
            raise InputError(
                "growing by bilinear: random permutations and projected tokens have no grid; take copies"
            )
        if method == "bilinear" and section.token_groups > 1:
            raise InputError("growing by bilinear: is not offered for token_groups; take copies")
        weight = next(self.parameters())
        small = copy.deepcopy(self).cpu()
        grown = Mixer(
            self._resized(lambda size: size * factor**2, method),
            img_size=self.stem.img_size[0] * factor,
            in_chans=self.in_chans,
            num_classes=self.num_classes,
            drop_rate=self.head_drop.p,
            global_pool=self.global_pool,
        )
        grown.to(weight.dtype)
        large = grown.state_dict()
        same = {name: tensor for name, tensor in small.state_dict().items() if tensor.shape == large[name].shape}
        grown.load_state_dict(same, strict=False)
        grid = cast(tuple[int, int], small.stem.grid_size)
        grow_blocks(small.layout_blocks(), grown.layout_blocks(), grown.section, grid, factor, method)
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
        method = self._method(weights, factor)
        section = self._resized(lambda size: size // factor**2, method)
        side = cast(tuple[int, int], self.stem.img_size)[0] // factor
        classes = len(weights["head.bias"]) if "head.bias" in weights else self.num_classes
        return Mixer(section, img_size=side, num_classes=classes), factor, method

    def _resized(self, resize: Callable[[int], int], method: Method) -> MixerSection:
        """The section of the network for images of another size."""
        token_hidden, channel_hidden = self.section.hidden_widths(self.tokens)
        if token_hidden is not None and method == "copies":
            token_hidden = resize(token_hidden)
        keys = {"expansion": None, "token_hidden": token_hidden, "channel_hidden": channel_hidden}
        if self.section.project_tokens:
            keys["project_tokens"] = resize(self.section.project_tokens)
        return self.section.model_copy(update=keys)

    def _method(self, weights: Mapping[str, Tensor], factor: int) -> Method:
        """The method by which this network's hidden width of token mixing, D_S, can be reached."""
        hidden, name = self.section.hidden_widths(self.tokens)[0], "blocks.0.mlp_tokens.fc1.weight"
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
    section = MixerSection(
        kind="mixer",
        patch_size=network.stem.patch_size[0],
        channels=network.embed_dim,
        depth=len(network.blocks),
        token_hidden=mixings[0].fc1.out_features,
        channel_hidden=mixings[1].fc1.out_features,
        norm_eps=cast(nn.LayerNorm, network.norm).eps,
    )
    with torch.device("meta"):
        mixer = Mixer(
            section,
            img_size=network.stem.img_size[0],
            in_chans=network.in_chans,
            num_classes=network.num_classes,
            global_pool=network.global_pool,
        )
    mixer.load_state_dict(network.state_dict(), assign=True)
    return mixer


def _tokens_in(weights: Mapping[str, Tensor]) -> int:
    """S0, the number of tokens that the first token-mixing layer reads; 0 if there is no such layer."""
    names = ("blocks.0.skip.fc.weight", "blocks.0.mlp_tokens.fc1.weight", "blocks.0.mlp_tokens.fc.weight")
    return next((weights[name].shape[1] for name in names if name in weights), 0)
