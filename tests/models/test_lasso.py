"""beta-LASSO's networks against convolutions."""

import pytest
import torch

from widemix.models.cost import model_cost
from widemix.models.lasso.network import LocallyConnected
from widemix.models.lasso.section import LassoSection
from widemix.models.registry import build_model


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


def test_first_weights_keep_the_variance_of_the_input():
    """1 / (9 x 9 x channels), as a linear layer's of so many inputs."""
    torch.manual_seed(0)
    layer = LocallyConnected(3, 16, 50)
    assert layer.weight.mean().abs() < 1e-3
    assert layer.weight.var().item() == pytest.approx(1 / (3 * 9 * 9), rel=0.01)
    out = layer(torch.randn(200, 3 * 16 * 16)).view(200, 50, 8, 8)
    assert out[:, :, 3:5, 3:5].var().item() == pytest.approx(1, rel=0.05)  # where no input is padding


@pytest.mark.parametrize("kind", ["s_fc", "s_local"])
def test_networks_are_as_wide_as_s_conv(kind):
    model = build_model(LassoSection(kind=kind, base_channels=4), image_size=32, num_classes=10)
    x = torch.randn(3, 3, 32, 32)
    assert model.stem(x.flatten(1)).shape == (3, 4 * 16 * 16)
    assert model.forward_features(x).shape == (3, 24 * 4)
    assert model(x).shape == (3, 10)


@pytest.mark.parametrize("side", [7, 8, 16])
def test_connections_and_density_are_those_of_the_effective_matrices(side):
    """Windows overlap, and weights of the border around the image connect nothing."""
    section = LassoSection(kind="s_local", base_channels=2)
    model, cost = build_model(section, side, 10), model_cost(section, side, 10)
    first, second = model.stem[0](torch.eye(3 * side**2)), model.blocks[0].weight
    connections = int((first != 0).sum()) + second.numel()
    assert cost.connections == connections
    assert cost.density == connections / (first.numel() + second.numel())


@pytest.mark.parametrize("kind", ["s_fc", "s_local"])
def test_networks_are_two_layers_with_norms_and_relus_and_a_head(kind):
    torch.manual_seed(0)
    model = build_model(LassoSection(kind=kind, base_channels=2), image_size=8, num_classes=5).double().eval()
    torch.nn.init.normal_(model.head.weight)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    (first, norm, _), (second, last_norm, _) = model.stem, model.blocks
    assert isinstance(first, torch.nn.Linear if kind == "s_fc" else LocallyConnected)
    hidden = first(x.flatten(1))
    for after, layer in ((norm, second), (last_norm, model.head)):
        hidden = (hidden - after.running_mean) / (after.running_var + 1e-5).sqrt() * after.weight + after.bias
        hidden = hidden.clamp(min=0) @ layer.weight.T
    assert torch.allclose(model(x), hidden, atol=1e-12)
