"""Model FLOPs utilisation (MFU): the FLOPs of the model that a run computes, as a fraction of the GPUs' peak."""

import torch

from widemix.distributed.topology import Topology
from widemix.estimate.hardware import GPUS, Gpu
from widemix.models.cost import model_cost
from widemix.recipe import Recipe

_OTHERS = {"pcie", "nvl", "ti", "mig"}  # PCIe cards (H100 NVL: 835 TFLOP/s of 989), an RTX 3090 Ti, parts of a GPU


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU of `GPUS` that CUDA calls so, such as "NVIDIA A100-SXM4-80GB"; None for others.

    Only the forms whose peaks are in the table: none of the same name with another speed.
    """
    words = name.lower().replace("geforce ", "").replace("rtx ", "rtx").replace("-", " ").split()
    return None if _OTHERS & {*words} else next((gpu for kind, gpu in GPUS.items() if kind in words), None)


def peak_fraction(recipe: Recipe, topology: Topology) -> float | None:
    """Return the seconds that training on a sample takes at the peak of all GPUs: samples/s times this is the MFU.

    None on CPUs, on GPUs whose peak is not known, for products in float8 and fp32 by TF32, and where weights are
    frozen, whose backward pass is shorter. FLOPs are those of `model_cost`, forward and backward; what activation
    checkpointing computes again does not count.
    """
    if topology.device.type != "cuda":
        return None
    return fraction_of_peak(recipe, torch.cuda.get_device_name(topology.device), topology.world)


def fraction_of_peak(recipe: Recipe, device: str, world: int) -> float | None:
    """`peak_fraction` of so many GPUs of this name."""
    gpu, train = find_gpu(device), recipe.train
    others = train.fp8 or (train.precision == "fp32" and train.matmul_precision == "high")  # float8, TF32
    if gpu is None or train.freeze or others:
        return None
    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    return cost.training_flops / (world * gpu.peak(train.precision))
