"""Structured matrices against the explicit ones."""

import pytest
import timm
import torch

import widemix  # noqa: F401  puts our names into timm's registry
from widemix.errors import InputError
from widemix.models.permutation import commutation
from widemix.models.registry import build_model
from widemix.models.shallow.network import Monarch, split
from widemix.models.shallow.section import ShallowSection


@pytest.mark.parametrize(("inputs", "outputs"), [(12, 12), (12, 35), (48, 10)])
def test_monarch_is_permuted_products_of_block_diagonals(inputs, outputs):
    """J_c^T L J_c R (equation 12), each factor written out."""
    layer = Monarch(inputs, outputs, shared=False).double()
    (rows, _), (out_rows, out_columns) = split(inputs), split(outputs)
    left, right = torch.block_diag(*layer.left.weight), torch.block_diag(*layer.right.weight)

    def transposes(height, width):
        return torch.eye(height * width, dtype=torch.float64)[commutation(height, width).long()]

    effective = transposes(out_columns, out_rows) @ left @ transposes(rows, out_columns) @ right
    assert torch.allclose(layer(torch.eye(inputs, dtype=torch.float64)), effective.T, atol=1e-12)


@pytest.mark.parametrize(("inputs", "outputs"), [(12, 12), (12, 35), (48, 10)])
def test_kronecker_is_the_product_of_its_blocks(inputs, outputs):
    layer = Monarch(inputs, outputs, shared=True).double()
    effective = torch.kron(layer.left.weight, layer.right.weight)
    assert torch.allclose(layer(torch.eye(inputs, dtype=torch.float64)), effective.T, atol=1e-12)


def test_monarch_with_equal_blocks_is_kronecker_with_summed_gradients():
    kronecker, monarch = Monarch(12, 20, shared=True).double(), Monarch(12, 20, shared=False).double()
    with torch.no_grad():
        monarch.left.weight.copy_(kronecker.left.weight.expand_as(monarch.left.weight))
        monarch.right.weight.copy_(kronecker.right.weight.expand_as(monarch.right.weight))
    x = torch.randn(5, 12, dtype=torch.float64)
    assert torch.allclose(monarch(x), kronecker(x), atol=1e-12)
    monarch(x).square().sum().backward()
    kronecker(x).square().sum().backward()
    assert torch.allclose(monarch.left.weight.grad.sum(0), kronecker.left.weight.grad, atol=1e-10)
    assert torch.allclose(monarch.right.weight.grad.sum(0), kronecker.right.weight.grad, atol=1e-10)


@pytest.mark.parametrize("matrices", ["dense", "monarch", "kronecker"])
def test_network_is_two_matrices_a_relu_and_a_head(matrices):
    section = ShallowSection(kind="shallow", width=30, matrices=matrices)
    model = build_model(section, image_size=4, num_classes=5).double()
    torch.nn.init.normal_(model.head.weight)
    b1 = model.stem[0](torch.eye(48, dtype=torch.float64)).T
    b2 = model.blocks[0](torch.eye(30, dtype=torch.float64)).T
    x = torch.randn(3, 3, 4, 4, dtype=torch.float64)
    expected = torch.relu(x.flatten(1) @ b1.T) @ b2.T @ model.head.weight.T
    assert torch.allclose(model(x), expected, atol=1e-12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), expected, atol=1e-12)


def test_monarch_matrices_of_mnist_have_28_blocks_of_28_by_28():
    """Equation 12 at n = 784 = 28 x 28: sqrt(n) blocks of sqrt(n) x sqrt(n), on one channel of a gray image."""
    section = ShallowSection(kind="shallow", width=784, matrices="monarch", grayscale=True)
    model = build_model(section, image_size=28, num_classes=10)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if "head" not in name}
    assert set(shapes.values()) == {(28, 28, 28)}
    assert len(shapes) == 4
    torch.nn.init.normal_(model.head.weight)
    gray = torch.randn(3, 1, 28, 28)
    hidden = torch.relu(model.stem[0](gray.flatten(1)))
    assert torch.equal(model(gray.expand(-1, 3, -1, -1)), model.head(model.blocks(hidden)))
    coloured = torch.cat([gray, torch.randn(3, 2, 28, 28)], 1)
    assert torch.equal(model(coloured), model(gray.expand(-1, 3, -1, -1)))  # the first channel is read


@pytest.mark.parametrize("grayscale", [False, True])
def test_images_may_have_other_channels_and_the_head_may_be_left_out(grayscale):
    section = ShallowSection(kind="shallow", width=30, matrices="dense", grayscale=grayscale)
    network, arguments = section.model_spec(4)
    model = network(**arguments, in_chans=4, num_classes=0)
    assert model.stem[0].in_features == (16 if grayscale else 64)
    images = torch.randn(3, 4, 4, 4)
    features = model.forward_features(images)
    assert (model.in_chans, model.num_classes, features.shape) == (4, 0, (3, 30))
    assert torch.equal(model(images), features)
    model.double().eval().reset_classifier(7)
    assert (model.num_classes, model.head.training, model(images.double()).shape) == (7, False, (3, 7))


def test_a_shallow_network_says_what_it_is_and_what_reads_the_image():
    for matrices in ("dense", "monarch", "kronecker"):
        section = ShallowSection(kind="shallow", width=30, matrices=matrices)
        assert section.summary() == f"{matrices} MLP, m 30"
        first = build_model(section, 4, 5).get_submodule(section.first_layer())
        assert hasattr(first, "weight")
        assert first.weight.shape[-1] == (48 if matrices == "dense" else 8)
        published, side = ShallowSection.named()[f"shallow_{matrices}_4096_32"]
        assert (published.width, published.matrices, published.grayscale, side) == (4096, matrices, False, 32)


@pytest.mark.parametrize("matrices", ["dense", "monarch", "kronecker"])
def test_features_keep_their_variance(matrices):
    torch.manual_seed(0)
    section = ShallowSection(kind="shallow", width=1024, matrices=matrices)
    model = build_model(section, image_size=16, num_classes=5)
    hidden = model.stem[0](torch.randn(64, 3, 16, 16).flatten(1))
    assert hidden.std().item() == pytest.approx(1, abs=0.15)


def test_width_without_factors_is_refused():
    for matrices in ("monarch", "kronecker"):
        with pytest.raises(ValueError, match=f"width 1619 is prime: {matrices}"):
            ShallowSection(kind="shallow", width=1619, matrices=matrices)
        assert ShallowSection(kind="shallow", width=1618, matrices=matrices).width == 1618
    assert ShallowSection(kind="shallow", width=1619, matrices="dense").width == 1619


def test_maps_are_refused():
    with pytest.raises(InputError, match="its features are not a map"):
        timm.create_model("shallow_monarch_4096_32", features_only=True)
