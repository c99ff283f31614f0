"""Layer costs of SW-MLPs."""

from itertools import pairwise

import numpy as np

from pipeline.models.layer_costs import LayerCost, NetworkCost, NormCost
from pipeline.models.sw_mlp.network import row_counts
from pipeline.models.sw_mlp.section import SwMlpSection


def sw_mlp_costs(section: SwMlpSection, image_size: int, num_classes: int) -> NetworkCost:
    """Every layer, stem to head; the masks' nonzeros are drawn as the network draws them."""
    width = section.width
    widths = (width, width) if section.expansion is None else (width, section.hidden_width, width)
    layers = [LayerCost(1, 3 * image_size**2, width, mixes=False, input_gradient=False)]
    for block in range(section.depth):
        for number, (inputs, outputs) in enumerate(pairwise(widths)):
            generator = np.random.default_rng((section.mask_seed, block, number))
            nonzero = int(row_counts(outputs, inputs, section.density, generator).sum())
            layers.append(LayerCost(1, inputs, outputs, nonzero, activated=number == 0))
    layers.append(LayerCost(1, width, num_classes, mixes=False))
    norms = [NormCost(1, width)] * (section.depth + 1)
    return NetworkCost(layers, norms, width=width, gamma=section.expansion or 1.0)
