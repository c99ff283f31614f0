"""Layer costs of RepMLPs."""

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, patch_layer
from widemix.models.repmlp.section import RepMlpSection


def repmlp_costs(section: RepMlpSection, image_size: int, num_classes: int) -> NetworkCost:
    """Every layer of the training form, stem to head.

    The convolutions in parallel to the mixing do not count as connections: `RepMlp.fused` folds them into it.
    """
    channels, tokens, sets = section.channels, (image_size // section.patch_size) ** 2, section.share_sets
    hidden = round(section.expansion * channels)
    of_set = NormCost(channels * tokens // sets, sets, statistics=0)
    block = [LayerCost(1, channels, channels // 4, mixes=False), LayerCost(1, channels // 4, channels, mixes=False)]
    block += [LayerCost(channels, tokens, tokens, matrices=sets, bias=False)]
    entries = channels * tokens
    block += [
        LayerCost(entries, side**2, 1, matrices=sets, bias=False, mixes=False, saves_input=False)
        for side in section.kernels
    ]
    block += [LayerCost(tokens, channels, hidden, bias=False), LayerCost(tokens, hidden, channels, bias=False)]
    norms = [of_set] * (1 + len(section.kernels))
    norms += [NormCost(tokens, width, statistics=0) for width in (channels, channels, hidden, channels)]
    stem = patch_layer(image_size, section.patch_size, section.channels)
    head = LayerCost(1, channels, num_classes, mixes=False)
    return NetworkCost(
        [stem, *block * section.depth, head],
        [*norms * section.depth, NormCost(tokens, channels)],
        width=entries,
        extra_saved=section.depth * (entries + channels + tokens * hidden),  # what gate and GELU multiply
        tokens=tokens,
        channels=channels,
    )
