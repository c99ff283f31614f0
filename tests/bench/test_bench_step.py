"""The bench of a step compares like with like."""

import torch

from pipeline.bench import step
from pipeline.distributed import topology


def test_all_contestants_train_the_same_weights_as_often(tmp_path, monkeypatch):
    networks, build = [], step.build_model

    def kept(*arguments):
        networks.append(build(*arguments))
        return networks[-1]

    monkeypatch.setattr(step, "build_model", kept)
    here = topology.Topology(0, 1, 0, 1, torch.device("cpu"))
    store = topology.start(here, 60)
    try:
        recipe = step.recipe_of(step.SMALL, 8, batch=4, precision="fp32", every=6)
        first = build(recipe.model, 8, 1000).state_dict()
        times = step.take_turns(recipe, here, store, tmp_path, length=3, turns=4)
    finally:
        topology.stop()
    assert {name: len(found) for name, found in times.items()} == {step.PLAIN: 4, step.ENGINE: 4, step.LOOP: 4}
    plain, *ours = (network.state_dict() for network in networks)
    assert len(ours) == 2
    for weights in ours:
        for name, value in plain.items():
            if not name.endswith("mlp_tokens.fc2.bias"):  # no gradient but rounding
                torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert (plain["head.weight"] - first["head.weight"]).abs().max() > 1e-3
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2  # of 15 steps
