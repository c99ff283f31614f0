"""Every key of every family's section changes its network, or what it computes."""

from typing import Any

import pytest
import torch
from torch import nn

from widemix.models.families import KINDS
from widemix.models.registry import build_model

MIXER = {"patch_size": 2, "channels": 6, "depth": 2, "expansion": 2.0}
HIDDEN = MIXER | {"expansion": None, "token_hidden": 9, "channel_hidden": 9}
RANDOM = MIXER | {"permutation": "random"}
SW_MLP = {"patch_size": 2, "channels": 4, "width": 64, "depth": 2, "density": 0.5, "expansion": 2.0}
PATCHED = {"patch_size": 2, "channels": 8, "depth": 2}
BOTTLENECK = {"width": 8, "depth": 2}
TEXT = {"vocabulary": 20, "tokens": 8, "channels": 8, "depth": 2}
DROPS = {"drop_path": 0.5}
# By family and key: the keys of a network, and those of another one.
CHANGES: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "mixer": {
        "patch_size": (MIXER | {"project_tokens": 16}, {"patch_size": 4}),
        "channels": (MIXER, {"channels": 7}),
        "depth": (MIXER, {"depth": 3}),
        "expansion": (MIXER, {"expansion": 3.0}),
        "token_hidden": (HIDDEN, {"token_hidden": 8}),
        "channel_hidden": (HIDDEN, {"channel_hidden": 8}),
        "project_tokens": (MIXER, {"project_tokens": 12}),
        "permutation": (MIXER, {"permutation": "random"}),
        "permutation_seed": (RANDOM, {"permutation_seed": 1}),
        "permuted_blocks": (RANDOM, {"permuted_blocks": [1]}),
        "permuted_mixings": (RANDOM, {"permuted_mixings": "token"}),
        "permuted_layers": (RANDOM, {"permuted_layers": "each"}),
        "permuted_skips": (RANDOM, {"permuted_skips": True}),
        "token_groups": (MIXER, {"token_groups": 2}),
        "token_weights": (MIXER, {"token_weights": "low_rank", "rank": 2}),
        "channel_weights": (MIXER, {"channel_weights": "low_rank", "rank": 2}),
        "rank": (MIXER | {"token_weights": "low_rank", "rank": 2}, {"rank": 3}),
        "blocks": (MIXER | {"token_weights": "block_diagonal", "blocks": 2}, {"blocks": 4}),
        "activation": (MIXER, {"activation": "gelu_tanh"}),
        "norm": (MIXER, {"norm": "none"}),
        "norm_eps": (MIXER, {"norm_eps": 0.5}),
        "drop_path": (MIXER, DROPS),
        "drop_path_rises": (MIXER | DROPS, {"drop_path_rises": True}),
    },
    "sw_mlp": {
        "patch_size": (SW_MLP | {"project_features": True}, {"patch_size": 4}),
        "channels": (SW_MLP | {"project_features": True}, {"channels": 5}),
        "width": (SW_MLP | {"project_features": True}, {"width": 60}),
        "depth": (SW_MLP, {"depth": 3}),
        "density": (SW_MLP, {"density": 0.25}),
        "expansion": (SW_MLP, {"expansion": 3.0}),
        "outer_activation": (SW_MLP, {"outer_activation": False}),
        "project_features": (SW_MLP, {"project_features": True}),
        "pool": (SW_MLP, {"pool": True}),
        "norm_eps": (SW_MLP, {"norm_eps": 0.5}),
        "mask_seed": (SW_MLP, {"mask_seed": 1}),
    },
    "shallow": {
        "width": ({"width": 36, "matrices": "dense"}, {"width": 35}),
        "matrices": ({"width": 36, "matrices": "monarch"}, {"matrices": "kronecker"}),
        "grayscale": ({"width": 36, "matrices": "dense"}, {"grayscale": True}),
    },
    "bottleneck_mlp": {
        "width": (BOTTLENECK, {"width": 9}),
        "depth": (BOTTLENECK, {"depth": 3}),
        "expansion": (BOTTLENECK, {"expansion": 2.0}),
        "norm_eps": (BOTTLENECK, {"norm_eps": 0.5}),
    },
    "s_local": {"base_channels": ({"base_channels": 2}, {"base_channels": 3})},
    **{
        kind: {
            "patch_size": (base, {"patch_size": 4}),
            "channels": (base, {"channels": 12}),
            "depth": (base, {"depth": 3}),
            "expansion": (base, {"expansion": 2.0}),
            "drop_path": (base, DROPS),
            "drop_path_rises": (base | DROPS, {"drop_path_rises": True}),
            **own,
        }
        for kind, base, own in (
            ("ff_only", PATCHED, {}),
            ("permutator", PATCHED, {}),
            ("resmlp", PATCHED | {"layer_scale": 0.5}, {"layer_scale": (PATCHED, {"layer_scale": 0.5})}),
            ("gmlp", PATCHED, {}),
            (
                "repmlp",
                PATCHED | {"share_sets": 2},
                {
                    "share_sets": (PATCHED | {"share_sets": 2}, {"share_sets": 4}),
                    "kernels": (PATCHED | {"share_sets": 2}, {"kernels": (1,)}),
                },
            ),
        )
    },
    "text_mixer": {
        "vocabulary": (TEXT, {"vocabulary": 21}),
        "tokens": (TEXT, {"tokens": 9}),
        "channels": (TEXT, {"channels": 12}),
        "budget": (TEXT | {"channels": None, "budget": 2000}, {"budget": 6000}),
        "depth": (TEXT, {"depth": 3}),
        "expansion": (TEXT, {"expansion": 2.0}),
        "permutation": (TEXT, {"permutation": "random"}),
        "permutation_seed": (TEXT | {"permutation": "random"}, {"permutation_seed": 1}),
        "activation": (TEXT, {"activation": "gelu_tanh"}),
        "norm": (TEXT, {"norm": "none"}),
        "drop_path": (TEXT, DROPS),
        "drop_path_rises": (TEXT | DROPS, {"drop_path_rises": True}),
    },
    "text_transformer": {
        "vocabulary": (TEXT, {"vocabulary": 21}),
        "tokens": (TEXT, {"tokens": 9}),
        "channels": (TEXT, {"channels": 12}),
        "budget": (TEXT | {"channels": None, "budget": 1000}, {"budget": 3000}),
        "depth": (TEXT, {"depth": 3}),
        "expansion": (TEXT, {"expansion": 2.0}),
        "heads": (TEXT, {"heads": 2}),
    },
}
CASES = [(kind, key) for kind, keys in CHANGES.items() for key in keys]


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
    base, change = CHANGES[kind][key]
    first = result(kind, base)
    assert all(map(torch.equal, first, result(kind, base)))
    second = result(kind, base | change)
    assert [t.shape for t in first] != [t.shape for t in second] or not torch.allclose(first[-1], second[-1])


def test_the_table_has_every_key_of_every_family():
    known = {"timm"}  # whose keys are timm's own: tests/models/test_timm.py
    for section in {*KINDS.values()}:
        kinds = set(section.kinds())
        if not kinds & known and section.__module__.startswith("widemix."):
            [kind] = kinds & set(CHANGES)
            assert set(section.model_fields) - {"kind"} == set(CHANGES[kind]), kind
