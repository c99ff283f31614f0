"""The named networks in timm's registry, for `timm.create_model`."""

from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from pipeline.errors import InputError
from pipeline.models.kronecker import ShallowMlp
from pipeline.models.mixer import Mixer
from pipeline.models.named import NAMED, TIMM_OWN
from pipeline.models.registry import plan
from pipeline.models.related import Permutator, Relative
from pipeline.models.repmlp import RepMlp
from pipeline.models.sparse import SwMlp

default_cfgs: dict[str, Any] = {}


def _register(name: str) -> None:
    """Put a named network into timm's registry, for pictures of its side."""
    section, side = NAMED[name]
    model, arguments = plan(section, side)
    assert isinstance(model, type)

    def entry(pretrained: bool = False, **kwargs) -> torch.nn.Module:
        chosen = {**arguments, **kwargs}
        if chosen.get("features_only") and not issubclass(model, (Mixer, Permutator, RepMlp)):
            raise InputError(f"{name}: its features are no map; leave features_only out")
        last = min(3, chosen.get("depth", 1))
        feature_cfg = {"out_indices": chosen.pop("out_indices", last), "feature_cls": "getter"}
        return build_model_with_cfg(model, name, pretrained, feature_cfg=feature_cfg, **chosen)

    entry.__name__ = entry.__qualname__ = name
    configuration = {
        "num_classes": 1000,
        "input_size": (3, side, side),
        "fixed_input_size": True,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": _first_layer(model, arguments),
        "classifier": "head",
    }
    default_cfgs.update(generate_default_cfgs({f"{name}.untrained": configuration}))
    register_model(entry)


def _first_layer(model: type, arguments: dict[str, Any]) -> str:
    if issubclass(model, (Mixer, Relative)):
        return "stem.proj"
    if issubclass(model, SwMlp):
        return "stem"
    structured = issubclass(model, ShallowMlp) and arguments["matrices"] != "dense"
    return "stem.0.right" if structured else "stem.0"


for _name in NAMED:
    if _name not in TIMM_OWN:
        _register(_name)
