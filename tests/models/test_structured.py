"""Structured matrices against their definitions, and how far a step moves what they compute."""

import pytest
import torch

from tests.models.dense import structured
from tests.models.networks import SHAPE
from widemix.estimate.report import structure_rows
from widemix.models.mixer.section import MixerSection
from widemix.models.registry import build_model
from widemix.models.structured import linear_of
from widemix.models.structured_factors import Structure, split
from widemix.optim.build import build_optimizer, parameter_groups, set_rate
from widemix.optim.section import OptimSection

STRUCTURES = [
    Structure("low_rank", rank=3),
    Structure("low_rank", rank="as_dense"),
    Structure("kronecker"),
    Structure("monarch"),
    Structure("btt", rank=2),
    Structure("btt", rank="as_dense"),
    Structure("block_diagonal", blocks=4),
]


SIZES = [(12, 20), (20, 12), (16, 16), (64, 98), (20, 18), (49, 48), (48, 192), (18, 20)]
CASES = [(structure, *sizes) for structure in STRUCTURES for sizes in SIZES if not structure.fault(*sizes)]


@pytest.mark.parametrize(("structure", "inputs", "outputs"), CASES, ids=str)
def test_the_product_is_that_with_the_dense_matrix(structure, inputs, outputs):
    torch.manual_seed(0)
    layer = linear_of(structure)(inputs, outputs).double()
    torch.nn.init.normal_(layer.bias)
    weight = structured(layer)
    assert torch.allclose(layer.dense_weight(), weight, atol=1e-12)
    x = torch.randn(3, 5, inputs, dtype=torch.float64)
    assert torch.allclose(layer(x), x @ weight.T + layer.bias, atol=1e-12)
    assert torch.linalg.matrix_rank(weight) == structure.full_rank(inputs, outputs)
    assert sum(p.numel() for p in layer.parameters()) - outputs == sum(
        factor.parameters for factor in structure.factors(inputs, outputs)
    )


@pytest.mark.parametrize("kind", ["low_rank", "btt"])
@pytest.mark.parametrize(("inputs", "outputs"), [(12, 20), (64, 64), (48, 192)])
def test_as_dense_is_the_greatest_rank_that_costs_no_more(kind, inputs, outputs):
    def cost(rank):
        return sum(factor.multiply_adds for factor in Structure(kind, rank).factors(inputs, outputs))

    rank = Structure(kind, "as_dense").rank_for(inputs, outputs)
    assert cost(rank) <= inputs * outputs < cost(rank + 1)


