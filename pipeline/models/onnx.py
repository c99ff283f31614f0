"""Writes a network of images as ONNX, and compares what onnxruntime computes with the module."""

import importlib.util
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from widemix.errors import InputError
from widemix.models.program import TOLERANCE, check_logits

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_ONE_FILE = 2_000_000_000  # bytes of weights; protobuf takes 2 GiB


def check_packages() -> None:
    """`InputError` where what ONNX needs is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"--onnx: {', '.join(missing)} not installed; pip install 'widemix[onnx]'")


def write_onnx(
    module: torch.nn.Module,
    image_size: int,
    path: Path,
    metadata: Mapping[str, Any] | None = None,
    tolerance: float = TOLERANCE,
) -> float:
    """Write a network of images as ONNX, for batches of any size: `images` [B, 3, H, W] to `logits` [B, classes].

    `metadata` becomes the file's, each value as JSON. Weights of 2 GB or more go into a file beside it, its name with
    ".data". Returns the largest difference between onnxruntime's logits and the module's, relative to the largest
    logit, on batches of 1 and 3 random images. `InputError` where the network has an operation that ONNX has not;
    RuntimeError where the difference exceeds `tolerance`.
    """
    check_packages()
    module = module.eval()
    weights = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own use of torch
        for name in ("torch.onnx", "onnx_ir"):
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            program: Any = torch.onnx.export(
                module,
                (torch.zeros(2, 3, image_size, image_size),),
                dynamo=True,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            cause: BaseException = error.__cause__ or error
            reason = str(cause).strip().partition("\n")[0]
            raise InputError(f"--onnx: the network cannot be written as ONNX ({reason})") from None
        program.model.metadata_props.update({name: json.dumps(value) for name, value in (metadata or {}).items()})
        program.save(path, external_data=weights >= _ONE_FILE)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def images(count: int) -> torch.Tensor:
        return torch.randn(count, 3, image_size, image_size, generator=torch.Generator().manual_seed(count))

    def computed(batch: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(["logits"], {"images": batch.numpy()})[0])

    return check_logits(computed, module, images, f"{path}: onnxruntime's", tolerance)
