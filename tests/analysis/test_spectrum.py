"""Singular values against numpy on explicit matrices, and edges against measured random ones."""

import copy
import json
import math

import numpy as np
import pytest
import scipy.sparse
import timm
import torch

from tests.analysis.test_figures import RUNS
from tests.conftest import ROOT, Fork
from widemix.analysis import sparse_spectrum, spectrum
from widemix.analysis.sparse_spectrum import masked_gaussian, scaling, widening
from widemix.analysis.spectrum import (
    kronecker_singular_values,
    linear_operator,
    marchenko_pastur_edge,
    masked_matrix,
    singular_values,
    sparse_edge,
    spectra,
)
from widemix.analysis.training_spectrum import as_lines, changes, course
from widemix.errors import InputError
from widemix.models.families import KINDS
from widemix.models.registry import build_model
from widemix.models.structured import linear_of
from widemix.models.structured_factors import Structure
from widemix.models.sw_mlp.sparse import SparseLinear


def build(kind: str, side: int = 8, **keys):
    return build_model(KINDS[kind](kind=kind, **keys), side, 10).eval()


def numpys(matrix: torch.Tensor) -> np.ndarray:
    return np.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)


S_MIXER = {"kind": "s_mixer", "patch_size": 4, "channels": 6, "depth": 1}
SW_MLP = {"kind": "sw_mlp", "patch_size": 4, "width": 24, "depth": 1, "density": 0.3, "expansion": 2.0}


@pytest.mark.parametrize(
    ("keys", "layer", "of", "shape", "repeats"),
    [
        # Of J2 (I (x) W) J1 and of J_c^T (I (x) W) J_c: what a mixing computes without its activation.
        (S_MIXER | {"permutation": "random"}, "mlp_tokens.fc", "mlp_tokens", (1, 4, 6), 6),
        (S_MIXER | {"permutation": "random"}, "mlp_channels.fc", "mlp_channels", (1, 4, 6), 4),
        (S_MIXER, "mlp_tokens.fc", "mlp_tokens", (1, 4, 6), 6),
        (S_MIXER, "mlp_channels.fc", "mlp_channels", (1, 4, 6), 4),
        (S_MIXER | {"token_groups": 2}, "mlp_tokens.fc", "mlp_tokens", (1, 4, 6), 3),
        (SW_MLP, "fc1", "fc1", (1, 24), 1),
        ({"kind": "repmlp", "patch_size": 4, "channels": 6, "depth": 1, "share_sets": 2}, "perceptron.dense",
         "perceptron.dense", (3, 2, 4), 3),
        ({"kind": "shallow", "width": 24, "matrices": "monarch"}, "", "", (1, 24), 1),
        ({"kind": "shallow", "width": 24, "matrices": "kronecker"}, "", "", (1, 24), 1),
    ],
)  # fmt: skip
def test_singular_values_are_those_of_the_layers_jacobian(keys, layer, of, shape, repeats):
    model = build(**keys)
    found = {each.layer: each for each in spectra(model, torch.zeros(1, 3, 8, 8))}
    name = f"blocks.0.{layer}".rstrip(".")
    assert not any(each.startswith(f"{name}.") for each in found)  # of the factors of a product
    module = model.blocks[0].get_submodule(of)
    if hasattr(module, "act"):
        module.act = torch.nn.Identity()
    x = torch.randn(math.prod(shape))
    wide = torch.autograd.functional.jacobian(lambda x: module(x.view(shape)).flatten(), x)
    assert found[name].repeats == repeats
    values = np.sort(found[name].values.repeat(repeats))[::-1]
    np.testing.assert_allclose(values, numpys(wide)[: len(values)], atol=1e-5)


