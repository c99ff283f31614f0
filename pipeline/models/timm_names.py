"""Names in timm's registry: the paper's name in lower case, the picture size last."""

import difflib
from typing import Any

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from pipeline.errors import InputError
from pipeline.models.kronecker import ShallowMlp
from pipeline.models.lasso import LassoNet
from pipeline.models.mixer import Mixer
from pipeline.models.related import FfOnly, Permutator
from pipeline.models.repmlp import RepMlp
from pipeline.models.sparse import SwMlp

# Published sizes (Tolstikhin et al. 2021, table 1; Hayase & Karakida 2024, tables 1 and S.3), by picture side.
# Columns: patch, C, L, D_S, D_C.
SIZES: dict[int, dict[str, tuple[int, int, int, int, int]]] = {
    224: {
        "s32": (32, 512, 8, 256, 2048),
        "s16": (16, 512, 8, 256, 2048),
        "b32": (32, 768, 12, 384, 3072),
        "b16": (16, 768, 12, 384, 3072),
        "l32": (32, 1024, 24, 512, 4096),
        "l16": (16, 1024, 24, 512, 4096),
        "h14": (14, 1280, 32, 640, 5120),
        "b_w": (14, 588, 8, 1170, 2687),  # gamma = 4.57, as in the text
        "b_w_table1": (14, 588, 8, 1047, 2405),  # gamma = 4.09, which table 1's Omega and width need
    },
    32: {
        "ss8": (8, 986, 2, 64, 3944),
        "ss_w": (4, 487, 2, 256, 1948),
        "ss_w_table1": (4, 467, 2, 256, 1868),  # which table 1's 255 M connections need
    },
}
TIMM_OWN = ("mixer_s32_224", "mixer_s16_224", "mixer_b32_224", "mixer_b16_224", "mixer_l32_224", "mixer_l16_224")

default_cfgs: dict[str, Any] = {}


# SW-MLPs of Omega = 2^18 at gamma 1 and of Omega = 2^21 at gamma 2, and the one as wide as an S-Mixer of S = C = 64.
SW_MLPS: dict[str, dict[str, Any]] = {
    "sw_mlp_1619_32": {"width": 1619, "depth": 6, "density": 0.1},
    "sw_mlp_4096_32": {"width": 4096, "depth": 6, "density": 1 / 64},
    "sw_mlp_8192_32": {"width": 8192, "depth": 6, "density": 1 / 64, "hidden": 16384},
}


def create(name: str, num_classes: int, **arguments) -> torch.nn.Module:
    """A network of timm that takes a picture size, or `InputError`."""
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=1)
        raise InputError(
            f"model.name: timm has no network called {name}" + (f"; did you mean {close[0]}?" if close else "")
        )
    try:
        return timm.create_model(name, num_classes=num_classes, **arguments)
    except TypeError as error:
        raise InputError(f"model.name {name}: timm's network takes no such arguments ({error})") from None


def _register(name: str, side: int, model: type[torch.nn.Module], arguments: dict[str, Any], stem: str) -> None:
    """Put a network into timm's registry under `name`, for pictures of `side` pixels; `stem` is its first layer."""

    def entry(pretrained: bool = False, **kwargs):
        chosen = {"img_size": side, **arguments, **kwargs}
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
        "first_conv": stem,
        "classifier": "head",
    }
    default_cfgs.update(generate_default_cfgs({f"{name}.untrained": configuration}))
    register_model(entry)


def _register_mixers() -> None:
    for side, sizes in SIZES.items():
        for size, (patch, channels, depth, token_hidden, channel_hidden) in sizes.items():
            shape = {"patch_size": patch, "channels": channels, "depth": depth}
            mlp = {"token_hidden": token_hidden, "channel_hidden": channel_hidden}
            single = {"token_hidden": None, "channel_hidden": None}
            for prefix, permutation in (("", "commutation"), ("rp_", "random")):
                for kind, hidden in (("mixer", mlp), ("s_mixer", single)):
                    name = f"{prefix}{kind}_{size}_{side}"
                    same = kind == "s_mixer" and size.endswith("table1")  # differs in hidden width alone, or nearly
                    if name not in TIMM_OWN and not same:
                        _register(name, side, Mixer, {**shape, **hidden, "permutation": permutation}, "stem.proj")


_register_mixers()
for _name, _shape in SW_MLPS.items():
    _register(_name, 32, SwMlp, _shape, "stem")
for _kind in ("dense", "monarch", "kronecker"):
    _first = "stem.0" if _kind == "dense" else "stem.0.right"
    _register(f"shallow_{_kind}_4096_32", 32, ShallowMlp, {"width": 4096, "matrices": _kind}, _first)
for _name, _layer in (("s_fc", "full"), ("s_local", "local")):
    _register(f"{_name}_32", 32, LassoNet, {"base_channels": 150, "layer": _layer}, "stem.0")
for _name, _model, _shape in (
    ("ff_only_b16_224", FfOnly, {"patch_size": 16, "channels": 768, "depth": 12}),
    ("permutator_s14_224", Permutator, {"patch_size": 14, "channels": 384, "depth": 18}),
    ("repmlp_s16_224", RepMlp, {"patch_size": 16, "channels": 512, "depth": 8, "sets": 32}),
):
    _register(_name, 224, _model, _shape, "stem.proj")
