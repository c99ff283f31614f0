"""Layer costs of Mixers."""

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, mlp_layers, patch_layer
from widemix.models.mixer.section import MixerSection


def mixer_costs(section: MixerSection, image_size: int, num_classes: int) -> NetworkCost:
    """Every layer, stem to head."""
    tokens, channels = section.tokens, section.channels
    own_tokens = (image_size // section.patch_size) ** 2
    token_hidden, channel_hidden = section.hidden_widths
    layers = [patch_layer(image_size, section.patch_size, section.channels)]
    norms = [NormCost(own_tokens, channels)] + [NormCost(tokens, channels)] * (2 * section.depth)
    if section.project_tokens:
        # The skip's input is saved already: by the norm before the token mixing, or by an unpermuted token mixing.
        permuted = section.permutation == "random" and section.permuted_mixings != "channel"
        permuted = permuted and (section.permuted_blocks is None or 0 in section.permuted_blocks)
        own_copy = section.norm == "none" and permuted
        layers.append(LayerCost(channels, own_tokens, tokens, bias=False, mixes=False, saves_input=own_copy))
        norms.append(NormCost(tokens, channels))
    for block in range(section.depth):
        inputs = own_tokens if block == 0 else tokens
        layers += mlp_layers(channels, inputs, token_hidden, tokens, section.token_groups)
        layers += mlp_layers(tokens, channels, channel_hidden, channels)
    layers.append(LayerCost(1, channels, num_classes, mixes=False))
    if section.norm == "none":
        norms = []
    # Not the gamma that gives Omega where the section states it: a first token mixing of S0 tokens shifts that.
    gamma = 1.0 if section.kind == "s_mixer" else section.expansion
    return NetworkCost(layers, norms, width=tokens * channels, gamma=gamma, tokens=tokens, channels=channels)
