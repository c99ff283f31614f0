"""CKA against the dense formula, its invariances, and stored features of whole networks."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import ROOT
from widemix.analysis.cka import (
    LEAST,
    MinibatchCka,
    centered_kernel,
    cka,
    diagonal_mean,
    layer_features,
    layers_before_skips,
    layers_by_pattern,
    random_samples,
)
from widemix.analysis.similarity import (
    Samples,
    Similarity,
    compare_each,
    inputs_section,
    inverse_density,
    mean_diagonals,
    mean_diagonals_csv,
    similarities_json,
    similarity_figures,
)
from widemix.errors import InputError
from widemix.evaluation.networks import load_network, of_recipe
from widemix.models.families import KINDS
from widemix.models.registry import build_model
from widemix.recipe import load_recipe


def hsic(x: np.ndarray, y: np.ndarray) -> float:
    """The unbiased estimator, as Song et al. 2012 print it, in traces of the kernel matrices."""
    n = len(x)
    k, l = x @ x.T, y @ y.T  # noqa: E741
    np.fill_diagonal(k, 0)
    np.fill_diagonal(l, 0)
    one = np.ones((n, 1))
    total = np.trace(k @ l) + (one.T @ k @ one * (one.T @ l @ one)).item() / ((n - 1) * (n - 2))
    return (total - 2 / (n - 2) * (one.T @ k @ l @ one).item()) / (n * (n - 3))


def dense_cka(x: np.ndarray, y: np.ndarray, *sizes: int) -> float:
    """Nguyen et al. 2021, equation of section 3.1, over mini-batches of these sizes, each by its samples."""
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    pairs = ((x, y), (x, x), (y, y))
    xy, xx, yy = (np.average([hsic(a[part], b[part]) for part in parts], weights=sizes) for a, b in pairs)
    return xy / np.sqrt(xx * yy)


@pytest.fixture
def features():
    random = np.random.default_rng(0)
    x = random.normal(size=(48, 10))
    return x, x @ random.normal(size=(10, 7)) + random.normal(size=(48, 7)) + 3


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [(None, [48]), (16, [16, 16, 16]), (20, [20, 20, 8]), (22, [22, 22, 4]), (23, [23, 23])],  # no batch of two
)
def test_cka_is_the_formula_over_its_batches(features, batch, sizes):
    x, y = features
    expected = pytest.approx(dense_cka(x, y, *sizes), abs=1e-6)
    assert cka({"x": x.reshape(48, 5, 2)}, {"y": y}, batch=batch).item() == expected


def test_a_first_sample_far_from_the_others_takes_no_digits(features):
    """Kernels are float32 products: where they are of differences from that sample, errors are 50 times as large."""
    x, y = features
    x = x + 1e4
    x[0] = 0
    assert cka({"x": x}, {"y": y}).item() == pytest.approx(dense_cka(x, y, 48), abs=3e-5)


def test_too_few_and_other_samples_are_refused():
    x = np.random.default_rng(0).normal(size=(8, 3))
    with pytest.raises(ValueError, match="at least 4"):
        cka({"x": x[:3]}, {"x": x[:3]})
    with pytest.raises(ValueError, match="same samples"):
        cka({"x": x}, {"x": x[:5]})
    assert diagonal_mean(np.eye(3)) == 1
    assert diagonal_mean(np.ones((2, 3))) is None


def test_whole_numbers_are_features_too(features):
    x, y = features
    whole = np.round(10 * x).astype(int)
    assert cka({"x": whole}, {"y": y}).item() == cka({"x": whole.astype(np.float32)}, {"y": y}).item()
    for rows, columns in (({"x": x, "z": x[:5]}, {"y": y}), ({"x": x}, {"y": y, "z": y[:5]})):
        with pytest.raises(ValueError, match=r"features of \[5, 48\] samples"):
            cka(rows, columns)
    total = MinibatchCka()
    for part in (slice(0, 20), slice(20, 48)):
        total.update(*([centered_kernel(torch.from_numpy(each[part]))] for each in features))
    assert total.samples == 48
    assert total.values() == pytest.approx(cka({"x": x[:40]}, {"y": y[:40]}, batch=20), abs=0.2)


def test_each_usual_name_before_a_skip_is_found():
    names = ["attn", "mlp", "mlp1", "mlp2", "mlp_tokens", "mlp_channels", "linear_tokens", "outer_act", "mix"]
    names += ["gated", "ffn", "self_attn", "linear2"]
    module = torch.nn.ModuleDict({name: torch.nn.Sequential(torch.nn.Linear(2, 2)) for name in (*names, "norm1")})
    module["mlp"].add_module("attn", torch.nn.Identity())
    assert layers_before_skips(module) == names
    found = layer_features(module["mlp"], torch.ones(1, 2), ["0"], torch.clone)
    assert not found["0"].requires_grad
    assert layers_by_pattern(module, ["*"])[0] == "attn"  # and not the network itself


def test_samples_are_taken_in_random_order_and_whole_batches():
    order = random_samples(1000, 100, 33, seed=1)
    assert len(order) == len(set(order)) == 99  # a single sample is no batch
    assert (np.diff(order) < 0).any()
    assert len(random_samples(1000, None, 33, seed=1)) == 1000
    assert len(random_samples(10, None, 256, seed=0)) == 10
    assert len(random_samples(9, None, LEAST + 1, seed=0)) == 9
    assert len(random_samples(8, None, LEAST + 1, seed=0)) == 5  # three are no batch
    assert len(random_samples(LEAST - 1, None, 2, seed=0)) == LEAST - 1
    assert sorted(random_samples(50, 50, 10, seed=2)) == list(range(50))
    assert list(random_samples(50, 20, 10, seed=2)) == list(random_samples(50, None, 10, seed=2)[:20])
    assert list(random_samples(50, 20, 10, seed=2)) != list(random_samples(50, 20, 10, seed=3))


def test_every_family_and_timms_networks_have_layers_before_their_skips():
    """The sum of the stem and of these outputs is the last block's output, where there is nothing else between."""
    mixer = {"patch_size": 4, "channels": 6, "depth": 2}
    masked = {"patch_size": 4, "width": 24, "depth": 2, "density": 0.5}
    networks = [
        ("mixer", {**mixer, "expansion": 2, "permutation": "random"}),
        ("s_mixer", mixer),
        ("sw_mlp", masked),
        ("sw_mlp", {**masked, "expansion": 2}),
        ("sw_mlp", {**masked, "expansion": 2, "outer_activation": False}),
        ("permutator", {"patch_size": 4, "channels": 8, "depth": 2}),
        ("repmlp", {"patch_size": 4, "channels": 8, "depth": 2, "share_sets": 2}),
    ]
    for kind, keys in networks:
        module = build_model(KINDS[kind](kind=kind, **keys), 8, 10).eval()
        names = layers_before_skips(module)
        found = layer_features(module, torch.randn(2, 3, 8, 8), ["stem", *names, "blocks"], torch.clone)
        total = sum(found[layer].flatten(1) for layer in ["stem", *names])
        torch.testing.assert_close(total, found["blocks"].flatten(1), rtol=1e-4, atol=1e-4)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    assert layers_before_skips(vit) == ["blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp"]
    mixer = timm.create_model("mixer_s32_224", img_size=64)
    assert layers_before_skips(mixer)[:2] == ["blocks.0.mlp_tokens", "blocks.0.mlp_channels"]
    with pytest.raises(InputError, match="name some as patterns"):
        layers_before_skips(timm.create_model("resnet18"))
    assert layers_by_pattern(mixer, ["blocks.?.norm2"])[1] == "blocks.1.norm2"


