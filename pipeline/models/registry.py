"""From a recipe's model section to a network."""

import difflib
from collections.abc import Callable
from functools import singledispatch
from typing import Any

import timm
import torch

from pipeline.errors import InputError
from pipeline.models.kronecker import ShallowMlp
from pipeline.models.lasso import LassoNet
from pipeline.models.mixer import Mixer
from pipeline.models.related import FfOnly, Permutator
from pipeline.models.repmlp import RepMlp
from pipeline.models.sparse import SwMlp
from pipeline.models.text import TextMixer, TextTransformer
from pipeline.recipe.family import Family, hidden_width
from pipeline.recipe.model import LassoSection, MixerSection, ShallowSection, SwMlpSection
from pipeline.recipe.relatives import FfOnlySection, PermutatorSection, RepMlpSection, TimmSection
from pipeline.recipe.text import TextMixerSection, TextTransformerSection

Plan = tuple[Callable[..., torch.nn.Module], dict[str, Any]]


def build_model(section: Family, image_size: int, num_classes: int) -> torch.nn.Module:
    """The section's network: float pictures [B, 3, image_size, image_size] -> logits [B, num_classes].

    Text models take token ids [B, tokens or fewer] instead, and `image_size` means nothing to them.
    """
    model, arguments = plan(section, image_size)
    return model(num_classes=num_classes, **arguments)


@singledispatch
def plan(section: Family, image_size: int) -> Plan:
    """What makes the section's network, and the arguments it takes beside the number of classes."""
    raise NotImplementedError(type(section).__name__)


@plan.register
def _(section: MixerSection, image_size: int) -> Plan:
    token_hidden, channel_hidden = section.hidden_widths
    return Mixer, {
        "img_size": image_size,
        "patch_size": section.patch_size,
        "channels": section.channels,
        "depth": section.depth,
        "token_hidden": token_hidden,
        "channel_hidden": channel_hidden,
        "tokens": section.tokens if section.project_tokens else None,
        "permutation": section.permutation,
        "permutation_seed": section.permutation_seed,
        "permuted_blocks": section.permuted_blocks,
        "permuted_mixings": section.permuted_mixings,
        "permuted_layers": section.permuted_layers,
        "activation": section.activation,
        "norm": section.norm,
        "drop_path_rate": section.drop_path,
    }


@plan.register
def _(section: SwMlpSection, image_size: int) -> Plan:
    return SwMlp, {
        "img_size": image_size,
        "width": section.width,
        "depth": section.depth,
        "density": section.density,
        "hidden": section.hidden_width if section.expansion else None,
        "mask_seed": section.mask_seed,
    }


@plan.register
def _(section: ShallowSection, image_size: int) -> Plan:
    return ShallowMlp, {"img_size": image_size, "width": section.width, "matrices": section.matrices}


@plan.register
def _(section: LassoSection, image_size: int) -> Plan:
    layer = "full" if section.kind == "s_fc" else "local"
    return LassoNet, {"img_size": image_size, "base_channels": section.base_channels, "layer": layer}


@plan.register
def _(section: FfOnlySection | PermutatorSection | RepMlpSection, image_size: int) -> Plan:
    arguments: dict[str, Any] = {
        "img_size": image_size,
        "patch_size": section.patch_size,
        "channels": section.channels,
        "depth": section.depth,
        "expansion": section.expansion,
        "drop_path_rate": section.drop_path,
    }
    if isinstance(section, RepMlpSection):
        return RepMlp, {**arguments, "sets": section.share_sets, "kernels": section.kernels}
    return FfOnly if isinstance(section, FfOnlySection) else Permutator, arguments


@plan.register
def _(section: TimmSection, image_size: int) -> Plan:
    return create, {"name": section.name, "img_size": image_size, "drop_path_rate": section.drop_path}


@plan.register
def _(section: TextMixerSection, image_size: int) -> Plan:
    return TextMixer, {
        "vocabulary": section.vocabulary,
        "tokens": section.tokens,
        "channels": section.width,
        "depth": section.depth,
        "token_hidden": hidden_width(section.expansion, section.tokens),
        "channel_hidden": hidden_width(section.expansion, section.width),
        "permutation": section.permutation,
        "permutation_seed": section.permutation_seed,
        "activation": section.activation,
        "norm": section.norm,
        "drop_path_rate": section.drop_path,
    }


@plan.register
def _(section: TextTransformerSection, image_size: int) -> Plan:
    return TextTransformer, {
        "vocabulary": section.vocabulary,
        "tokens": section.tokens,
        "channels": section.width,
        "depth": section.depth,
        "heads": section.heads,
        "hidden": hidden_width(section.expansion, section.width),
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
