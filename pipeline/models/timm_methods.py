"""Methods that timm's networks have, and somebody else's may lack."""

from collections.abc import Callable
from typing import Any

from torch import nn

from widemix.errors import InputError


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
