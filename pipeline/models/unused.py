"""Which of a network's parameters its outputs do not depend on."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call


def unused_parameters(module: nn.Module, inputs: Tensor) -> set[str]:
    """Names of the parameters that have no part in what `module` computes of `inputs` in training.

    It is computed on the meta device, without numbers, or with them where the network needs them. `module`, and
    torch's generators of random numbers, stay as they are.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    trained = module.training
    module.train()
    try:
        with torch.random.fork_rng():
            try:
                return _unreached(module, _on_meta(parameters), _on_meta(buffers), inputs.to("meta"))
            except (RuntimeError, ValueError):  # it looks at numbers, or has tensors that are no parameters
                copies = {name: buffer.clone() for name, buffer in buffers.items()}
                return _unreached(module, parameters, copies, inputs)
    finally:
        module.train(trained)


def _on_meta(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}


def _unreached(
    module: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor
) -> set[str]:
    with torch.enable_grad():
        output = functional_call(module, {**parameters, **buffers}, (inputs,))
    nodes, reached = [output.grad_fn], set()
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        reached.add(id(getattr(node, "variable", None)))
        following = {parent for parent, _ in getattr(node, "next_functions", ())} - seen - {None}
        seen |= following
        nodes += following
    return {name for name, tensor in parameters.items() if tensor.requires_grad and id(tensor) not in reached}