def test_streaming_over_a_split_is_the_formula_over_stored_features(digits, tmp_path):
    """The second reads them with a mean and deviation of its own, of the split and folder of the first."""
    narrow = tmp_path / "narrow.yaml"
    keys = "model: {channels: 36}\ndata: {mean: [0.1, 0.2, 0.6], std: [0.2, 0.5, 0.3], eval_split: train, path: none}"
    narrow.write_text(f"extends: {ROOT}/recipes/digits/rp_s_mixer.yaml\n{keys}\n")
    first, second = map(load_network, ("recipes/digits/mixer.yaml", str(narrow)))
    samples = Samples(digits, batch=500, most=60, seed=4)
    [found] = compare_each([first], second, samples, ["blocks.*.norm1"], ["blocks.1"])
    assert found.samples == found.batch == 60
    of_first = first.data.model_copy(update={"path": str(digits), "eval_split": "train"})
    own = inputs_section(second, of_first, Samples())
    assert (own.path, own.eval_split, own.mean) == (str(digits), "train", (0.1, 0.2, 0.6))
    assert inputs_section(second, of_first, Samples(split="test")).eval_split == "test"
    for number, expected in ((3, 10), (20, 20)):  # labels are not used, but those of the data are to fit
        few = replace(second, data=second.data.model_copy(update={"num_classes": number}))
        assert inputs_section(few, of_first, Samples()).num_classes == expected
    of_text = load_recipe("mnli/mixer").data
    reads = "reads {}, the other network {}"
    with pytest.raises(InputError, match=reads.format("images", "text")):
        inputs_section(second, of_text.model_copy(update={"path": str(digits)}), Samples())
    with pytest.raises(InputError, match=reads.format("text", "images")):
        inputs_section(replace(second, data=of_text), of_first, Samples())
    nowhere = of_first.model_copy(update={"path": ""})
    with pytest.raises(InputError, match="has no data of its own: give a prepared folder with --data"):
        inputs_section(second, nowhere, Samples())
    assert found.rows == [f"blocks.{i}.norm1" for i in range(4)]
    assert found.columns == ["blocks.1"]
    densities = found.as_json()["row_inverse_density"], found.as_json()["inverse_density"]
    assert densities == (pytest.approx(2 / (1 / 16 + 1 / 64)), pytest.approx(2 / (1 / 16 + 1 / 36)))
    from widemix.data.loader import EvalLoader
    from widemix.distributed.topology import Topology

    inputs = []
    for network in (first, second):
        section = network.data.model_copy(update={"path": str(digits), "eval_split": "test"})
        with EvalLoader(section, 1000, Topology(0, 1, 0, 1, torch.device("cpu"))).batches() as batches:
            inputs.append(next(batches).inputs[random_samples(360, 60, 500, seed=4)])
    rows = layer_features(first.module, inputs[0], found.rows, lambda x: x.flatten(1).double().numpy())
    column = layer_features(second.module, inputs[1], found.columns, lambda x: x.flatten(1).double().numpy())
    expected = [[dense_cka(row, column["blocks.1"], 60)] for row in rows.values()]
    np.testing.assert_allclose(found.values, expected, atol=1e-5)


