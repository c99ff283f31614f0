"""From a recipe's model section to a network, and methods that timm's networks have and somebody else's may lack."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from widemix.errors import InputError
from widemix.models.drop_path import raise_linearly
from widemix.models.section import ModelSection


def build_model(section: ModelSection, image_size: int, num_classes: int) -> torch.nn.Module:
    """Return the section's network: float images [B, 3, image_size, image_size] -> logits [B, num_classes].

    Text models take int64 token ids [B, T or fewer] instead, and ignore `image_size`. `InputError` without classes.
    """
    if num_classes < 1:
        raise InputError("data.num_classes 0: is that of a prepared folder, which is not read here; give the number")
    return make_network(section, image_size, num_classes)


def make_network(section: ModelSection, image_size: int, num_classes: int, **timm: Any) -> torch.nn.Module:
    """Return `build_model`'s network with arguments of timm's; 0 classes leave the head out."""
    try:
        network = section.build(image_size, num_classes, **timm)
    except (MemoryError, OverflowError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in ("allocate", "overflow")):
            raise
        raise InputError(
            f"model: a {section.kind} with these sizes does not fit into memory; take smaller ones"
        ) from None
    tensors = (*network.named_parameters(), *network.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise InputError(f"model: {lazy[0]} of a {section.kind} has no shape yet; give its layer the sizes")
    if getattr(section, "drop_path_rises", False):
        raise_linearly(list(network.get_submodule("blocks").children()))
    return network


def build_on_meta(section: ModelSection, image_size: int, num_classes: int) -> torch.nn.Module:
    """Return the network of `build_model` on the meta device, without weights; with them if it must be a real one."""
    try:
        with torch.device("meta"):
            network = build_model(section, image_size, num_classes)
    except (RuntimeError, ValueError):  # it computes with what is on the meta device; its own errors come again below
        return build_model(section, image_size, num_classes)
    held = (value for part in network.modules() for value in vars(part).values())
    if any(isinstance(value, torch.Tensor) for value in held):  # it would stay there
        return build_model(section, image_size, num_classes)
    return network


def empty_inputs(section: ModelSection, batch: int, image_size: int) -> torch.Tensor:
    """Return zeros of the shape and type of the network's inputs: float32 [batch, 3, H, W] or int64 [batch, T]."""
    dtype = torch.long if section.takes == "text" else torch.float32
    return torch.zeros(batch, *section.input_shape(image_size), dtype=dtype)


def timm_method(module: nn.Module, name: str, key: str) -> Callable[..., Any]:
    """Return the network's method; `InputError` that names the recipe's key that needs it where there is none."""
    method = getattr(module, name, None)
    if method is None:
        raise InputError(f"{key}: needs the method {name} of timm's networks; define it in {type(module).__name__}")
    return method


def classifier(module: nn.Module, key: str) -> nn.Module:
    """The network's head; of several, as distilled networks have, a list. `InputError` as from `timm_method`."""
    head = timm_method(module, "get_classifier", key)()
    return nn.ModuleList(head) if isinstance(head, tuple) else head