def test_layers_have_their_shapes_and_edges():
    found = {each.layer: each for each in spectra(build(**SW_MLP), torch.zeros(1, 3, 8, 8))}
    assert found["blocks.0.fc1"].edge == pytest.approx(sparse_edge(2.0, 24, 0.3))
    assert found["blocks.0.fc2"].edge == pytest.approx(sparse_edge(0.5, 48, 0.3))
    assert (found["blocks.0.fc1"].shape, found["blocks.0.fc1"].complete) == ((48, 24), True)
    stem = {each.layer: each for each in spectra(build(**S_MIXER), torch.zeros(1, 3, 8, 8))}["stem.proj"]
    assert (stem.shape, stem.repeats) == ((6, 48), 4)
    model = build("shallow", width=24, matrices="monarch")
    assert {"stem.0", "blocks.0", "head"} <= {each.layer for each in spectra(model, torch.zeros(1, 3, 8, 8))}
    a, b = np.random.default_rng(0).normal(size=(2, 4, 3))
    np.testing.assert_allclose(kronecker_singular_values(a, b), np.linalg.svd(np.kron(a, b), compute_uv=False))


def test_products_of_an_s_mixer_are_kronecker_products():
    model = build("s_mixer", patch_size=4, channels=6, depth=2, project_tokens=5)
    first, second = spectrum.products(model)
    for each, block in ((first, model.blocks[0]), (second, model.blocks[1])):
        wide = torch.kron(block.mlp_channels.fc.weight, block.mlp_tokens.fc.weight).detach().double().numpy()
        assert each.shape == wide.shape
        np.testing.assert_allclose(each.values[: min(wide.shape)], numpys(torch.tensor(wide)), atol=1e-6)
        length = np.linalg.norm(wide) * wide.size**0.5
        assert each.spread == pytest.approx(np.abs(wide).sum() / length)
    assert second.edge == pytest.approx(4)
    assert spectrum.spread(np.ones((3, 4))) == pytest.approx(1)
    assert spectrum.spread(np.eye(4)) == pytest.approx(0.5)
    assert spectrum.products(build("mixer", patch_size=4, channels=6, depth=1, expansion=2.0)) == []


def test_large_matrices_by_lanczos_are_the_dense_ones():
    layer = SparseLinear(60, 40, 0.2, (0,))
    dense = numpys(layer.dense_weight())
    monarch = build("shallow", width=30, matrices="monarch").blocks[0]
    operator = linear_operator(monarch, 30, torch.zeros(1))
    product = monarch(torch.eye(30)).detach().T
    expected = product.numpy().T @ np.arange(30)
    # sums in float32 may cancel: what they are off by is set by their terms, not by what is left
    np.testing.assert_allclose(operator.rmatvec(np.arange(30.0)), expected, atol=1e-5 * np.abs(expected).max())
    found = singular_values(masked_matrix(layer), whole=10)
    assert len(found) == spectrum.LANCZOS
    np.testing.assert_allclose(found, dense[: spectrum.LANCZOS])
    np.testing.assert_allclose(singular_values(operator, whole=10), numpys(product)[: spectrum.LANCZOS], rtol=1e-5)
    side = spectrum.DENSE
    large, small = torch.nn.Linear(side + 1, side + 2), torch.nn.Linear(side + 2, 10)
    large.weight.data *= 0.9 ** torch.arange(side + 1).clamp(max=50)  # of which the largest values are found soon
    found = spectra(torch.nn.Sequential(large, small), torch.zeros(1, side + 1))
    assert [(each.complete, len(each.values)) for each in found] == [(False, spectrum.LANCZOS), (True, 10)]


def test_a_matrix_with_a_short_side_is_decomposed_whole():
    matrix = np.random.default_rng(0).normal(size=(8, 40))
    for each in (matrix, matrix.T):
        np.testing.assert_allclose(singular_values(each, whole=10), np.linalg.svd(matrix, compute_uv=False))
    assert np.isnan(spectrum.spread(np.zeros((2, 3))))
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    with pytest.raises(RuntimeError):
        spectra(module, torch.zeros(1, 5))
    assert not any(layer._forward_hooks for layer in module)


