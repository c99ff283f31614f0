"""Every key of every family's section changes its network, or what it computes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from widemix.models.families import KINDS
from widemix.models.registry import build_model
from widemix.models.section import ModelSection

MIXER = {"patch_size": 2, "channels": 6, "depth": 2, "expansion": 2.0}
SW_MLP = {"patch_size": 2, "channels": 4, "width": 64, "depth": 2, "density": 0.5, "expansion": 2.0}
PATCHED = {"patch_size": 2, "channels": 8, "depth": 2}
TEXT = {"vocabulary": 20, "tokens": 8, "channels": 8, "depth": 2}
BASES: dict[str, dict[str, Any]] = {
    "mixer": MIXER,
    "sw_mlp": SW_MLP,
    "shallow": {"width": 36, "matrices": "dense"},
    "bottleneck_mlp": {"width": 8, "depth": 2},
    "s_local": {"base_channels": 2},
    **dict.fromkeys(("ff_only", "permutator", "resmlp", "gmlp"), PATCHED),
    "repmlp": PATCHED | {"share_sets": 2},
    "text_mixer": TEXT,
    "text_transformer": TEXT,
}
# Other than those of the bases, and the defaults.
VALUES: dict[str, Any] = yaml.safe_load("""
{patch_size: 4, channels: 12, depth: 3, expansion: 2.5, width: 35, token_hidden: 8, channel_hidden: 8,
project_tokens: 12, permutation: random, permutation_seed: 1, permuted_blocks: [1], permuted_mixings: token,
permuted_layers: each, permuted_skips: true, token_groups: 2, token_weights: kronecker, channel_weights: kronecker,
rank: 3, blocks: 4, activation: gelu_tanh, norm: none, norm_eps: 0.5, drop_path: 0.5, drop_path_rises: true,
density: 0.25, outer_activation: false, project_features: true, pool: true, mask_seed: 1, matrices: monarch,
grayscale: true, base_channels: 3, layer_scale: 0.5, share_sets: 4, kernels: [1], vocabulary: 21, tokens: 9, heads: 2,
budget: 6000}
""")
# By key, or by family and key: what else it needs.
NEEDS: dict[str, dict[str, Any]] = yaml.safe_load("""
token_hidden: &hidden {expansion: null, token_hidden: 9, channel_hidden: 9}
channel_hidden: *hidden
permutation_seed: &random {permutation: random}
permuted_blocks: *random
permuted_mixings: *random
permuted_layers: *random
permuted_skips: *random
rank: {token_weights: low_rank, rank: 2}
blocks: {token_weights: block_diagonal, blocks: 2}
drop_path_rises: {drop_path: 0.5}
budget: {channels: null, budget: 2000}
mixer.patch_size: {project_tokens: 16}
sw_mlp.patch_size: &projects {project_features: true}
sw_mlp.channels: *projects
sw_mlp.width: *projects
""")


def keys_of(section: type[ModelSection]) -> Iterator[tuple[str, str]]:
    [kind] = set(section.kinds()) & set(BASES)
    return ((kind, name) for name in section.model_fields if name != "kind")


# But timm's, whose keys are its own: tests/models/test_timm.py; and those of tests.
OURS = {each for each in KINDS.values() if each.__module__.startswith("widemix.") and "timm" not in each.kinds()}
CASES = sorted(case for section in OURS for case in keys_of(section))


def result(kind: str, keys: dict[str, Any]) -> list[torch.Tensor]:
    """A network's parameters, large enough for all of it to matter, and its logits in training."""
    torch.manual_seed(0)
    network = build_model(KINDS[kind](kind=kind, **keys), 8, 3).train()
    for name, parameter in network.named_parameters():
        if not name.endswith((".ls1", ".ls2")):  # which `layer_scale` sets
            nn.init.normal_(parameter, std=0.5)
    torch.manual_seed(1)
    inputs = torch.randint(2, 20, (6, 8)) if kind.startswith("text") else torch.randn(6, 3, 8, 8)
    torch.manual_seed(2)
    return [*network.parameters(), network(inputs)]


@pytest.mark.parametrize(("kind", "key"), CASES, ids=map("-".join, CASES))
def test_another_value_gives_another_network(kind, key):
    base, change = BASES[kind] | NEEDS.get(f"{kind}.{key}", NEEDS.get(key, {})), {key: VALUES[key]}
    first = result(kind, base)
    assert all(map(torch.equal, first, result(kind, base)))
    second = result(kind, base | change)
    assert [t.shape for t in first] != [t.shape for t in second] or not torch.allclose(first[-1], second[-1])
