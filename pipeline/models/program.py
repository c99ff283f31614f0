"""Writes a network as a program of torch.export, which torch alone runs, or as ONNX, and compares its logits."""

import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widemix.errors import InputError, install_extra
from widemix.models.section import ModelSection

TOLERANCE = 1e-4  # largest difference of a logit, relative to the largest logit


def inputs_for(section: ModelSection, image_size: int, count: int) -> Tensor:
    """Return `count` random samples as the network takes them: images [B, 3, H, W], or token numbers [B, T]."""
    shape = (count, *section.input_shape(image_size))
    generator = torch.Generator().manual_seed(count)
    if section.takes == "text":
        return torch.randint(1, 5, shape, generator=generator)
    return torch.randn(shape, generator=generator)


@torch.no_grad()
def check_logits(
    computed: Callable[[Tensor], Tensor],
    module: torch.nn.Module,
    inputs: Callable[[int], Tensor],
    what: str,
    tolerance: float = TOLERANCE,
) -> float:
    """Return how far logits are from the module's on batches of 1 and 3, relative to the largest logit.

    RuntimeError, which begins with `what`, where that exceeds `tolerance`.
    """
    difference = 0.0
    for count in (1, 3):
        batch = inputs(count)
        expected = module(batch)
        largest = expected.abs().max().clamp(min=1e-12)
        difference = max(difference, float((computed(batch) - expected).abs().max() / largest))
    if not difference <= tolerance:
        raise RuntimeError(f"{what} logits differ from the module's by {difference:.2g} of the largest")
    return difference


def torch_program(module: torch.nn.Module, section: ModelSection, image_size: int, files: Mapping[str, str]) -> bytes:
    """Return a .pt2 file, `torch.export.load(FILE).module()` of which gives the module's logits of any batch.

    `files` are kept in it: `torch.export.load(FILE, extra_files={name: ""})` fills in their text. `InputError` where
    the forward pass of a network cannot be exported.
    """
    module = module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export, about its own use of torch
        try:
            example, batch = inputs_for(section, image_size, 2), torch.export.Dim("batch")
            program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
        except Exception as error:  # torch.export lets through whatever its parts raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise InputError(f"{section.kind}: cannot be written as a program of torch.export ({reason})") from None
        file = io.BytesIO()
        torch.export.save(program, file, extra_files=dict(files))
        file.seek(0)
        loaded = torch.export.load(file).module()
    check_logits(loaded, module, lambda count: inputs_for(section, image_size, count), "torch.export's")
    return file.getvalue()


PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_ONE_FILE = 2_000_000_000  # bytes of weights; protobuf takes 2 GiB


def check_packages() -> None:
    """`InputError` where what ONNX needs is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"--onnx: {', '.join(missing)} not installed; {install_extra('onnx')}")


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
