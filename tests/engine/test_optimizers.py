"""Muon and schedule-free AdamW on every engine that can, against the libraries' own use of them in the plain loop."""

import pytest
import torch

from tests.engine.ranks import MUON, OPTIMIZERS, SCHEDULE_FREE, SHARING, Setting, optimizers
from widemix.optim.build import inner_matrices

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]
TOLERANCE = {"muon": 1e-5, "schedule_free": 1e-6}  # Muon's iteration is in bf16


@pytest.fixture(scope="module")
def one_rank(alone, digits):
    return optimizers(digits)


@pytest.fixture(scope="module")
def expected(alone, digits):
    found = {}
    for name, overrides in OPTIMIZERS.items():
        if name == "muon" and not hasattr(torch.optim, "Muon"):
            continue
        losses, model, _ = Setting("mixer", digits, *overrides).plain()
        found[name] = losses, model.state_dict()
    return found


@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world, cases in SHARING.items() for case in cases], ids=str
)
def test_losses_are_the_plain_loops_and_resume_exactly(one_rank, expected, request, case, world):
    found = one_rank[case] if world == 1 else request.getfixturevalue("ranks")(2, "optimizers")[case]
    if case[0] not in expected:
        pytest.skip("torch.optim has no Muon before 2.9")
    losses, weights = expected[case[0]]
    assert found["losses"] == pytest.approx(losses, rel=TOLERANCE[case[0]])
    assert found["resumed"] == found["losses"]
    if case[0] == "schedule_free":  # the saved weights are those to evaluate with
        for name, value in weights.items():
            if not name.endswith("mlp_tokens.fc2.bias"):  # no gradient but rounding
                torch.testing.assert_close(found["model"][name], value, rtol=1e-4, atol=2e-5, msg=name)


def test_muon_gathers_each_matrix_once(ranks, digits):
    setting = Setting("mixer", digits, *MUON)
    matrices = inner_matrices(setting.model())
    assert ranks(2, "optimizers")["muon", "fsdp"]["collectives"] == len(matrices) > 0


def test_schedule_free_is_evaluated_with_its_average(digits):
    setting = Setting("mixer", digits, *SCHEDULE_FREE)
    engine = setting.engine()
    setting.run(engine, range(4))
    inputs = setting.steps[5][0].inputs
    trained = engine.module(inputs).detach()
    network = setting.model()
    network.load_state_dict(engine.state().model)
    with engine.weights()[""]:
        assert torch.equal(engine.module(inputs), network(inputs))
    assert torch.equal(engine.module(inputs), trained)
    assert not torch.allclose(network(inputs), trained, rtol=1e-3)
