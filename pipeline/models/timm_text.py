"""The text models in timm's registry, so that an exported one loads. They have no sizes of their own."""

from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from pipeline.models.text import TextMixer, TextTransformer

_OF_PICTURES: Any = ("img_size", "in_chans", "global_pool")  # what timm offers every model

default_cfgs: dict[str, Any] = generate_default_cfgs(
    {
        f"{name}.untrained": {"num_classes": 3, "first_conv": "embedding", "classifier": "head"}
        for name in ("text_mixer", "text_transformer")
    }
)


@register_model
def text_mixer(pretrained: bool = False, **sizes) -> torch.nn.Module:
    """A `TextMixer` of these sizes."""
    return build_model_with_cfg(TextMixer, "text_mixer", pretrained, kwargs_filter=_OF_PICTURES, **sizes)


@register_model
def text_transformer(pretrained: bool = False, **sizes) -> torch.nn.Module:
    """A `TextTransformer` of these sizes."""
    return build_model_with_cfg(TextTransformer, "text_transformer", pretrained, kwargs_filter=_OF_PICTURES, **sizes)
