"""beta-LASSO's networks and optimiser against convolutions and the written-out step."""

import copy

import pytest
import torch

from pipeline.models import build_model
from pipeline.models.lasso import BetaLasso, LocallyConnected
from pipeline.recipe.model import LassoSection


def test_locally_connected_with_equal_weights_is_the_convolution():
    layer = LocallyConnected(3, 16, 5).double()
    kernel = torch.randn(5, 3, 9, 9, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(kernel.flatten(1).T.expand_as(layer.weight))
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected = torch.nn.functional.conv2d(x, kernel, stride=2, padding=4)
    assert torch.allclose(layer(x.flatten(1)), expected.flatten(1), atol=1e-10)


def test_locally_connected_places_have_their_own_weights():
    layer = LocallyConnected(3, 8, 2).double()
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))[0]
    out = layer(x.flatten(1)).view(2, 4, 4)
    for row in range(4):
        for column in range(4):
            window = padded[:, 2 * row : 2 * row + 9, 2 * column : 2 * column + 9].flatten()
            assert torch.allclose(out[:, row, column], window @ layer.weight[4 * row + column], atol=1e-12)


@pytest.mark.parametrize("kind", ["s_fc", "s_local"])
def test_networks_are_as_wide_as_s_conv(kind):
    model = build_model(LassoSection(kind=kind, base_channels=4), image_size=32, num_classes=10)
    x = torch.randn(3, 3, 32, 32)
    assert model.stem(x.flatten(1)).shape == (3, 4 * 16 * 16)
    assert model.forward_features(x).shape == (3, 24 * 4)
    assert model(x).shape == (3, 10)


def weights():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(7, 5, dtype=torch.float64)) for _ in range(2)]


def test_step_is_the_written_out_one():
    lr, l1, beta = 0.1, 0.01, 20.0
    (ours, _), (reference, _) = weights(), weights()
    optimizer = BetaLasso([ours], lr=lr, l1=l1, beta=beta)
    came_back = False
    for step in range(30):
        gradient = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) * 3
        ours.grad = gradient.clone()
        optimizer.step()
        before = reference.detach().clone()
        with torch.no_grad():
            for place in range(35):
                w = before.view(-1)[place].item()
                sign = (w > 0) - (w < 0)
                w = w - lr * (gradient.view(-1)[place].item() + l1 * sign)
                reference.view(-1)[place] = w if abs(w) >= beta * l1 else 0.0
        came_back |= bool(((before == 0) & (reference != 0)).any())
        assert torch.allclose(ours, reference, rtol=1e-12)
        assert ((ours.abs() >= beta * l1) | (ours == 0)).all()
    assert came_back  # zero is no trap


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_penalty_it_is_sgd(momentum):
    (ours, other), (reference, _) = weights(), weights()
    groups = [{"params": [ours], "l1": 0.0}, {"params": [other], "l1": 1.0}]
    optimizer = BetaLasso(groups, lr=0.1, l1=0.5, beta=50, momentum=momentum)
    sgd = torch.optim.SGD([reference], lr=0.1, momentum=momentum)
    for step in range(5):
        ours.grad = torch.full_like(ours, step - 1.5)
        reference.grad = ours.grad.clone()
        optimizer.step()
        sgd.step()
    assert torch.allclose(ours, reference, rtol=1e-12)


def test_it_resumes_where_it_was():
    (ours, _), (other, _) = weights(), weights()
    one, two = (BetaLasso([w], lr=0.1, l1=0.001, beta=50, momentum=0.9) for w in (ours, other))
    ours.grad = torch.ones_like(ours)
    one.step()
    other.data.copy_(ours)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    other.grad = ours.grad.clone()
    one.step()
    two.step()
    assert torch.equal(ours, other)
