"""Writes a trained network as a folder that timm loads: model.safetensors, config.json, a text model's tokenizer.

What timm has no architecture for is also written as a program, model.pt2, which torch alone runs.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save

from widemix.errors import InputError
from widemix.files import atomic_write, fsync_path, parse_json, read_regular
from widemix.formats.manifest import Prepared
from widemix.formats.text import TOKENIZER
from widemix.models.program import torch_program, write_onnx
from widemix.models.section import ModelSection
from widemix.models.timm_registry import default_cfgs, is_stock
from widemix.terminal import print

PROGRAM = "model.pt2"


class Usage(BaseModel):
    """The part of config.json that timm has no place for, under `widemix`: how images go in, and what comes out.

    targets: of `data.targets`. loss: of `train.loss`. max_size, side, to_8_bit_rgb: what is made of images
    first, as in `PrepSettings`.
    """

    model_config = ConfigDict(frozen=True)
    targets: Literal["class", "multilabel", "regression"] = "class"
    loss: str = ""
    max_size: Annotated[int, Field(ge=0, le=65_535)] = 0
    side: Literal["longest", "shortest"] = "longest"
    to_8_bit_rgb: bool = False


def read_usage(config: Path) -> Usage:
    """The usage that a config.json has; that of timm's networks where it has none. Raises `InputError`."""
    try:
        content = parse_json(read_regular(config))
        return Usage.model_validate(content.get("widemix", {}) if isinstance(content, dict) else {})
    except (OSError, ValueError) as error:
        raise InputError(f"{config}: cannot be read ({str(error).splitlines()[0]})") from None


def loads_in_timm(section: ModelSection, image_size: int) -> bool:
    """Whether timm loads an export of this network where widemix is not installed."""
    return is_stock(section.timm_spec(image_size, default_cfgs)[0])


def export_model(
    model: torch.nn.Module,
    section: ModelSection,
    folder: Path,
    *,
    data: Any,
    labels: Sequence[str],
    loss: str = "",
    prepared: Prepared = Prepared(),  # noqa: B008
    card: Callable[[bool], str] | None = None,
    onnx: bool = False,
) -> None:
    """Write `folder` whole or not at all; then `timm.create_model(f"local-dir:{folder}", pretrained=True)`.

    Where not `loads_in_timm`, `import widemix` first, and the modules of families of your own; for those who have
    neither there is then model.pt2, see `torch_program`. `labels` are the names of the classes in the order of the
    logits. `data` is the recipe's section: of images `image_size`, `crop_pct`, `interpolation`, `mean` and `std` go
    into the config, of text the tokenizer in `path` is copied. `loss` is `train.loss`, and `prepared` what the
    network was trained on; they and `data.targets` go into the config too, see `Usage`. What `card` returns becomes
    README.md; it is given whether there is a model.pt2, which a family of your own may not allow: a warning says so.
    With `onnx` there is a model.onnx. `InputError` if `folder` exists.
    """
    if onnx and section.takes != "images":
        raise InputError(f"--onnx: only networks of images are written as ONNX, not {section.kind}")
    if folder.exists():
        raise InputError(f"{folder}: exists already; export to a folder that does not")
    usage = Usage(targets=data.targets, loss=loss, **prepared.model_dump(exclude={"classes"}))
    config = _config(section, data, labels) | {"widemix": usage.model_dump()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        weights = {name: tensor.clone() for name, tensor in weights.items()}  # safetensors takes no tied ones
        atomic_write(unfinished / "model.safetensors", save(weights, metadata={"format": "pt"}))
        atomic_write(unfinished / "config.json", json.dumps(config, indent=1) + "\n")
        if section.takes == "text" and (Path(data.path) / TOKENIZER).exists():
            atomic_write(unfinished / TOKENIZER, (Path(data.path) / TOKENIZER).read_bytes())
        program = None
        if not loads_in_timm(section, data.image_size):
            try:
                program = torch_program(model, section, data.image_size, {"config.json": json.dumps(config)})
                atomic_write(unfinished / PROGRAM, program)
            except InputError as error:
                print(f"warning: {folder}: has no model.pt2, {error}", file=sys.stderr)
        if onnx:
            metadata = {"label_names": list(labels), "mean": list(data.mean), "std": list(data.std)}
            write_onnx(model, data.image_size, unfinished / "model.onnx", metadata)
            for path in unfinished.glob("model.onnx*"):
                fsync_path(path)
        if card:
            atomic_write(unfinished / "README.md", card(program is not None))
        os.chmod(unfinished, 0o755)
        unfinished.rename(folder)
        fsync_path(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def loading_lines(folder: str | Path, plugins: Sequence[str] = (), stock: bool = False) -> list[str]:
    """Return the lines of Python that load an exported folder, by timm alone if it is `stock`.

    plugins: the modules of families of your own.
    """
    modules = ", ".join(["timm"] if stock else ["widemix", *plugins, "timm"])
    return [f"import {modules}", f"model = timm.create_model({f'local-dir:{folder}'!r}, pretrained=True).eval()"]


def _config(section: ModelSection, data: Any, labels: Sequence[str]) -> dict[str, Any]:
    """Return what timm reads from config.json."""
    architecture, arguments = section.timm_spec(data.image_size, default_cfgs)
    weights: dict[str, Any] = {
        "num_classes": len(labels),
        "first_conv": section.first_layer(),
        "classifier": section.classifier(),
    }
    if section.takes == "images":
        weights |= {
            "input_size": [3, data.image_size, data.image_size],
            "fixed_input_size": section.kind != "timm" or "img_size" in arguments,
            "interpolation": "bilinear" if data.interpolation == "bilinear" else "bicubic",
            "crop_pct": data.crop_pct,
            "mean": list(data.mean),
            "std": list(data.std),
        }
    return {
        "architecture": architecture,
        "num_classes": len(labels),
        "label_names": list(labels),
        "model_args": arguments,
        "pretrained_cfg": weights,
    }