def test_convolutions_of_patches_are_linear_layers_and_others_are_none():
    """A window of each pixel, or of one channel, is no matrix of the whole image."""
    convolutions = [torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 2, 2, groups=2)]
    convolutions += [torch.nn.Conv2d(4, 5, 2, 2), torch.nn.Conv2d(5, 2, 1)]
    found = spectra(torch.nn.Sequential(*convolutions), torch.zeros(1, 3, 8, 8))
    assert [(each.layer, each.shape, each.repeats) for each in found] == [("2", (5, 16), 4), ("3", (2, 5), 4)]
    assert found[0].edge == pytest.approx((5**0.5 + 4) / 4)


def test_the_edges_are_those_of_large_random_matrices():
    random = np.random.default_rng(0)
    dense = random.normal(size=(1200, 600)) / np.sqrt(600)
    assert np.linalg.svd(dense, compute_uv=False)[0] == pytest.approx(1 + np.sqrt(2), rel=0.01)
    assert marchenko_pastur_edge(1200, 600) == pytest.approx(1 + np.sqrt(2))
    assert sparse_edge(2, 600, 1.0) == pytest.approx(1 + np.sqrt(2))
    assert sparse_edge(1, 600, 0.1) == sparse_edge(1, 600, 0.1, printed=True)


@pytest.mark.parametrize(("gamma", "rows", "columns"), [(4.0, 4000, 1000), (0.25, 1000, 4000)])
def test_the_expansion_is_right_and_as_printed_is_not(gamma, rows, columns):
    """The transpose of a masked matrix has the same values: only q^2 = gamma p m is symmetric."""
    density = 100 / 4000
    sampled = [masked_gaussian(rows, columns, density, np.random.default_rng(seed)) for seed in range(3)]
    measured = [singular_values(each, whole=100)[0] for each in sampled]  # Lanczos takes a hundredth of the time
    # the next order of the expansion is 1 / q^4
    expected, printed = (sparse_edge(gamma, columns, density, printed) for printed in (False, True))
    assert abs(np.mean(measured) - expected) < 0.4 * abs(np.mean(measured) - printed)
    assert sparse_edge(4.0, 1000, density) == pytest.approx(2 * sparse_edge(0.25, 4000, density))


def test_masked_gaussians_have_the_density_and_variance_of_sw_mlps():
    sampled = masked_gaussian(500, 400, 0.1, np.random.default_rng(0))
    assert sampled.nnz == pytest.approx(20_000, rel=0.03)
    assert (sampled.toarray() ** 2).mean() == pytest.approx(1 / 400, rel=0.03)
    entry = widening(2_000, 2.0, [50], trials=2)[0]
    assert entry["density"] == pytest.approx(0.4)
    assert entry["marchenko_pastur"] == pytest.approx(1 + 2**0.5)
    assert (entry["l_plus"], entry["l_plus_as_printed"]) == tuple(
        sparse_edge(2.0, 50, 0.4, printed) for printed in (False, True)
    )
    assert entry["l_plus"] < entry["l_plus_as_printed"]
    assert len(set(entry["largest"])) == 2


def test_the_scaling_of_figure_s1():
    values = scaling(200, 1.0, trials=2)
    assert values.shape == (2, 200)
    np.testing.assert_allclose((values**2).mean(1), 1)
    whole = masked_gaussian(200, 200, 200**-1.0, np.random.default_rng((0, 0))).toarray()
    scaled = np.linalg.svd(whole, compute_uv=False) / np.sqrt(np.diag(whole @ whole.T).mean())
    np.testing.assert_allclose(values[0], scaled, atol=1e-7)


@pytest.mark.parametrize("recipe", ["cifar10/vit", "cifar10/resmlp", "cifar10/permutator"])
def test_at_the_start_the_largest_values_are_at_the_edges(recipe):
    """timm's have a deviation of 0.02, or Xavier's."""
    [(_, layers)] = course(recipe)
    ratios = [layer.largest / layer.edge for layer in layers if layer.largest > 0]  # heads may begin with zeros
    assert len(ratios) > 20
    np.testing.assert_allclose(ratios, 1, atol=0.1)


