"""Writes a network as ONNX, and compares what onnxruntime computes with the module."""

import importlib.util
import logging
import warnings
from pathlib import Path

import torch

from widemix.errors import InputError

TOLERANCE = 1e-4  # largest difference of a logit, relative to the largest logit
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def check_packages() -> None:
    """`InputError` where what ONNX needs is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"--onnx: {', '.join(missing)} not installed; pip install 'widemix[onnx]'")


def write_onnx(module: torch.nn.Module, image_size: int, path: Path, tolerance: float = TOLERANCE) -> float:
    """Write a network of images as ONNX, for batches of any size: `images` [B, 3, H, W] to `logits` [B, classes].

    Returns the largest difference between onnxruntime's logits and the module's, relative to the largest logit, on
    batches of 1 and 3 random images. `InputError` where the network has an operation that ONNX has not;
    RuntimeError where the difference exceeds `tolerance`.
    """
    check_packages()
    module = module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own use of torch
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        try:
            torch.onnx.export(
                module,
                (torch.zeros(2, 3, image_size, image_size),),
                path,
                dynamo=True,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                external_data=False,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            cause: BaseException = error.__cause__ or error
            reason = str(cause).strip().partition("\n")[0]
            raise InputError(f"--onnx: the network cannot be written as ONNX ({reason})") from None
    difference = max(_difference(module, image_size, path, count) for count in (1, 3))
    if not difference <= tolerance:
        raise RuntimeError(
            f"{path}: onnxruntime's logits differ from the module's by {difference:.2g} of the largest"
        )
    return difference


def _difference(module: torch.nn.Module, image_size: int, path: Path, count: int) -> float:
    import onnxruntime

    generator = torch.Generator().manual_seed(count)
    images = torch.randn(count, 3, image_size, image_size, generator=generator)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (theirs,) = session.run(["logits"], {"images": images.numpy()})
    with torch.no_grad():
        ours = module(images)
    return float((torch.from_numpy(theirs) - ours).abs().max() / ours.abs().max().clamp(min=1e-12))
