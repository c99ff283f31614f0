"""The benchmark of a step compares like with like."""

import torch

from pipeline.bench import step
from pipeline.distributed.topology import Topology, process_group


def test_all_contestants_train_the_same_weights_as_often(tmp_path, monkeypatch):
    networks, build = [], step.build_model

    def kept(*arguments):
        networks.append(build(*arguments))
        return networks[-1]

    monkeypatch.setattr(step, "build_model", kept)
    topology = Topology(0, 1, 0, 1, torch.device("cpu"))
    with process_group(topology, 60):
        recipe = step.make_recipe(step.SMALL, 8, batch=4, precision="fp32", every=6)
        first = build(recipe.model, 8, 1000).state_dict()
        times = step.time_contestants(recipe, topology, tmp_path, steps=3, turns=4)
    assert {name: len(seconds) for name, seconds in times.items()} == {step.PLAIN: 4, step.ENGINE: 4, step.LOOP: 4}
    plain, *ours = (network.state_dict() for network in networks)
    assert len(ours) == 2
    for weights in ours:
        for name, value in plain.items():
            if not name.endswith("mlp_tokens.fc2.bias"):  # no gradient but rounding
                torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert (plain["head.weight"] - first["head.weight"]).abs().max() > 1e-3
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2  # of 15 steps
