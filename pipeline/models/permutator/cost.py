"""Layer costs of Vision Permutators."""

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, mlp_layers, patch_layer
from widemix.models.permutator.section import PermutatorSection


def permutator_costs(section: PermutatorSection, image_size: int, num_classes: int) -> NetworkCost:
    """Every layer, stem to head."""
    channels, tokens = section.channels, (image_size // section.patch_size) ** 2
    block = [LayerCost(tokens, channels, channels, bias=False)] * 3
    block += [LayerCost(1, channels, channels // 4, mixes=False, activated=True)]
    block += [LayerCost(1, channels // 4, 3 * channels, mixes=False), LayerCost(tokens, channels, channels)]
    block += mlp_layers(tokens, channels, round(section.expansion * channels), channels)
    stem = patch_layer(image_size, section.patch_size, section.channels)
    head = LayerCost(1, channels, num_classes, mixes=False)
    return NetworkCost(
        [stem, *block * section.depth, head],
        [NormCost(tokens, channels)] * (2 * section.depth + 1),
        width=tokens * channels,
        extra_saved=section.depth * (3 * tokens * channels + 3 * channels),  # the three branches and their weights
        tokens=tokens,
        channels=channels,
    )
