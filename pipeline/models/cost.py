"""What a network costs, by formula: no tensor is made. Exact against counted modules and PyTorch's FLOP counter.

FLOPs are two a multiply-add, of products alone (norms, activations and permutations are left out), as
`torch.utils.flop_counter` counts them.
"""

from dataclasses import dataclass

from pipeline.errors import InputError
from pipeline.models.describe import describe
from pipeline.models.layers import Dense, Norm
from pipeline.recipe.family import Family
from pipeline.recipe.relatives import TimmSection

FLOAT = 4  # bytes


@dataclass(frozen=True)
class ModelCost:
    """The cost of a network. Effective quantities are of the wide, sparse MLP that it is."""

    parameters: int
    connections: int  # nonzero entries of all effective mixing matrices (stem, skip W and head left out)
    omega: float  # Omega, mean connections of a mixing layer (equation 14)
    gamma: float  # expansion; of a Mixer the one that gives this Omega at its S and C: Omega / (m (S + C) / 2)
    width: int  # m, effective width of the features: S*C of a Mixer
    hidden_width: float  # gamma * m, effective width of the hidden features
    density: float  # p, nonzero share of the effective mixing matrices
    forward_flops: int  # a picture
    training_flops: int  # a picture, forward and backward
    activation_bytes: (
        int  # a picture, in fp32: what PyTorch keeps for the backward pass; GELU and LN keep their inputs
    )


def model_cost(section: Family, image_size: int, num_classes: int) -> ModelCost:
    """The cost of `build_model(section, image_size, num_classes)` on 3-channel pictures, without building it."""
    if isinstance(section, TimmSection):
        raise InputError(f"cost: {section.name} is timm's, and there is no formula for it here")
    network = describe(section, image_size, num_classes)
    mixing = [layer for layer in network.layers if layer.mixes]
    connections = sum(layer.connections for layer in mixing)
    omega = connections / len(mixing)
    gamma = network.gamma
    if gamma is None:
        gamma = 2 * omega / (network.width * (network.tokens + network.channels))
    parts: list[Dense | Norm] = [*network.layers, *network.norms]
    forward = sum(2 * layer.connections for layer in network.layers) + network.extra_forward
    backward = (
        sum(2 * layer.connections * layer.backward_products for layer in network.layers) + network.extra_backward
    )
    return ModelCost(
        parameters=sum(part.parameters for part in parts) + network.extra_parameters,
        connections=connections,
        omega=omega,
        gamma=gamma,
        width=network.width,
        hidden_width=gamma * network.width,
        density=connections / sum(layer.entries for layer in mixing),
        forward_flops=forward,
        training_flops=forward + backward,
        activation_bytes=FLOAT * (sum(part.kept for part in parts) + network.extra_kept),
    )
