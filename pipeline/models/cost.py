"""What a network costs, by formula: no tensor is made. Exact against counted modules and PyTorch's FLOP counter.

FLOPs are two a multiply-add, of products alone (norms, activations and permutations are left out), as
`torch.utils.flop_counter` counts them. timm's own networks have no formula here and are counted without memory.
"""

import math
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.models.describe import describe
from pipeline.models.layers import Dense, Norm
from pipeline.models.registry import build_model
from pipeline.recipe.family import Family
from pipeline.recipe.relatives import TimmSection

FLOAT = 4  # bytes


@dataclass(frozen=True)
class ModelCost:
    """The cost of a network, per picture or sentence pair where that makes sense.

    Effective quantities are of the wide, sparse MLP that the network is; of timm's networks they are nan.
    `activation_bytes` is what PyTorch keeps for the backward pass in fp32: GELU and LayerNorm keep their inputs.
    Dense copies of masked weights (`sparse.multiplies_sparsely`) come on top, once a step.
    """

    parameters: int
    connections: float  # nonzero entries of all effective mixing matrices (stem, skip W and head left out)
    omega: float  # Omega, mean connections of a mixing layer (equation 14)
    gamma: float  # expansion; of a Mixer the one that gives this Omega at its S and C: Omega / (m (S + C) / 2)
    width: float  # m, effective width of the features: S*C of a Mixer
    hidden_width: float  # gamma * m, effective width of the hidden features
    density: float  # p, nonzero share of the effective mixing matrices
    forward_flops: int
    training_flops: int  # forward and backward
    activation_bytes: int


def model_cost(section: Family, image_size: int, num_classes: int) -> ModelCost:
    """The cost of `build_model(section, image_size, num_classes)` on 3-channel pictures, without building it."""
    if isinstance(section, TimmSection):
        return count(section, image_size, num_classes)
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


def count(section: TimmSection, image_size: int, num_classes: int) -> ModelCost:
    """The same of a network without a formula, by a step on PyTorch's meta device for one picture and for two."""
    with torch.device("meta"):
        model = build_model(section, image_size, num_classes)
    one, two = (_step(model, torch.empty(batch, 3, image_size, image_size, device="meta")) for batch in (1, 2))
    forward, training, kept = (more - less for more, less in zip(two, one, strict=True))
    return ModelCost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        connections=math.nan,
        omega=math.nan,
        gamma=math.nan,
        width=math.nan,
        hidden_width=math.nan,
        density=math.nan,
        forward_flops=forward,
        training_flops=training,
        activation_bytes=kept,
    )


def _step(model: torch.nn.Module, pictures: torch.Tensor) -> tuple[int, int, int]:
    """FLOPs of a forward pass, of it and the backward pass, and bytes kept between them."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(pictures)
        forward = counter.get_total_flops()
        logits.sum().backward()
    return forward, counter.get_total_flops(), sum(storage.nbytes() for storage in storages.values())