@pytest.mark.parametrize("size", range(1, 200))
def test_the_two_factors_are_the_nearest(size):
    pairs = [(a, size // a) for a in range(1, size + 1) if size % a == 0 and a <= size // a]
    assert split(size) == min(pairs, key=lambda pair: pair[1] - pair[0])


def moved(structure: Structure, width: int, optimizer: str, rule: bool) -> float:
    """The root mean square by which a step moves the outputs of a layer, over samples of inputs and gradients."""
    squares = []
    for seed in range(4):
        torch.manual_seed(seed)
        layer = torch.nn.Sequential(linear_of(structure)(width, width))
        if isinstance(layer[0], torch.nn.Linear):
            torch.nn.init.normal_(layer[0].weight, std=width**-0.5)
        section = OptimSection(name=optimizer, lr=1.0, weight_decay=0.0, momentum=0.0)
        steps = build_optimizer(section, layer)
        if not rule:
            for group in steps.param_groups:
                group["lr_scale"] = 1.0
        set_rate(steps, 1e-3 / width)  # of a dense matrix: both optimizers then move its outputs alike at all widths
        x, towards = torch.randn(1, 1, width), torch.randn(1, 1, width)
        before = layer(x)
        (before * towards).sum().backward()
        steps.step()
        squares.append((layer(x) - before).square().mean())
    return torch.stack(squares).mean().sqrt().item()


MOVED = [Structure("low_rank", rank=8), Structure("kronecker"), Structure("monarch"), Structure("btt", rank=4)]


@pytest.mark.parametrize(
    ("structure", "optimizer"),
    [(each, "adamw") for each in MOVED] + [(each, "sgd") for each in MOVED if each.kind != "low_rank"],
    ids=str,
)
def test_a_step_moves_the_outputs_alike_at_all_widths(structure, optimizer):
    """As far as a dense matrix's step does, times a constant; without the rule less and less."""
    widths = (64, 512)
    dense = [moved(Structure("dense"), width, optimizer, True) for width in widths]
    found = [moved(structure, width, optimizer, True) / one for width, one in zip(widths, dense, strict=True)]
    plain = [moved(structure, width, optimizer, False) / one for width, one in zip(widths, dense, strict=True)]
    assert max(found) / min(found) < 2
    if structure.kind != "low_rank":  # whose first factor has the inputs of a dense matrix
        assert plain[0] > 1.8 * plain[1]


def test_rates_and_decay_are_those_of_the_factors():
    keys = {"kind": "s_mixer", "channels": 12, "token_weights": "kronecker", "channel_weights": "btt", "rank": 2}
    model = build_model(MixerSection(**SHAPE | keys), image_size=4, num_classes=5)
    groups = parameter_groups(OptimSection(lr=0.1, weight_decay=0.5), model)
    scales = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    names = {name: scales[id(p)] for name, p in model.named_parameters()}
    # 4 = 2 x 2 tokens; 12 = 3 x 4 channels: R has 4 inputs, L 3 x 2.
    assert names["blocks.1.mlp_tokens.fc.right"] == names["blocks.1.mlp_tokens.fc.left"] == (4 / 2 / 2, 0.5)
    assert names["blocks.1.mlp_channels.fc.right"] == (12 / 4 / 2, 0.5)
    assert names["blocks.1.mlp_channels.fc.left"] == (12 / 6 / 2, 0.5)
    assert names["blocks.1.mlp_channels.fc.bias"] == (1.0, 0.0)
    assert names["head.weight"] == (1.0, 0.5)
    decayed = parameter_groups(OptimSection(lr=0.1, layer_decay=0.5), model)
    scales = {id(p): group["lr_scale"] for group in decayed for p in group["params"]}
    for name, p in model.named_parameters():
        if name.startswith("blocks.1."):  # which the norm and the head follow
            assert scales[id(p)] == 0.5**2 * names[name][0], name


def test_costs_say_a_weights_uses_and_the_rank():
    keys = {"patch_size": 4, "channels": 48, "depth": 2, "kind": "s_mixer"}
    section = MixerSection(**keys, token_weights="kronecker", channel_weights="btt", rank=3)
    token, channel = structure_rows(section, 32)
    # 64 = 8 x 8: 2 x 64 weights, each in 8 products. 48 = 6 x 8: 3 (8 x 6 x 8 + 8 x 6 x 6) weights.
    assert (token.text, token.value) == ("kronecker, 64 to 64", 1024)
    assert (
        token.note == "128 weights, each used 8 times a row; rank 64 of 64; 16 multiply-adds an input, 25.0% of dense"
    )
    assert (channel.text, channel.value) == ("btt of rank 3, 48 to 48", 2016)
    assert channel.note.startswith("2,016 weights, each used 1 times a row; rank 48 of 48; 42 multiply-adds an input")
    assert structure_rows(MixerSection(**keys), 32) == []


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_every_factor_starts_with_its_own_deviation(structure):
    """sqrt(1 / inputs) min(1, sqrt(outputs / inputs)), of the matrix that it is."""
    torch.manual_seed(0)
    layer = linear_of(structure)(400, 144)
    for factor in [p for name, p in layer.named_parameters() if name != "bias"]:
        outputs, inputs = factor.shape[-2:]
        assert factor.std().item() == pytest.approx(inputs**-0.5 * min(1, (outputs / inputs) ** 0.5), rel=0.15)
    assert not layer.bias.any()


TWO = Structure("btt", 3)
NO_PRODUCT, BLOCKS = "a width of 7 is no product of two", "4 blocks do not divide a width of"


@pytest.mark.parametrize(
    ("structure", "inputs", "outputs", "fault", "rank"),
    [
        *((each, *sizes, NO_PRODUCT, None) for each in STRUCTURES[2:5] for sizes in ((7, 12), (12, 7))),
        *((each, 12, 4, "", rank) for each, rank in ((STRUCTURES[2], 1), (STRUCTURES[3], 1), (TWO, 3))),
        (STRUCTURES[6], 12, 8, "", 1),
        (STRUCTURES[6], 8, 10, f"{BLOCKS} 10", None),
        (STRUCTURES[6], 6, 8, f"{BLOCKS} 6", None),
        (STRUCTURES[0], 7, 5, "", 3),
        (STRUCTURES[1], 1, 5, "", 1),  # at least
        (Structure("kronecker", rank=3), 12, 20, "", 1),
        (Structure("dense"), 7, 5, "", 1),
    ],
    ids=str,
)
def test_widths_have_a_fault_or_a_rank(structure, inputs, outputs, fault, rank):
    assert structure.fault(inputs, outputs) == fault
    assert rank is None or structure.rank_for(inputs, outputs) == rank