def test_several_first_networks_give_the_curve_over_all_pairs(digits, tmp_path, widemix):
    """As each pair by itself; the curve is the mean and deviation of the pairs with as sparse a network."""
    recipes = [f"recipes/digits/{name}.yaml" for name in ("mixer", "rp_mixer")]
    run, options = tmp_path / "run", ["--data", digits, "--batch", "100", "--samples", "200"]
    run.mkdir()
    (run / "recipe.yaml").touch()
    outputs = ["--to", tmp_path, "--json", tmp_path / "cka.json", "--tensorboard", run]
    code, said = widemix("analyse", "cka", *recipes, "--with", *recipes, *options, *outputs)
    assert code == 0, said
    content = json.loads((tmp_path / "cka.json").read_text())
    pairs = [(each["row_network"], each["column_network"]) for each in content["comparisons"]]
    assert pairs == [(a, b) for b in recipes for a in recipes]
    networks = [load_network(name) for name in recipes]
    samples = Samples(digits, batch=100, most=200)
    alone = [compare_each([a], b, samples)[0] for b in networks for a in networks]
    for each, expected in zip(content["comparisons"], alone, strict=True):
        np.testing.assert_allclose(each["values"], expected.values, rtol=1e-6)
    means = [diagonal_mean(each.values) for each in alone]
    lines = said.splitlines()
    assert lines[0] == f"{recipes[0]} with {recipes[0]}: 8 x 8 layers, 200 samples, mean of the diagonal 1.0000"
    assert lines[1].startswith(f"{recipes[1]} with {recipes[0]}: ")
    spread = f"{np.mean(means):.4f} +- {np.std(means, ddof=1):.4f} (4 pairs)"
    assert lines[4] == f"1/p {2 / (1 / 16 + 1 / 64):g}: {spread}"
    [point] = content["mean_diagonals"]  # both are as sparse
    assert point == {
        "inverse_density": pytest.approx(2 / (1 / 16 + 1 / 64)),
        "mean": pytest.approx(np.mean(means)),
        "std": pytest.approx(np.std(means, ddof=1)),
        "pairs": 4,
        "matched": [pytest.approx(means[0]), pytest.approx(means[3])],  # each network with itself
    }
    head, row = (line.split(",") for line in (tmp_path / "cka_diagonal.csv").read_text().splitlines())
    assert head == ["inverse_density", "mean", "std", "pairs"]
    assert row == [str(point[name]) for name in head]
    assert {path.name for path in tmp_path.glob("*.png")} == {"cka_diagonal.png"}
    board = EventAccumulator(str(run))
    board.Reload()
    assert board.Tags()["images"] == ["analysis/cka_diagonal"]
    shown = Image.open(io.BytesIO(board.Images("analysis/cka_diagonal")[0].encoded_image_string))
    saved = Image.open(tmp_path / "cka_diagonal.png").convert("RGB")
    assert np.array_equal(np.asarray(shown), np.asarray(saved))


