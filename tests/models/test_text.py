"""Text models: padding never matters, equal budgets are equal, and the formula written out."""

import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, softmax

from widemix.errors import InputError
from widemix.models.registry import build_model
from widemix.models.text.network import PAD
from widemix.models.text.section import TextMixerSection, TextTransformerSection

SHAPE = {"vocabulary": 20, "tokens": 9, "depth": 2, "expansion": 1.5}
MIXER = TextMixerSection(kind="text_mixer", channels=8, **SHAPE)
SECTIONS = {
    "mixer": MIXER,
    "rp_mixer": MIXER.model_copy(update={"permutation": "random"}),
    "norm-free mixer": MIXER.model_copy(update={"norm": "none", "activation": "square"}),
    "transformer": TextTransformerSection(kind="text_transformer", channels=8, heads=2, **SHAPE),
}
IDS = torch.randint(1, 20, (4, 9), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([9, 5, 1, 7])
PADDED = IDS.masked_fill(torch.arange(9) >= LENGTHS[:, None], PAD)


class Times(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def build(section):
    torch.manual_seed(0)
    model = build_model(section, 0, 3).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embedding" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_a_mixer_block_counts_as_two_layers_and_a_transformers_as_one():
    """Navon & Bronstein 2023: p / log2 d of equation 3, a transformer's by its attention."""
    ratios = [section.depth_to_width() for section in SECTIONS.values()]
    assert ratios == [2 * 2 / 3, 2 * 2 / 3, 2 * 2 / 3, 2 / 3]


def test_heads_are_replaced_by_others_of_as_many_classes():
    model = build(MIXER).eval()
    assert model.get_classifier() is model.head
    model.reset_classifier(5)
    assert (model.num_classes, model.get_classifier().out_features) == (5, 5)
    assert not model.head.training
    assert model(PADDED.to(model.head.weight.device)).shape == (4, 5)
    features = model.forward_features(PADDED)
    assert torch.equal(model.forward_head(features, pre_logits=True), features)
    model.reset_classifier(0)
    assert (model.num_classes, model(PADDED).equal(features)) == (0, True)
    network, arguments = MIXER.model_spec(0)
    assert network(num_classes=0, **arguments)(PADDED).shape == (4, 8)
    assert MIXER.first_layer() == "embedding"
    assert model.get_submodule(MIXER.first_layer()) is model.embedding


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_padding_never_matters(section):
    model = build(section)
    expected = model(PADDED)
    with torch.no_grad():
        model.embedding.weight[PAD] = 1e3 * torch.randn(8, dtype=torch.float64)
    assert torch.allclose(model(PADDED), expected, atol=1e-9)
    model(PADDED).square().sum().backward()
    assert not model.embedding.weight.grad[PAD].any()


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_batches_may_be_padded_less_far(section):
    model = build(section)
    assert torch.allclose(model(PADDED[1:, :7]), model(PADDED[1:]), atol=1e-12)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_sentences_of_a_batch_do_not_meet(section):
    model = build(section)
    alone = torch.cat([model(one[None]) for one in PADDED])
    assert torch.allclose(model(PADDED), alone, atol=1e-12)


@pytest.mark.parametrize("name", ["mixer", "norm-free mixer"])
def test_mixer_is_its_formula(name):
    model, plain = build(SECTIONS[name]), name == "norm-free mixer"
    phi = torch.square if plain else gelu

    def normed(x, norm):
        return x if plain else layer_norm(x, (8,), norm.weight, norm.bias, 1e-6)

    for number, block in enumerate(model.blocks):  # in the place of stochastic depth
        block.drop_path1, block.drop_path2 = Times(0.5 + number), Times(2.0 + number)
    for ids, length, ours in zip(PADDED, LENGTHS, model(PADDED), strict=True):
        real = (torch.arange(9) < length).double()[:, None]
        x = model.embedding.weight[ids] * real
        for block in model.blocks:
            for norm, mix, along_tokens, scale in (
                (block.norm1, block.mlp_tokens, True, block.drop_path1.factor),
                (block.norm2, block.mlp_channels, False, block.drop_path2.factor),
            ):
                z = normed(x, norm) * real
                z = z.T if along_tokens else z
                z = phi(z @ mix.fc1.weight.T + mix.fc1.bias) @ mix.fc2.weight.T + mix.fc2.bias
                x = x + scale * (z.T if along_tokens else z)
        pooled = normed(x, model.norm)[:length].mean(0)
        assert torch.allclose(ours, model.head.weight @ pooled + model.head.bias, rtol=1e-10, atol=1e-10)


def test_a_text_of_padding_alone_has_the_heads_bias():
    model = build(MIXER)
    ids = torch.stack([PADDED[0], torch.full((9,), PAD)])
    assert torch.equal(model(ids)[1], model.head.bias)
    assert torch.allclose(model(ids)[0], model(PADDED[:1])[0], atol=1e-12)


def test_transformer_is_its_formula():
    model = build(SECTIONS["transformer"])
    for ids, length, ours in zip(PADDED, LENGTHS, model(PADDED), strict=True):
        x = (model.embedding.weight[ids] + model.positions[0])[:length]
        for layer in model.encoder.layers:
            attention = layer.self_attn
            z = layer_norm(x, (8,), layer.norm1.weight, layer.norm1.bias, 1e-5)
            q, k, v = (z @ attention.in_proj_weight.T + attention.in_proj_bias).chunk(3, dim=1)
            heads = [
                softmax(q[:, of] @ k[:, of].T / 2, dim=1) @ v[:, of]  # 4 numbers a head, root 2
                for of in (slice(0, 4), slice(4, 8))
            ]
            x = x + layer.self_attn.out_proj(torch.cat(heads, 1))
            z = layer_norm(x, (8,), layer.norm2.weight, layer.norm2.bias, 1e-5)
            x = x + layer.linear2(gelu(layer.linear1(z)))
        pooled = layer_norm(x, (8,), model.norm.weight, model.norm.bias, 1e-6).mean(0)
        assert torch.allclose(ours, model.head.weight @ pooled + model.head.bias, atol=1e-10)


def blocks_of(model):
    return sum(parameter.numel() for name, parameter in model.named_parameters() if name.startswith(("bl", "enc")))


@pytest.mark.parametrize("kind", [TextMixerSection, TextTransformerSection])
@pytest.mark.parametrize("budget", [5_000, 123_456])
def test_budget_makes_the_blocks_as_wide_as_fits(kind, budget):
    name = "text_mixer" if kind is TextMixerSection else "text_transformer"
    norms = ["layer", "none"] if kind is TextMixerSection else [None]
    for norm in norms:
        section = kind(kind=name, budget=budget, **SHAPE, **({"norm": norm} if norm else {}))
        assert blocks_of(build_model(section, 0, 3)) == section.weights(section.width) <= budget
        assert section.weights(section.width + section.width_multiple) > budget
        layers = 1 if norm is None else 2
        assert section.depth_to_width() == pytest.approx(layers * 2 / math.log2(section.width))


@pytest.mark.parametrize("name", ["mixer", "transformer"])
def test_a_budget_may_be_met_exactly(name):
    given = SECTIONS[name]
    for width in (16, 24, 56):
        section = given.model_copy(update={"channels": None, "budget": given.weights(width)})
        assert section.width == width
    narrowest = given.model_dump() | {"channels": None, "budget": given.weights(given.width_multiple)}
    assert type(given)(**narrowest).width == given.width_multiple
    with pytest.raises(ValueError, match="the narrowest of depth 2 has"):
        type(given)(**narrowest | {"budget": narrowest["budget"] - 1})


def test_widths_and_budgets_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="either channels or budget"):
        TextMixerSection(kind="text_mixer", **SHAPE)
    with pytest.raises(ValueError, match="the narrowest of depth 2 has"):
        TextMixerSection(kind="text_mixer", budget=10, **SHAPE)
    with pytest.raises(ValueError, match="either channels or budget"):
        TextMixerSection(kind="text_mixer", channels=8, budget=50_000, **SHAPE)
    with pytest.raises(ValueError, match="heads 4 does not divide channels 6"):
        TextTransformerSection(kind="text_transformer", channels=6, **SHAPE)


def test_prepared_pairs_must_fit_the_tokens_and_the_vocabulary():
    for section in (MIXER, SECTIONS["transformer"]):
        section.check_text(Path("pairs"), 9, 20)
        with pytest.raises(InputError, match=r"^model\.tokens 9: pairs in pairs have up to 10 tokens; .*--length 9"):
            section.check_text(Path("pairs"), 10, 20)
        with pytest.raises(InputError, match=r"^model\.vocabulary 20: the tokenizer\.json .* has 21 words"):
            section.check_text(Path("pairs"), 9, 21)
        assert section.input_shape(224) == (9,)


def test_text_networks_are_named_in_the_papers_letters():
    names = [section.summary() for section in SECTIONS.values()]
    assert names == [
        "Mixer, T 9, d 8, L 2",
        "RP Mixer, T 9, d 8, L 2",
        "Mixer, T 9, d 8, L 2, sigma_2",
        "transformer, T 9, d 8, L 2",
    ]
    assert MIXER.model_copy(update={"activation": "gelu_tanh"}).summary() == names[0]


def test_embeddings_start_small_and_padding_at_zero():
    section = MIXER.model_copy(update={"vocabulary": 3000})
    torch.manual_seed(0)
    weight = build_model(section, 0, 3).embedding.weight
    assert weight[PAD + 1 :].std().item() == pytest.approx(0.02, rel=0.02)
    assert not weight[PAD].any()
    encoder = build_model(SECTIONS["transformer"].model_copy(update={"channels": 64, "depth": 3}), 0, 3)
    first, *others = [weight for name, weight in encoder.named_parameters() if name.endswith("in_proj_weight")]
    assert len(others) == 2
    for weight in (first, *others):
        assert weight.std().item() == pytest.approx(64**-0.5, rel=0.03)
    assert not torch.equal(first, others[0])
    assert encoder.positions.std().item() == pytest.approx(0.02, rel=0.15)
    assert not build_model(MIXER, 0, 3).head.weight.any()


@pytest.mark.long
@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_text_models_compile_and_change_heads(section):
    model = build(section)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(PADDED), model(PADDED), atol=1e-10)
    features = model.forward_head(model.forward_features(PADDED), pre_logits=True)
    model.reset_classifier(0)
    assert torch.equal(model(PADDED), features)
