"""timm's networks by their names, with errors that name the recipe's key."""

import functools
from collections.abc import Callable
from typing import Any

import timm
import torch

from widemix.errors import InputError
from widemix.models.timm_networks.names import unknown_name


def create_timm_model(name: str, num_classes: int, **arguments) -> torch.nn.Module:
    """Return timm's network of that name; `InputError` if there is none, or if it does not take the arguments.

    img_size: of the images, in pixels; a network without such an argument, as convolutional ones, is tried with them.
    """
    if not timm.is_model(name):
        raise InputError(f"model.name {name}: {unknown_name(name, timm.list_models())}")
    taken = without_untaken(name, arguments)
    make = functools.partial(timm.create_model, name, num_classes=num_classes, **taken)
    try:
        network = make()
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        given = ", ".join(f"{key} {value}" for key, value in taken.items())
        raise InputError(f"model.name {name}: timm's network is not made with {given} ({error})") from None
    side = arguments["img_size"]
    if "img_size" not in taken and side < published(name, "input_size")[-1]:
        _try_images(make, name, side)
    return network


def _try_images(make: Callable[[], torch.nn.Module], name: str, side: int) -> None:
    """`InputError` if a network has layers for which images of so many pixels are too small."""
    try:
        with torch.device("meta"):
            make().eval()(torch.zeros(1, 3, side, side))
    except NotImplementedError:
        return  # it computes with what has no values there
    except RuntimeError as error:
        raise InputError(
            f"model.name {name}: timm's network does not take images of {side} pixels ({error}); "
            "give a larger data.image_size"
        ) from None


def published(name: str, what: str) -> Any:
    """What timm says of a network's published weights, such as `input_size`; of its earlier names too."""
    try:
        return timm.get_pretrained_cfg_value(name, what)
    except RuntimeError:
        with torch.device("meta"):
            network: Any = timm.create_model(name)
        return network.pretrained_cfg.get(what)


def without_untaken(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without what timm's network is not made with: a size of image, and stochastic depth of 0."""
    droppable = {"img_size"} | ({"drop_path_rate"} if not arguments.get("drop_path_rate") else set())
    return {key: value for key, value in arguments.items() if key not in droppable or _takes(name, key)}


@functools.cache
def _takes(name: str, argument: str) -> bool:
    """Whether timm's network takes an argument; convolutional networks take any image, and no `img_size`."""
    if not timm.is_model(name):
        return True
    value: Any = published(name, "input_size")[-1] if argument == "img_size" else 0.0
    try:
        with torch.device("meta"):
            timm.create_model(name, **{argument: value})
    except TypeError as error:
        return argument not in str(error)
    return True
