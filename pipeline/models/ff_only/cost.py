"""Layer costs of FF-only."""

from widemix.models.ff_only.section import FfOnlySection
from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, mlp_layers, patch_layer


def ff_only_costs(section: FfOnlySection, image_size: int, num_classes: int) -> NetworkCost:
    """Every layer, stem to head."""
    channels = section.channels
    patches = (image_size // section.patch_size) ** 2
    tokens = patches + 1  # the class token
    layers = [patch_layer(image_size, section.patch_size, section.channels)]
    for _ in range(section.depth):
        layers += mlp_layers(tokens, channels, round(section.expansion * channels), channels)
        layers += mlp_layers(channels, tokens, round(section.expansion * tokens), tokens)
    norms = [NormCost(tokens, channels), NormCost(channels, tokens)] * section.depth + [NormCost(tokens, channels)]
    return NetworkCost(
        [*layers, LayerCost(1, channels, num_classes, mixes=False)],
        norms,
        width=tokens * channels,
        extra_parameters=channels + tokens * channels,
        extra_saved=patches * channels,  # the head's input is a view of the last norm's output
        tokens=tokens,
        channels=channels,
    )
