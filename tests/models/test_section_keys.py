"""Keys of networks that neither the formulas of test_networks.py nor the counts of test_cost.py hold."""

from typing import Any

import pytest
import torch
from torch import nn

from widemix.models.families import KINDS
from widemix.models.registry import build_model

PATCHED = {"patch_size": 2, "channels": 8, "depth": 2}
REPMLP = PATCHED | {"share_sets": 2}
SCALED = PATCHED | {"layer_scale": 0.5}
TEXT = {"vocabulary": 20, "tokens": 8, "channels": 8, "depth": 2, "permutation": "random"}
DROPS, RISES = {"drop_path": 0.5}, {"drop_path_rises": True}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # a family, a network's keys, and what another one has
    *(
        (kind, base, change)
        for kind, base in (("resmlp", SCALED), ("gmlp", PATCHED))
        for change in ({"patch_size": 4}, {"channels": 12}, {"depth": 3}, {"expansion": 2.0}, DROPS)
    ),
    ("resmlp", PATCHED, {"layer_scale": 0.5}),
    *((kind, PATCHED | DROPS, RISES) for kind in ("ff_only", "permutator", "resmlp", "gmlp")),
    ("repmlp", REPMLP | DROPS, RISES),
    ("text_mixer", TEXT, {"permutation_seed": 1}),
]


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


@pytest.mark.parametrize(("kind", "base", "change"), CASES, ids=str)
def test_another_value_gives_another_network(kind, base, change):
    first = result(kind, base)
    assert all(map(torch.equal, first, result(kind, base)))
    second = result(kind, base | change)
    assert [t.shape for t in first] != [t.shape for t in second] or not torch.allclose(first[-1], second[-1])
