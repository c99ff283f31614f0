"""Small networks of every family by name, which tests of what they compute and what they cost share."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.dense import Times
from widemix.models.families import KINDS
from widemix.models.registry import build_model
from widemix.models.section import ModelSection

SIDE, CLASSES = 4, 5  # pixels
SHAPE: dict[str, Any] = {"patch_size": 2, "channels": 6, "depth": 3}
MLP, SINGLE = {"kind": "mixer", "expansion": 1.5}, {"kind": "s_mixer"}
RP = {"permutation": "random", "permutation_seed": 5}
PATCHED = {"patch_size": 1, "channels": 8, "depth": 2}
SW_MLP = {"kind": "sw_mlp", "patch_size": 2, "width": 32, "channels": 8, "depth": 2, "density": 0.2, "mask_seed": 4}
TEXT = {"vocabulary": 11, "tokens": 9, "channels": 8, "depth": 2, "expansion": 1.5}

STRUCTURED: dict[str, dict[str, Any]] = {
    "low rank": {**MLP, "token_weights": "low_rank", "channel_weights": "low_rank", "rank": 2},
    "kronecker": {**SINGLE, "token_weights": "kronecker", "channel_weights": "kronecker"},
    "rp kronecker channels": {**MLP, **RP, "channel_weights": "kronecker"},
    "monarch": {**MLP, "token_weights": "monarch", "channel_weights": "monarch"},
    "btt": {**MLP, **RP, "token_weights": "btt", "channel_weights": "btt", "rank": 3, "permuted_layers": "each"},
    "btt at a dense matrix's cost": {**MLP, "channel_weights": "btt", "rank": "as_dense"},
    "block diagonal, projected": {
        **SINGLE,
        "token_weights": "block_diagonal",
        "channel_weights": "block_diagonal",
        "blocks": 2,
        "project_tokens": 6,
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "mixer": MLP,
    "s_mixer": SINGLE,
    "unequal hidden widths": {"kind": "mixer", "token_hidden": 3, "channel_hidden": 11, "activation": "gelu_tanh"},
    "rp_mixer": {**MLP, **RP},
    "rp_s_mixer": {**SINGLE, **RP},
    "rp around each layer": {**MLP, **RP, "permuted_layers": "each"},
    "rp tokens only": {**MLP, **RP, "permuted_mixings": "token"},
    "rp channels of one block": {**SINGLE, **RP, "permuted_mixings": "channel", "permuted_blocks": [1]},
    "skips permuted too": {**SINGLE, **RP, "activation": "square", "norm": "none", "permuted_skips": True},
    "token groups": {**MLP, "token_groups": 3},
    "token mixing untied, projected": {**SINGLE, "token_groups": 6, "project_tokens": 3},
    "rp token groups": {**MLP, **RP, "token_groups": 2, "permuted_skips": True},
    "square activation without norms": {**MLP, "activation": "square", "norm": "none"},
    "projected": {**MLP, "project_tokens": 7, "norm_eps": 0.125},
    "projected to as many": {**SINGLE, "project_tokens": 4, "activation": "gelu_tanh", "norm_eps": 0.25},
    "projected rp": {**MLP, **RP, "project_tokens": 3, "permuted_layers": "each"},
    "projected without norms": {**SINGLE, "project_tokens": 4, "norm": "none"},
    "projected rp without norms": {**MLP, **RP, "project_tokens": 4, "norm": "none"},
}
# One layer a block (equation S.16), two (S.17), and two as a Mixer has them (C.1).
FORMS = {
    "S.16": {},
    "S.17": {"expansion": 1.5, "norm_eps": 0.125},
    "C.1": {"expansion": 1.5, "outer_activation": False},
}
MASKED = {
    f"sw_mlp {form}, p {density}{', pooled' if pool else ''}{', projected' if width == 24 else ''}": {
        **SW_MLP,
        **keys,
        "density": density,
        "pool": pool,
        "width": width,
        "project_features": width == 24,
    }
    for form, keys in FORMS.items()
    for density in (0.2, 1.0)
    for pool in (False, True)
    for width in (24, 32)
}
OTHERS: dict[str, dict[str, Any]] = {
    **{
        f"shallow {matrices} {width}": {"kind": "shallow", "width": width, "matrices": matrices}
        for matrices in ("dense", "monarch", "kronecker")
        for width in (30, 35, 36)
    },
    "shallow grayscale": {"kind": "shallow", "width": 30, "matrices": "monarch", "grayscale": True},
    "s_fc": {"kind": "s_fc", "base_channels": 3},
    "s_local": {"kind": "s_local", "base_channels": 3},
    "bottleneck_mlp": {"kind": "bottleneck_mlp", "width": 6, "depth": 2, "expansion": 1.5, "norm_eps": 0.125},
    "ff_only": {"kind": "ff_only", **PATCHED},
    "ff_only of one hidden feature": {"kind": "ff_only", **PATCHED, "expansion": 0.01},
    "permutator": {"kind": "permutator", **PATCHED},
    "permutator of one hidden feature": {"kind": "permutator", **PATCHED, "expansion": 0.01},
    "repmlp": {"kind": "repmlp", **PATCHED, "share_sets": 2, "kernels": [1, 3]},
    "repmlp of one hidden feature": {"kind": "repmlp", **PATCHED, "share_sets": 4, "expansion": 0.01},
    "text_mixer": {"kind": "text_mixer", **TEXT},
    "text_mixer of random permutations": {"kind": "text_mixer", **TEXT, "permutation": "random"},
    "text_mixer without norms": {"kind": "text_mixer", **TEXT, "norm": "none", "activation": "square"},
    "text_transformer": {"kind": "text_transformer", **TEXT, "heads": 2},
}


def section_of(keys: dict[str, Any]) -> ModelSection:
    return KINDS[keys["kind"]](**keys)


MIXERS = {name: section_of(SHAPE | keys) for name, keys in (VARIANTS | STRUCTURED).items()}
NETWORKS = MIXERS | {name: section_of(keys) for name, keys in (MASKED | OTHERS).items()}


def random_model(section: ModelSection, side: int = SIDE, seed: int = 0) -> Any:
    """In double precision and evaluation, no weight at zero or one, each branch of a block times its own number."""
    torch.manual_seed(seed)
    model = build_model(section, side, CLASSES).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    for number, block in enumerate(getattr(model, "blocks", ())):
        if hasattr(block, "drop_path1"):
            block.drop_path1, block.drop_path2 = Times(0.5 + number), Times(2.0 + number)
    return model


def inputs_of(section: ModelSection, count: int = 3, side: int = SIDE) -> Tensor:
    """Images, or texts of different lengths."""
    generator = torch.Generator().manual_seed(2)
    if section.takes == "images":
        return torch.randn(count, 3, side, side, dtype=torch.float64, generator=generator)
    tokens = section.input_shape(0)[0]
    ids = torch.randint(1, 11, (count, tokens), generator=generator)
    lengths = torch.tensor([tokens, 5, 1, 7])[:count, None]
    return ids.masked_fill(torch.arange(tokens) >= lengths, 0)


def layers(model: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, kind)]