def test_trained_weights_have_the_edge_of_the_first_ones():
    """Of timm's; without these it is that of random weights of the same deviation."""
    start = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    module = copy.deepcopy(start)
    with torch.no_grad():
        module.blocks[0].mlp.fc1.weight.mul_(3)
    images = torch.zeros(1, 3, 32, 32)
    edges = [{each.layer: each.edge for each in spectra(module, images, first)} for first in (start, None)]
    assert edges[0]["blocks.0.mlp.fc1"] == pytest.approx(edges[1]["blocks.0.mlp.fc1"] / 3)
    assert edges[0]["blocks.0.mlp.fc1"] == pytest.approx(marchenko_pastur_edge(768, 192, 0.02), rel=0.02)
    assert edges[0]["blocks.0.mlp.fc2"] == edges[1]["blocks.0.mlp.fc2"]


def test_the_command_prints_and_writes_what_it_has_sampled(tmp_path, widemix, monkeypatch):
    """What `scalings` samples for figure S.1 takes seconds: here of 30 connections instead of 1,000."""
    sampled = sparse_spectrum.scalings
    monkeypatch.setattr(sparse_spectrum, "scalings", lambda _, *rest: sampled(30, *rest))
    sizes = ("--connections", "200", "--gamma", "3", "--widths", "20", "30", "--trials", "3", "--seed", "5")
    outputs = ("--to", tmp_path, "--json", tmp_path / "numbers.json")
    code, said = widemix("analyse", "sparse-spectrum", *sizes, *outputs)
    assert code == 0, said
    entries = widening(200, 3.0, [20, 30], 3, 5)
    lines = [
        f"m {entry['width']}, p {entry['density']:.4g}: largest {np.mean(entry['largest']):.4f}, "
        f"sqrt(L+) {entry['l_plus']:.4f}, Marchenko-Pastur {1 + 3**0.5:.4f}"
        for entry in entries
    ]
    assert said.splitlines()[:2] == lines
    assert {path.name for path in tmp_path.iterdir()} == {"figure4_right.png", "figure_s1.png", "numbers.json"}
    written = json.loads((tmp_path / "numbers.json").read_text())
    assert written["widening"] == entries
    scaled = written["scaling_of_1000_connections"]
    assert [entry["exponent"] for entry in scaled] == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5]
    for entry in scaled:
        values = scaling(30, entry["exponent"], 3, 5)
        assert (entry["width"], entry["largest"]) == (round(30 ** ((1 + entry["exponent"]) / 2)), [*values[:, 0]])


def test_a_run_from_its_start_on(train, tmp_path, widemix):
    options = ("--train.max_steps", "4", "--train.save_every_steps", "2", "--train.seed", "7")
    options += ("--train.ema_decay", "0.9")
    assert train("run", *options).wait()[0] == 0
    steps = course(str(tmp_path / "run"), ["blocks.*.fc1"])
    assert [step for step, _ in steps] == [0, 2, 4]
    averaged = course(str(tmp_path / "run"), ["blocks.*.fc1"], ema=True)
    firsts = [[each[at][1][0].largest for at in range(3)] for each in (steps, averaged)]
    assert [one == other for one, other in zip(*firsts, strict=True)] == [True, False, False]
    assert [step for step, _ in course(str(tmp_path / "run/checkpoints/00000002"))] == [2]
    words = ("analyse", "spectrum", tmp_path / "run", "--to", tmp_path, "--json", tmp_path / "s.json")
    assert widemix(*words)[0] == 0
    content = json.loads((tmp_path / "s.json").read_text())["steps"]
    start = course("recipes/digits/rp_mixer.yaml", ["blocks.*.fc1"])  # of another depth and seed
    names = [layer.layer for layer in steps[0][1]]
    assert names == [layer.layer for layer in start[0][1]][:4]
    assert [step for step, _ in start] == [0]
    torch.manual_seed(7)
    keys = {"patch_size": 2, "channels": 64, "depth": 2, "expansion": 2, "permutation": "random"}
    weight = build("mixer", **keys).blocks[1].mlp_channels.fc1.weight
    np.testing.assert_allclose(steps[0][1][3].values, numpys(weight))
    found = {layer["layer"]: layer for layer in content[0]["layers"]}["blocks.1.mlp_channels.fc1"]
    assert found["effective_shape"] == [16 * 128, 16 * 64]
    assert found["largest"] == pytest.approx(numpys(weight)[0])
    assert "singular_values" not in content[1]["layers"][0]
    last = {layer["layer"]: layer for layer in content[2]["layers"]}["blocks.1.mlp_channels.fc1"]
    assert (last["shape"], last["repeats"], last["complete"]) == ([128, 64], 16, True)
    assert last["singular_values"] == pytest.approx([*steps[2][1][3].values])
    assert last["edge_at_start"] == pytest.approx(1 + 2**0.5)
    assert (tmp_path / "spectrum.png").exists()


