"""A trained network as a folder that timm loads: model.safetensors and config.json."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from timm.models import get_pretrained_cfg_value

from pipeline.errors import InputError
from pipeline.models.kronecker import ShallowMlp
from pipeline.models.lasso import LassoNet
from pipeline.models.mixer import Mixer
from pipeline.models.registry import plan
from pipeline.models.related import FfOnly, Permutator
from pipeline.models.repmlp import RepMlp
from pipeline.models.sparse import SwMlp
from pipeline.recipe.family import Family
from pipeline.recipe.text import TextSection

# A name of each class in timm's registry; the arguments in the config say all of the rest.
ARCHITECTURES: dict[type, str] = {
    Mixer: "mixer_b_w_224",
    SwMlp: "sw_mlp_1619_32",
    ShallowMlp: "shallow_dense_4096_32",
    LassoNet: "s_fc_32",
    FfOnly: "ff_only_b16_224",
    Permutator: "permutator_s14_224",
    RepMlp: "repmlp_s16_224",
}


def export_model(
    model: torch.nn.Module,
    section: Family,
    folder: Path,
    *,
    image_size: int,
    labels: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
    crop_pct: float,
) -> None:
    """Write `folder` whole or not at all; then `timm.create_model(f"local-dir:{folder}", pretrained=True)`.

    Names of ours need `import pipeline.models` first. `labels` are the class names in the order of the logits.
    """
    if isinstance(section, TextSection):
        raise InputError("export: timm has no text models; the checkpoint itself is the way to keep this one")
    if folder.exists():
        raise InputError(f"{folder}: exists already; export to a folder that does not")
    make, arguments = plan(section, image_size)
    architecture = ARCHITECTURES[make] if isinstance(make, type) else arguments.pop("name")
    config = {
        "architecture": architecture,
        "num_classes": len(labels),
        "label_names": list(labels),
        "model_args": arguments,
        "pretrained_cfg": {
            "num_classes": len(labels),
            "input_size": [3, image_size, image_size],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": crop_pct,
            "mean": list(mean),
            "std": list(std),
            "first_conv": get_pretrained_cfg_value(architecture, "first_conv"),
            "classifier": get_pretrained_cfg_value(architecture, "classifier"),
        },
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        (unfinished / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        os.chmod(unfinished, 0o755)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
