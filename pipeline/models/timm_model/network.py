"""Networks of timm, with errors that name the recipe's key."""

import difflib
import functools
from typing import Any

import timm
import torch

from widemix.errors import InputError


def create_timm_model(name: str, num_classes: int, **arguments) -> torch.nn.Module:
    """Return timm's network of that name; `InputError` if there is none or it does not take the arguments."""
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=1)
        raise InputError(
            f"model.name: timm has no network called {name}" + (f"; did you mean {close[0]}?" if close else "")
        )
    if not takes_image_size(name):
        arguments.pop("img_size", None)
    try:
        return timm.create_model(name, num_classes=num_classes, **arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        given = ", ".join(f"{key} {value}" for key, value in arguments.items())
        raise InputError(f"model.name {name}: timm's network is not made with {given} ({error})") from None


@functools.cache
def takes_image_size(name: str) -> bool:
    """Whether timm's network is made for one size of image, `img_size`; convolutional networks take any."""
    if not timm.is_model(name):
        return True
    size: Any = timm.get_pretrained_cfg_value(name, "input_size")
    try:
        with torch.device("meta"):
            timm.create_model(name, img_size=size[-1])
    except TypeError as error:
        return "img_size" not in str(error)
    return True
