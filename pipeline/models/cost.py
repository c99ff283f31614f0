"""The cost of a network. By formula no tensor is made; tests hold it to counted modules and PyTorch's FLOP counter.

FLOPs are two per multiply-add, of products alone (norms, activations and permutations do not count), as
`torch.utils.flop_counter` counts them. Networks without a formula, such as timm's, are counted on the meta device.
"""

import math
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from widemix.errors import InputError
from widemix.models.layer_costs import LayerCost, NormCost
from widemix.models.registry import build_model, empty_inputs
from widemix.models.section import ModelSection

FLOAT = 4  # bytes


@dataclass(frozen=True)
class ModelCost:
    """The cost of a network; FLOPs and activations are per sample (an image or a sentence pair).

    Connections, Omega and widths are those of the network as a wide, sparse MLP; nan where no formula gives them.
    `activation_bytes` is what PyTorch saves for the backward pass in fp32: GELU and LayerNorm save their inputs.
    FLOPs are those of a GPU, which multiplies masked weights by dense copies up to a limit
    (`sw_mlp.sparse.multiplies_sparsely`).
    """

    parameters: int
    connections: float  # nonzero entries of all effective mixing matrices (stem, skip W and head left out)
    omega: float  # Omega, mean connections of a mixing layer (equation 14)
    gamma: float  # expansion; of a Mixer with D_S and D_C the one that gives this Omega: Omega / (m (S + C) / 2)
    width: float  # m, effective width of the features: S*C in a Mixer
    hidden_width: float  # gamma * m
    max_width: float  # of the widest output of a mixing layer: max(S D_C, C D_S) in a Mixer, as table 1 counts it
    density: float  # p, fraction of nonzero entries of the effective mixing matrices
    forward_flops: int
    training_flops: int  # forward and backward
    activation_bytes: int
    dense_bytes: int = 0  # of the dense copies of masked weights, fp32, once a step


def model_cost(section: ModelSection, image_size: int, num_classes: int) -> ModelCost:
    """Return the cost of `build_model(section, image_size, num_classes)`, by formula or else counted."""
    network = section.layer_costs(image_size, num_classes)
    if network is None:
        return count(section, image_size, num_classes)
    mixing = [layer for layer in network.layers if layer.mixes]
    connections = sum(layer.connections for layer in mixing)
    omega = connections / len(mixing)
    gamma = network.gamma
    if gamma is None:
        gamma = 2 * omega / (network.width * (network.tokens + network.channels))
    parts: list[LayerCost | NormCost] = [*network.layers, *network.norms]
    forward = sum(2 * layer.multiply_adds for layer in network.layers) + network.extra_forward
    backward = (
        sum(2 * layer.multiply_adds * layer.backward_products for layer in network.layers) + network.extra_backward
    )
    return ModelCost(
        parameters=sum(part.parameters for part in parts) + network.extra_parameters,
        connections=connections,
        omega=omega,
        gamma=gamma,
        width=network.width,
        hidden_width=gamma * network.width,
        max_width=max(layer.rows * layer.outputs for layer in mixing),
        density=connections / sum(layer.entries for layer in mixing),
        forward_flops=forward,
        training_flops=forward + backward,
        activation_bytes=FLOAT * (sum(part.saved for part in parts) + network.extra_saved),
        dense_bytes=FLOAT * sum(layer.dense_copy for layer in network.layers),
    )


def count(section: ModelSection, image_size: int, num_classes: int) -> ModelCost:
    """Return the cost without a formula: that of a step on PyTorch's meta device on three samples less that on two.

    `InputError` if the network does not work there.
    """
    try:
        with torch.device("meta"):
            model = build_model(section, image_size, num_classes)
            two, three = (_step(model, empty_inputs(section, batch, image_size)) for batch in (2, 3))
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"model.kind {section.kind}: cannot be counted on the meta device ({reason}); define layer_costs"
        ) from None
    forward, training, saved = (more - less for more, less in zip(three, two, strict=True))
    return ModelCost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        connections=math.nan,
        omega=math.nan,
        gamma=math.nan,
        width=math.nan,
        hidden_width=math.nan,
        max_width=math.nan,
        density=math.nan,
        forward_flops=forward,
        training_flops=training,
        activation_bytes=saved,
    )


def _step(model: torch.nn.Module, inputs: torch.Tensor) -> tuple[int, int, int]:
    """FLOPs of a forward pass, FLOPs of it and the backward pass, and bytes saved between them."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(inputs)
        forward = counter.get_total_flops()
        logits.sum().backward()
    return forward, counter.get_total_flops(), sum(storage.nbytes() for storage in storages.values())
