"""A trained network as a folder that timm loads: model.safetensors and config.json, and a text model's tokenizer."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from timm.models import get_pretrained_cfg_value

from pipeline.errors import InputError
from pipeline.formats.text import TOKENIZER
from pipeline.models.kronecker import ShallowMlp
from pipeline.models.lasso import LassoNet
from pipeline.models.mixer import Mixer
from pipeline.models.registry import plan
from pipeline.models.related import FfOnly, Permutator
from pipeline.models.repmlp import RepMlp
from pipeline.models.sparse import SwMlp
from pipeline.models.text import TextMixer, TextTransformer
from pipeline.recipe.data import AnyDataSection, DataSection, TextDataSection
from pipeline.recipe.family import Family

# A name of each class in timm's registry; the arguments in the config say all of the rest.
ARCHITECTURES: dict[type, str] = {
    Mixer: "mixer_b_w_224",
    SwMlp: "sw_mlp_1619_32",
    ShallowMlp: "shallow_dense_4096_32",
    LassoNet: "s_fc_32",
    FfOnly: "ff_only_b16_224",
    Permutator: "permutator_s14_224",
    RepMlp: "repmlp_s16_224",
    TextMixer: "text_mixer",
    TextTransformer: "text_transformer",
}


def export_model(
    model: torch.nn.Module,
    section: Family,
    folder: Path,
    *,
    data: AnyDataSection,
    labels: Sequence[str],
) -> None:
    """Write `folder` whole or not at all; then `timm.create_model(f"local-dir:{folder}", pretrained=True)`.

    Names of ours need `import pipeline.models` first. `labels` are the class names in the order of the logits; `data`
    says what was done to a picture, or where a text model's tokenizer lies.
    """
    if folder.exists():
        raise InputError(f"{folder}: exists already; export to a folder that does not")
    make, arguments = plan(section, data.image_size)
    architecture = ARCHITECTURES[make] if isinstance(make, type) else arguments.pop("name")
    config = {
        "architecture": architecture,
        "num_classes": len(labels),
        "label_names": list(labels),
        "model_args": arguments,
        "pretrained_cfg": {
            "num_classes": len(labels),
            "first_conv": get_pretrained_cfg_value(architecture, "first_conv"),
            "classifier": get_pretrained_cfg_value(architecture, "classifier"),
            **(_of_pictures(data) if isinstance(data, DataSection) else {}),
        },
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        (unfinished / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        tokenizer = Path(data.path) / TOKENIZER
        if isinstance(data, TextDataSection) and tokenizer.exists():
            shutil.copyfile(tokenizer, unfinished / TOKENIZER)
        os.chmod(unfinished, 0o755)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def _of_pictures(data: DataSection) -> dict[str, Any]:
    return {
        "input_size": [3, data.image_size, data.image_size],
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "crop_pct": data.crop_pct,
        "mean": list(data.mean),
        "std": list(data.std),
    }