def test_a_run_has_the_edges_of_its_start(digits, tmp_path):
    """Of a network of timm, whose edges depend on its first weights."""
    arguments = "{patch_size: 2, embed_dim: 48, depth: 1, num_heads: 2}"
    options = (
        "--train.max_steps",
        "4",
        "--train.save_every_steps",
        "2",
        "--train.keep_last",
        "9",
        "--optim.lr",
        "0.1",
    )
    options += ("--log.tensorboard", "false", "--data.path", digits, "--run-dir", tmp_path / "run")
    recipe = tmp_path / "vit.yaml"
    model = f"model: {{kind: timm, name: vit_tiny_patch16_224, arguments: {arguments}}}"
    recipe.write_text(f"extends: {ROOT}/recipes/base/digits.yaml\n{model}\n")
    code, output = Fork("train", recipe, *options, log=tmp_path / "log").wait()
    assert code == 0, output
    steps = [(step, layer) for step, [layer] in course(str(tmp_path / "run"), ["blocks.0.mlp.fc1"])]
    assert [step for step, _ in steps] == [0, 2, 4]
    assert len({layer.edge for _, layer in steps}) == 1
    assert len({layer.largest for _, layer in steps}) == 3


def test_what_training_changes_is_the_end_less_the_start():
    found = changes(RUNS)
    assert found["networks"] == ["one", "two"]
    a, b = found["layers"]
    assert (a["layer"], b["layer"]) == ("a", "b")
    assert a["start"] == {"largest": [1, 0.5], "spread": [0.6, 0.8]}
    assert a["end"] == {"largest": [4, 1], "spread": [0.2, 0.4]}
    assert b["change"]["largest"] == [1, 1]
    assert found["mean"]["start"]["spread"] == pytest.approx([0.55, 0.75])
    assert found["mean"]["end"]["largest"] == pytest.approx([3.5, 1.25])
    assert found["mean"]["change"]["spread"] == pytest.approx([-0.3, -0.5])
    assert as_lines(found)[0].split(None, 1) == ["a", "largest 0.7500 to 2.5000, spread 0.7000 to 0.3000"]
    assert as_lines(found)[2].startswith("mean of these layers ")


def test_networks_that_cannot_be_compared_are_refused():
    with pytest.raises(InputError, match="three: has other layers than one"):
        changes(RUNS | {"three": [(step, layers[:1]) for step, layers in RUNS["one"]]})


@pytest.mark.parametrize("side", [6, 40])
def test_a_matrix_of_zeros_has_singular_values_of_zero(side):
    """Lanczos, which larger matrices take, cannot start from them."""
    for zeros in (np.zeros((side, side)), scipy.sparse.csr_array((side, side))):
        found = singular_values(zeros, whole=20)
        assert len(found) == 6
        assert not found.any()


@pytest.mark.parametrize(
    ("structure", "least"), [(Structure("kronecker"), 3.0), (Structure("monarch"), 2.4)], ids=str
)
def test_structured_weights_start_below_the_edge_of_their_factors(structure, least):
    """Of squares of 32 x 32 = 1,024 inputs, each at 2, where a dense matrix is at 2. A Kronecker product is at 4, a
    product of independent square matrices at sqrt(27 / 4).
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(linear_of(structure)(1024, 1024))
    (layer,) = spectra(model, torch.zeros(1, 1, 1024))
    assert layer.edge == pytest.approx(4)
    assert layer.shape == (1024, 1024)
    assert least < layer.largest < 4
