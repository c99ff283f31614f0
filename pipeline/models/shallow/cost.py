"""Layer costs of shallow MLPs of structured matrices."""

from dataclasses import replace

from widemix.models.layer_costs import LayerCost, NetworkCost
from widemix.models.shallow.network import Matrix, split
from widemix.models.shallow.section import ShallowSection


def shallow_costs(section: ShallowSection, image_size: int, num_classes: int) -> NetworkCost:
    """Every layer, stem to head."""
    pixels, width = (1 if section.grayscale else 3) * image_size**2, section.width
    first = _matrix(section.matrices, pixels, width)
    first[0] = replace(first[0], input_gradient=False)
    layers = [*first, *_matrix(section.matrices, width, width), LayerCost(1, width, num_classes, mixes=False)]
    unread = 2 * image_size**2 if section.grayscale else 0  # the image is saved with all its channels
    return NetworkCost(layers, [], width=width, gamma=1.0, extra_saved=unread)


def _matrix(kind: Matrix, inputs: int, outputs: int) -> list[LayerCost]:
    """The factors of a matrix without bias."""
    if kind == "dense":
        return [LayerCost(1, inputs, outputs, bias=False)]
    (rows, columns), (out_rows, out_columns) = split(inputs), split(outputs)
    shared = kind == "kronecker"
    return [
        LayerCost(rows, columns, out_columns, matrices=1 if shared else rows, bias=False),
        LayerCost(out_columns, rows, out_rows, matrices=1 if shared else out_columns, bias=False),
    ]
