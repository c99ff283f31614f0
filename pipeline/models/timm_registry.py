"""All families' names in timm's registry: importing this module puts them there, for `timm.create_model`.

`import widemix` sees to it (`widemix.timm_import`), and those of a family that is registered later join them. Nothing
here imports a network before one is made, since networks import timm.
"""

import socket
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext
from difflib import get_close_matches
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import timm
import torch
from huggingface_hub import constants
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from widemix.errors import InputError
from widemix.models.families import WATCHERS, sections
from widemix.models.section import ModelSection

default_cfgs: dict[str, Any] = {}  # timm looks for it under this name


def _register(section: type[ModelSection]) -> None:
    """Put the names of a family into timm's registry, but for those that it has."""
    published = section.named()
    for name, (network, side) in published.items():
        _add_named(name, network, side)
    if published and section.timm_architecture:  # of the first one's sizes where it is given no others
        _add_named(section.timm_architecture, *next(iter(published.values())))
    for kind in section.timm_kinds():
        if timm.is_model(kind) and kind not in default_cfgs:
            raise InputError(f"model.kind {kind}: is the name of one of timm's networks; rename the kind")
        _add_unsized(kind, partial(_network, section, {"kind": kind}), {"num_classes": 1000})
    if text := section.default_text():
        reads = {"num_classes": 3, "first_conv": text.first_layer(), "classifier": text.classifier()}
        _add_unsized(text.kind, partial(_network, section, text.model_dump()), reads, ("img_size",))


def load_pretrained(name: str, given: str) -> torch.nn.Module:
    """Make one of timm's networks, or an export, with its weights; `InputError`, which begins with `given`."""
    host = urlsplit(constants.ENDPOINT).hostname or ""
    reached = name.startswith("local-dir:") or _has_address(host)
    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE or not reached
    try:
        return timm.create_model(name, pretrained=True)
    except Exception as error:  # huggingface_hub raises errors of many kinds where there is no network
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        close = get_close_matches(name, timm.list_models(), n=1) if reason.startswith("Unknown model") else []
        cure = f"; did you mean timm:{close[0]}?" if close else ""
        if constants.HF_HUB_OFFLINE and not reason.startswith("Unknown model"):
            reason = f"{host} can't be reached, and {constants.HF_HUB_CACHE} does not have it"
            cure = "; load it where there is a network and copy that folder" + (
                ", or give --train.init_from a file of weights" if "init_from" in given else ""
            )
        raise InputError(f"{given}: cannot be loaded ({reason}){cure}") from None
    finally:
        constants.HF_HUB_OFFLINE = offline


def _has_address(host: str) -> bool:
    """Whether a server may be there: the Hub's client asks it five times in a minute where it has no address."""
    if any(urllib.request.getproxies().get(kind) for kind in ("https", "all")):
        return True
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


def is_stock(name: str) -> bool:
    """Whether timm has an architecture of this name without us or a plug-in."""
    return timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith("timm.")


def _add_named(name: str, section: ModelSection, side: int) -> None:
    """Add a published network, for images of `side` pixels. What timm names itself keeps timm's network."""

    def build(pretrained: bool = False, **kwargs) -> torch.nn.Module:
        if kwargs.get("features_only") and not section.has_feature_maps:
            raise InputError(f"{name}: its features are not a map; leave features_only out")
        last = min(3, kwargs.get("depth", getattr(section, "depth", 1)))
        feature_cfg = {"out_indices": kwargs.pop("out_indices", last), "feature_cls": "getter"}
        return _build(network, name, pretrained, feature_cfg=feature_cfg, **{"img_size": side} | kwargs)

    network = partial(_network, type(section), section.model_dump())
    images = {
        "num_classes": 1000,
        "input_size": (3, side, side),
        "fixed_input_size": True,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
    }
    if not timm.is_model(name):
        _add(name, build, {**images, "first_conv": section.first_layer(), "classifier": section.classifier()})


def _network(
    section: type[ModelSection], defaults: dict[str, Any], *, num_classes: int, img_size: Any = 0, **given
) -> torch.nn.Module:
    """Make a network from its section's keys and from arguments of timm's."""
    from widemix.models.registry import make_network

    if "drop_path_rate" in given and "drop_path" in section.model_fields:
        given["drop_path"] = given.pop("drop_path_rate")
    keys = {name: given.pop(name) for name in list(given) if name in section.model_fields}
    if unknown := given.keys() - {"in_chans", "drop_rate", "global_pool"}:
        raise TypeError(f"{section.__name__} has no {', '.join(sorted(unknown))}")
    return make_network(section.from_keys(keys, defaults), img_size, num_classes, **given)


def _add_unsized(
    name: str, network: Callable[..., torch.nn.Module], default_cfg: dict[str, Any], ignored: tuple[str, ...] = ()
) -> None:
    """Add a network that ignores some of the arguments that timm gives to every one."""
    filtered: Any = (*ignored, "in_chans", "global_pool")

    def build(pretrained: bool = False, **kwargs) -> torch.nn.Module:
        return _build(network, name, pretrained, kwargs_filter=filtered, **kwargs)

    if not timm.is_model(name):
        _add(name, build, default_cfg)


def _build(network: Callable[..., torch.nn.Module], name: str, pretrained: bool, device=None, dtype=None, **options):
    """timm's builder; every network has its tensors on `device`, floating-point ones as `dtype`, as timm's own do."""
    size = options.get("img_size")
    if isinstance(size, (tuple, list)) and len(set(size)) == 1:  # as timm's own networks take it too
        options["img_size"] = size[0]
    with nullcontext() if device is None else torch.device(device):  # no weights are sampled on the meta device
        model = build_model_with_cfg(network, name, pretrained, **options)
    return model.to(device=device, dtype=dtype)  # also what was made from numpy's arrays


def _add(name: str, build: Callable[..., torch.nn.Module], default_cfg: dict[str, Any]) -> None:
    build.__name__ = build.__qualname__ = name
    default_cfgs.update(generate_default_cfgs({f"{name}.untrained": default_cfg}))
    register_model(build)


for _section in sections():
    _register(_section)
WATCHERS.append(_register)
