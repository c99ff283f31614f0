"""Blocks of Mixers with random parameters, and their steps: in fp64, as they are written, they are the reference."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from widemix.models.mixer.blocks import MixerBlock
from widemix.models.mixer.network import Mixer
from widemix.models.mixer.section import MixerSection

SINGLE: dict[str, Any] = {"kind": "s_mixer"}
PROJECTED = {"project_tokens": 10}
MLP, RANDOM = {"kind": "mixer", "token_hidden": 9, "channel_hidden": 6}, {"permutation": "random"}
SHAPES: dict[str, dict[str, Any]] = {
    "s_mixer": SINGLE,
    "rp s_mixer": SINGLE | RANDOM,
    "skips": SINGLE | RANDOM | {"permuted_skips": True},
    "projection": SINGLE | PROJECTED,
    "rp projection": SINGLE | RANDOM | PROJECTED | {"norm": "none", "activation": "square"},
    "mixer": MLP,
    "each layer and skip": MLP | RANDOM | {"permuted_layers": "each", "permuted_skips": True},
    "mixer projection": MLP | PROJECTED,
    "no norm": MLP | RANDOM | {"norm": "none", "activation": "square"},
    "tanh": MLP | RANDOM | {"activation": "gelu_tanh", "drop_path": 0.4},
    "wide": {"kind": "mixer", "token_hidden": 70, "channel_hidden": 140},
}
# Of 6 channels, whose widths divide.
NETWORKS = SHAPES | {
    "one block": MLP | RANDOM | {"permuted_mixings": "token", "permuted_blocks": [1]},
    "low rank": MLP | {"token_weights": "low_rank", "rank": 2, "channel_weights": "block_diagonal", "blocks": 3},
    "kronecker": SINGLE | RANDOM | PROJECTED | {"token_weights": "kronecker"},
    "btt": SINGLE | PROJECTED | {"token_weights": "monarch", "channel_weights": "btt", "rank": 2},
}


def make_block(tokens_in: int, channels: int, shape: str, **keys: Any) -> MixerBlock:
    """A block in training that computes with the batch last, with parameters of the size that they begin with."""
    torch.manual_seed(0)
    sizes = {"patch_size": 1, "channels": channels, "depth": 1}
    block = MixerBlock(MixerSection(**sizes | SHAPES[shape] | keys), 0, tokens_in)
    for name, parameter in block.named_parameters():
        is_gain = name.endswith("weight") and parameter.ndim == 1
        nn.init.normal_(parameter, float(is_gain), 0.3 if parameter.ndim == 1 else parameter.shape[1] ** -0.5)
    block.batch_last = True
    return block.train()


def make_mixer(side: int = 8, classes: int = 3, **keys: Any) -> Mixer:
    """A network of images in patches of 2 x 2."""
    section = MixerSection(**{"patch_size": 2, "channels": 6, "depth": 2, **keys})
    return Mixer(section, img_size=side, num_classes=classes)


def make_networks(shape: str, dtype: torch.dtype = torch.float64, **keys: Any) -> tuple[Mixer, Mixer]:
    """A network of images of 8 x 8 with random weights everywhere, and its copy that computes with the batch last."""
    torch.manual_seed(0)
    plain = make_mixer(**NETWORKS[shape] | keys).to(dtype).train()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    other = copy.deepcopy(plain)
    for block in other.blocks:
        assert block.fits_batch_last()
        block.batch_last = True
    return plain, other


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all gradients, by the same drop path."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(1)
    y = module(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def exact_step(block: MixerBlock, x: Tensor) -> list[Tensor]:
    plain = copy.deepcopy(block).double()
    plain.batch_last = False
    return step(plain, x.double())


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    """Relative to the largest number of each tensor; some gradients are zero but for rounding."""
    largest = max(float(tensor.abs().max()) for tensor in expected if tensor.numel())
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        if one.numel():
            error, size = (one.double() - other).abs().max(), other.abs().max()
            assert error <= tolerance * max(float(size), 0.05 * largest), (*other.shape, float(error), float(size))


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The root of all squares by which they differ."""
    return sum(float((a - b).norm() ** 2) for a, b in zip(found, expected, strict=True)) ** 0.5
