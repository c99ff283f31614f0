"""Layer costs of the text models."""

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, mlp_layers
from widemix.models.section import hidden_width
from widemix.models.text.section import TextMixerSection, TextTransformerSection


def text_mixer_costs(section: TextMixerSection, num_classes: int) -> NetworkCost:
    """Every layer, embedding to head."""
    tokens, width = section.tokens, section.width
    block = mlp_layers(width, tokens, hidden_width(section.expansion, tokens), tokens)
    block += mlp_layers(tokens, width, hidden_width(section.expansion, width), width)
    norms = [NormCost(tokens, width)] * (2 * section.depth + 1) if section.norm == "layer" else []
    return NetworkCost(
        [*block * section.depth, LayerCost(1, width, num_classes, mixes=False)],
        norms,
        width=tokens * width,
        extra_parameters=section.vocabulary * width,
        extra_saved=4 * tokens,  # 64-bit ids, the mask, weights of the mean
        tokens=tokens,
        channels=width,
    )


def text_transformer_costs(section: TextTransformerSection, num_classes: int) -> NetworkCost:
    """Every layer, embedding to head, with PyTorch's flash attention.

    The backward pass of that takes two and a half times the products of the forward pass.
    """
    tokens, width, depth = section.tokens, section.width, section.depth
    block = [LayerCost(tokens, width, 3 * width), LayerCost(tokens, width, width)]
    block += mlp_layers(tokens, width, hidden_width(section.expansion, width), width)
    of_attention = 3 * tokens * width + 2 * section.heads * tokens  # queries, keys, values, log-sums, the mask
    return NetworkCost(
        [*block * depth, LayerCost(1, width, num_classes, mixes=False)],
        [NormCost(tokens, width)] * (2 * depth + 1),
        width=tokens * width,
        extra_parameters=(section.vocabulary + tokens) * width,
        extra_saved=3 * tokens + depth * of_attention,
        extra_forward=4 * depth * tokens**2 * width,
        extra_backward=10 * depth * tokens**2 * width,
        tokens=tokens,
        channels=width,
    )
