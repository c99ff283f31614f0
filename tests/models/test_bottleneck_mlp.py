"""The MLP of "Scaling MLPs" against its definition, with weights under the names of its published files."""

import pytest
import timm
import torch
from torch import nn

from widemix.errors import InputError
from widemix.models.bottleneck_mlp.network import BottleneckMlp
from widemix.models.bottleneck_mlp.section import BottleneckMlpSection
from widemix.models.registry import build_model
from widemix.training.finetune import load_init_weights

SIDE, WIDTH, DEPTH, CLASSES = 6, 8, 3, 7


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Published(nn.Module):
    """The modules that the published files' names come from."""

    def __init__(self):
        super().__init__()
        self.linear_in = nn.Linear(3 * SIDE**2, WIDTH)
        self.linear_out = nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Inner() for _ in range(DEPTH))
        self.layernorms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH))

    def forward(self, images):
        features = self.linear_in(images.reshape(len(images), -1))
        for inner, norm in zip(self.blocks, self.layernorms, strict=True):
            features = features + inner.block(norm(features))
        return self.linear_out(features)


@pytest.fixture
def published():
    torch.manual_seed(1)
    network = Published()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network


def ours(classes=CLASSES, depth=DEPTH):
    torch.manual_seed(2)
    return build_model(BottleneckMlpSection(kind="bottleneck_mlp", width=WIDTH, depth=depth), SIDE, classes)


def test_a_published_file_gives_the_published_network(published, tmp_path):
    torch.save(published.state_dict(), tmp_path / "epoch_800")
    network, images = ours(), torch.randn(4, 3, SIDE, SIDE)
    assert load_init_weights(network, str(tmp_path / "epoch_800")) == []
    torch.testing.assert_close(network(images), published(images), rtol=1e-6, atol=1e-6)
    loss, expected = network(images).square().sum(), published(images).square().sum()
    loss.backward()
    expected.backward()
    torch.testing.assert_close(network.stem.weight.grad, published.linear_in.weight.grad)
    torch.testing.assert_close(network.blocks[1].fc2.weight.grad, published.blocks[1].block[2].weight.grad)


def test_for_other_classes_the_head_is_new(published, tmp_path):
    torch.save(published.state_dict(), tmp_path / "epoch_800")
    network = ours(classes=5)
    fresh = network.head.weight.clone()
    assert load_init_weights(network, str(tmp_path / "epoch_800")) == [
        "head.bias newly initialised for 5 classes",
        "head.weight newly initialised for 5 classes",
    ]
    assert torch.equal(network.head.weight, fresh)
    images = torch.randn(4, 3, SIDE, SIDE)
    published.linear_out = nn.Identity()
    torch.testing.assert_close(network.forward_features(images), published(images), rtol=1e-6, atol=1e-6)


def test_a_file_of_another_size_is_refused_by_our_names(published, tmp_path):
    torch.save(published.state_dict(), tmp_path / "epoch_800")
    with pytest.raises(InputError, match=r"has blocks\.2\.fc1\.bias, which the model does not have"):
        load_init_weights(ours(depth=2), str(tmp_path / "epoch_800"))


@pytest.mark.parametrize(
    ("depth", "width", "millions"), [(6, 512, 24), (12, 512, 37), (6, 1024, 74), (12, 1024, 124)]
)
def test_sizes_are_the_published_ones(depth, width, millions):
    """Which count the head of ImageNet-21k's 11,230 classes."""
    with torch.device("meta"):
        network = timm.create_model(f"mlp_b{depth}_wi{width}_64", num_classes=11_230)
    assert sum(parameter.numel() for parameter in network.parameters()) // 10**6 == millions


def test_names_of_two_digits_are_read_and_ours_are_left_alone():
    """The published networks have 12 blocks."""
    inner = ["block.0.weight", "block.2.bias"]
    theirs = {"linear_in.weight": 0, **{f"blocks.11.{name}": name for name in inner}, "layernorms.11.weight": 3}
    assert BottleneckMlp.from_published(theirs) == {
        "stem.weight": 0,
        "blocks.11.fc1.weight": "block.0.weight",
        "blocks.11.fc2.bias": "block.2.bias",
        "blocks.11.norm.weight": 3,
    }
    ours = {"stem.weight": 0, "layernorms.0.weight": 1}
    assert BottleneckMlp.from_published(ours) == ours


def test_hidden_features_and_epsilon_are_those_of_the_section():
    section = BottleneckMlpSection(kind="bottleneck_mlp", width=6, depth=2, expansion=1.25, norm_eps=0.125)
    network = build_model(section, SIDE, CLASSES)
    for block in network.blocks:
        assert (block.fc1.out_features, block.fc2.in_features, block.norm.eps) == (8, 8, 0.125)
