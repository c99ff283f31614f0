"""Layer costs of S-FC and S-LOCAL."""

from widemix.models.lasso.network import HIDDEN, KERNEL, count_positions
from widemix.models.lasso.section import LassoSection
from widemix.models.layer_costs import LayerCost, NetworkCost, NormCost


def lasso_costs(section: LassoSection, image_size: int, num_classes: int) -> NetworkCost:
    """Every layer, stem to head."""
    positions, width = count_positions(image_size), HIDDEN * section.base_channels
    first = positions * section.base_channels
    if section.kind == "s_fc":
        opening = LayerCost(1, 3 * image_size**2, first, bias=False, input_gradient=False)
    else:
        opening = LayerCost(
            positions, 3 * KERNEL**2, section.base_channels, matrices=positions, bias=False, input_gradient=False
        )
    layers = [
        opening,
        LayerCost(1, first, width, bias=False),
        LayerCost(1, width, num_classes, mixes=False),
    ]
    norms = [NormCost(1, first, statistics=0), NormCost(1, width, statistics=0)]
    return NetworkCost(layers, norms, width=first, gamma=1.0)