@pytest.mark.parametrize("value", [0.0, 0.1, np.pi, -1e6, 1e-30])
@pytest.mark.parametrize("batch", [None, 16])
def test_a_constant_layer_has_no_cka_and_enters_no_mean(features, value, batch):
    """Its float32 mean is not the constant itself, and what was left had a CKA of 1 with itself."""
    x, y = features
    constant = np.full((48, 7), value)
    values = cka({"x": x, "constant": constant}, {"y": y, "constant": constant}, batch)
    assert np.isnan(values).tolist() == [[False, True], [True, True]]
    assert diagonal_mean(values) == pytest.approx(cka({"x": x}, {"y": y}, batch).item())
    assert np.isnan(diagonal_mean(cka({"constant": constant}, {"constant": constant}, batch)))


def pair(row: str, column: str, value: float, sparsity: float = 2.0, own: float | None = 1.0) -> Similarity:
    return Similarity(row, column, ["1"], ["1"], np.full((1, 1), value), 48, 16, sparsity, own)


def test_the_curve_is_in_the_order_of_sparsity():
    """Pairs that share no network are matched, those without a mean enter no curve."""
    (point,) = mean_diagonals([pair("a", "b", value) for value in (0.25, np.nan, 0.75)])
    assert (point["mean"], point["pairs"]) == (0.5, 2)
    assert mean_diagonals([pair("a", "b", np.nan)]) == []
    pairs = [pair("a", "z", 0.5, 8.0, None)]
    pairs += [pair(row, column, n / 8) for n, (row, column) in enumerate(("ab", "bb", "ac", "bc"))]
    first, last = mean_diagonals(pairs)
    assert (first["inverse_density"], first["pairs"], first["mean"]) == (2.0, 4, 1.5 / 8)
    assert first["matched"] == [0, 3 / 8]  # a with b, and b with c
    assert last == {"inverse_density": 8.0, "mean": 0.5, "std": None, "pairs": 1, "matched": [0.5]}
    of_one = [pair("a", str(n), 0.5) for n in range(5)]
    assert list(similarity_figures(of_one)) == [*(f"cka_{n}.png" for n in range(1, 6)), "cka_diagonal.png"]


def test_one_pair_is_written_by_itself():
    values = np.array([[0.5, np.nan], [0.25, 0.75]])
    one = Similarity("a", "b", ["1", "2"], ["3", "4"], values, 48, 16, 2.0, 8.0)
    assert similarities_json([one]) == {
        "row_network": "a",
        "column_network": "b",
        "rows": ["1", "2"],
        "columns": ["3", "4"],
        "values": [[0.5, None], [0.25, 0.75]],
        "diagonal_mean": 0.625,
        "samples": 48,
        "batch": 16,
        "inverse_density": 2.0,
        "row_inverse_density": 8.0,
    }
    assert replace(one, values=np.full((2, 2), np.nan)).as_json()["diagonal_mean"] is None
    assert list(similarity_figures([one])) == ["cka.png"]
    wide = replace(one, columns=["3"], values=values[:, :1])
    assert wide.as_json()["diagonal_mean"] is None
    assert list(similarity_figures([one, wide])) == ["cka_1.png", "cka_2.png"]  # no diagonal
    assert list(similarity_figures([one, replace(one, row_network="c")])) == ["cka_diagonal.png"]
    assert mean_diagonals_csv([one, wide]) == ""
    assert mean_diagonals([one, replace(one, sparsity=None)]) == []


def test_the_density_of_a_mask_is_its_key():
    keys = [("model.density", "0.25"), ("model.width", "64"), ("model.depth", "1")]
    recipe = load_recipe("recipes/cifar10/sw_mlp.yaml", keys)
    network = of_recipe("sw", recipe, build_model(recipe.model, 32, 10))
    assert inverse_density(network) == 4
    assert inverse_density(replace(network, section=None)) is None
    other = load_recipe("cifar10/vit")
    assert inverse_density(replace(network, section=other.model, data=other.data)) is None  # which no formula gives


def test_layers_are_in_the_order_asked_for_without_a_trace():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.plain, self.silent = Both(), torch.nn.Identity(), torch.nn.Identity()

        def forward(self, x):
            return self.both(self.plain(x))

    class Both(torch.nn.Module):
        def forward(self, x):
            return 2 * x, 3 * x

    module, x = Two(), torch.arange(3.0)
    found = layer_features(module, x, ["both", "plain"], torch.clone)
    assert {name: values.tolist() for name, values in found.items()} == {"both": [0, 2, 4], "plain": [0, 1, 2]}
    assert list(found) == ["both", "plain"]
    with pytest.raises(InputError, match="layer silent: the network's forward pass does not call it"):
        layer_features(module, x, ["plain", "silent"], torch.clone)
    assert not any(layer._forward_hooks for layer in module.modules())
    assert layers_by_pattern(module, ["silent", "b*"]) == ["both", "silent"]
