"""Layer costs of SW-MLPs."""

import numpy as np
import torch

from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost, patch_layer
from widemix.models.sw_mlp.section import SwMlpSection
from widemix.models.sw_mlp.sparse import multiplies_sparsely, row_counts


def sw_mlp_costs(section: SwMlpSection, image_size: int, num_classes: int) -> NetworkCost:
    """Every layer, stem to head, multiplied as on a GPU; the masks' nonzeros are sampled as by the network."""
    width, hidden = section.width, section.hidden_width
    channels = section.patch_channels(image_size)
    embedded = (image_size // section.patch_size) ** 2 * channels

    def masked(block: int, number: int, inputs: int, outputs: int, **options: bool) -> LayerCost:
        generator = np.random.default_rng((section.mask_seed, block, number))
        nonzero = int(row_counts(outputs, inputs, section.density, generator).sum())
        dense = not multiplies_sparsely(torch.device("cuda"), section.density, inputs * outputs)
        return LayerCost(1, inputs, outputs, nonzero, multiplied_dense=dense, **options)

    layers = [patch_layer(image_size, section.patch_size, channels)]
    norms = []
    if section.project_tokens:
        layers.append(masked(0, 2, embedded, width, bias=False, mixes=False, saves_input=False))  # the norm saves it
        norms.append(NormCost(1, width))
    for block in range(section.depth):
        inputs = width if block else embedded
        norms.append(NormCost(1, inputs))
        layers.append(masked(block, 0, inputs, hidden, activated=True))
        if section.expansion is not None:
            layers.append(masked(block, 1, hidden, width, activated=section.outer_activation))
    tokens = width // channels if section.pool else 1
    norms.append(NormCost(tokens, width // tokens))
    layers.append(LayerCost(1, width // tokens, num_classes, mixes=False))
    return NetworkCost(layers, norms, width=width, gamma=section.expansion or 1.0)
