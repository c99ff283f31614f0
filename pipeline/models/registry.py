"""From a recipe's model section to a network, and from a name in timm's registry to the same network."""

import difflib
from functools import singledispatch
from typing import Any, Literal

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from pipeline.errors import InputError
from pipeline.models.flat import refuse_maps
from pipeline.models.kronecker import ShallowMlp
from pipeline.models.lasso import LassoNet
from pipeline.models.mixer import Mixer, MixerShape
from pipeline.models.related import FfOnly, Permutator, Relative
from pipeline.models.repmlp import RepMlp
from pipeline.models.sparse import SwMlp
from pipeline.models.text import TextMixer, TextTransformer
from pipeline.recipe.family import Family, hidden_width
from pipeline.recipe.model import LassoSection, MixerSection, ShallowSection, SwMlpSection
from pipeline.recipe.relatives import FfOnlySection, PermutatorSection, RepMlpSection, TimmSection
from pipeline.recipe.text import TextMixerSection, TextTransformerSection


def build_model(section: Family, image_size: int, num_classes: int) -> torch.nn.Module:
    """The section's network: float pictures [B, 3, image_size, image_size] -> logits [B, num_classes].

    Text models take token ids [B, tokens] instead, and `image_size` means nothing to them.
    """
    return _build(section, image_size, num_classes)


@singledispatch
def _build(section: Family, image_size: int, num_classes: int) -> torch.nn.Module:
    raise NotImplementedError(type(section).__name__)


@_build.register
def _(section: MixerSection, image_size: int, num_classes: int) -> torch.nn.Module:
    token_hidden, channel_hidden = section.hidden_widths
    return Mixer(
        img_size=image_size,
        num_classes=num_classes,
        patch_size=section.patch_size,
        channels=section.channels,
        depth=section.depth,
        token_hidden=token_hidden,
        channel_hidden=channel_hidden,
        tokens=section.tokens if section.project_tokens else None,
        permutation=section.permutation,
        permutation_seed=section.permutation_seed,
        permuted_blocks=section.permuted_blocks,
        permuted_mixings=section.permuted_mixings,
        permuted_layers=section.permuted_layers,
        activation=section.activation,
        norm=section.norm,
        drop_path_rate=section.drop_path,
    )


@_build.register
def _(section: SwMlpSection, image_size: int, num_classes: int) -> torch.nn.Module:
    return SwMlp(
        img_size=image_size,
        num_classes=num_classes,
        width=section.width,
        depth=section.depth,
        density=section.density,
        hidden=section.hidden_width if section.expansion else None,
        mask_seed=section.mask_seed,
    )


@_build.register
def _(section: ShallowSection, image_size: int, num_classes: int) -> torch.nn.Module:
    return ShallowMlp(img_size=image_size, num_classes=num_classes, width=section.width, matrices=section.matrices)


@_build.register
def _(section: LassoSection, image_size: int, num_classes: int) -> torch.nn.Module:
    layer = LASSO_LAYERS[section.kind]
    return LassoNet(img_size=image_size, num_classes=num_classes, base_channels=section.base_channels, layer=layer)


@_build.register
def _(
    section: FfOnlySection | PermutatorSection | RepMlpSection, image_size: int, num_classes: int
) -> torch.nn.Module:
    shape: dict[str, Any] = {
        "patch_size": section.patch_size,
        "channels": section.channels,
        "depth": section.depth,
        "expansion": section.expansion,
        "drop_path_rate": section.drop_path,
        "img_size": image_size,
        "num_classes": num_classes,
    }
    if isinstance(section, RepMlpSection):
        return RepMlp(**shape, sets=section.share_sets, kernels=section.kernels)
    return FfOnly(**shape) if isinstance(section, FfOnlySection) else Permutator(**shape)


@_build.register
def _(section: TimmSection, image_size: int, num_classes: int) -> torch.nn.Module:
    if not timm.is_model(section.name):
        close = difflib.get_close_matches(section.name, timm.list_models(), n=1)
        raise InputError(
            f"model.name: timm has no network called {section.name}"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    try:
        return timm.create_model(
            section.name, img_size=image_size, num_classes=num_classes, drop_path_rate=section.drop_path
        )
    except TypeError as error:
        raise InputError(f"model.name {section.name}: timm's network takes no such picture size ({error})") from None


@_build.register
def _(section: TextMixerSection, image_size: int, num_classes: int) -> torch.nn.Module:
    shape = MixerShape(
        channels=section.width,
        depth=section.depth,
        token_hidden=hidden_width(section.expansion, section.tokens),
        channel_hidden=hidden_width(section.expansion, section.width),
        permutation=section.permutation,
        permutation_seed=section.permutation_seed,
        activation=section.activation,
        norm=section.norm,
        drop_path_rate=section.drop_path,
    )
    return TextMixer(vocabulary=section.vocabulary, tokens=section.tokens, num_classes=num_classes, shape=shape)


@_build.register
def _(section: TextTransformerSection, image_size: int, num_classes: int) -> torch.nn.Module:
    return TextTransformer(
        vocabulary=section.vocabulary,
        tokens=section.tokens,
        num_classes=num_classes,
        channels=section.width,
        depth=section.depth,
        heads=section.heads,
        hidden=hidden_width(section.expansion, section.width),
    )


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

LASSO_LAYERS: dict[str, Literal["full", "local"]] = {"s_fc": "full", "s_local": "local"}

default_cfgs: dict[str, Any] = {}


# SW-MLPs of Omega = 2^18 at gamma 1 and of Omega = 2^21 at gamma 2, and the one as wide as an S-Mixer of S = C = 64.
SW_MLPS: dict[str, dict[str, Any]] = {
    "sw_mlp_1619_32": {"width": 1619, "depth": 6, "density": 0.1},
    "sw_mlp_4096_32": {"width": 4096, "depth": 6, "density": 1 / 64},
    "sw_mlp_8192_32": {"width": 8192, "depth": 6, "density": 1 / 64, "hidden": 16384},
}


def _register(name: str, side: int, model: type[torch.nn.Module], arguments: dict[str, Any], stem: str) -> None:
    """Put a network into timm's registry under `name`, for pictures of `side` pixels; `stem` is its first layer."""

    def entry(pretrained: bool = False, **kwargs):
        chosen = {"img_size": side, **arguments, **kwargs}
        if not issubclass(model, (Mixer, Relative)) and chosen.get("features_only"):
            refuse_maps(name)
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
for _name, _layer in LASSO_LAYERS.items():
    _register(f"{_name}_32", 32, LassoNet, {"base_channels": 150, "layer": _layer}, "stem.0")
for _name, _model, _shape in (
    ("ff_only_b16_224", FfOnly, {"patch_size": 16, "channels": 768, "depth": 12}),
    ("permutator_s14_224", Permutator, {"patch_size": 14, "channels": 384, "depth": 18}),
    ("repmlp_s16_224", RepMlp, {"patch_size": 16, "channels": 512, "depth": 8, "sets": 32}),
):
    _register(_name, 224, _model, _shape, "stem.proj")
