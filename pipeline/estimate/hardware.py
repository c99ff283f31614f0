"""Peak speeds of GPUs and networks, from their makers' data sheets, clusters of them, and a run's part of a peak."""

import re
from typing import TYPE_CHECKING, NamedTuple

from widemix.errors import InputError
from widemix.recipe import Recipe
from widemix.recipe.sections import TrainSection

if TYPE_CHECKING:  # importing torch takes seconds
    from widemix.distributed.topology import Topology


class Gpu(NamedTuple):
    """Peaks of a GPU: FLOP/s of dense products, bandwidths in bytes/s (links: one direction), memory in bytes."""

    half: float  # 16-bit with fp32 sums, on tensor cores, without sparsity
    single: float  # fp32 outside of tensor cores, which is PyTorch's default for fp32
    memory: float
    bandwidth: float
    link: float  # to the other GPUs of its node
    has_bf16: bool = True

    def peak(self, precision: str) -> float:
        """Return the peak in FLOP/s for "fp32", "bf16" or "fp16"; a GPU without bf16 computes it in fp32."""
        half = precision == "fp16" or (precision == "bf16" and self.has_bf16)
        return self.half if half else self.single


# NVIDIA's data sheets: V100 SXM2, January 2020; A100 SXM4 80 GB, June 2021; H100 SXM5, 2023, whose 1,979 TFLOP/s are
# with sparsity; H200 SXM, November 2024. Links: NVLink, half of the 300, 600, 900 and 900 GB/s of both directions.
# RTX 3090: GA102 white paper, 2020, linked by PCIe 4; it is here because timm publishes speeds measured on it.
GPUS = {
    "v100": Gpu(125e12, 15.7e12, 32e9, 0.9e12, 150e9, has_bf16=False),
    "a100": Gpu(312e12, 19.5e12, 80e9, 2.039e12, 300e9),
    "h100": Gpu(989e12, 67e12, 80e9, 3.35e12, 450e9),
    "h200": Gpu(989e12, 67e12, 141e9, 4.8e12, 450e9),
    "rtx3090": Gpu(71e12, 35.6e12, 24e9, 0.936e12, 32e9),
}

# Speed of an eager step as a fraction of its roofline (`network.Pass.seconds`): timm's published training speeds of
# mixer_s16, b16 and l16 on an RTX 3090 (AMP: 1,543, 528, 164 images/s) are 0.81, 0.82 and 0.84 of it. On an H100 the
# forward and backward passes of imagenet/mixer_b16 in batches of 256 take 0.86 to 0.96 (57.6 and 64.4 ms), compiled
# 0.89, eager 0.57; those of imagenet/mixer_b_w 0.44, whose odd widths its tensor cores multiply slowly.
EFFICIENCY = 0.82
# Seconds in which the host starts an operator, which no GPU makes faster: eager passes of cifar10/figure7 on an H100
# with a Xeon take 5.2 ms for 132 operators, 9.1 ms for 200 with random permutations (`widemix bench step`), a step's
# kernels 2.3 ms. The shortest of 400 passes of a tiny network on a core of another Xeon took 11 us an operator.
LAUNCH = 40e-6
# Seconds that even the smallest collective takes: assumed, from some tens of hops of an InfiniBand network.
LATENCY = 50e-6

# Gbit/s of one adapter, one direction: InfiniBand 4x by generation (IBTA's roadmap), Ethernet by name.
NETWORKS = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800, "10gbe": 10, "25gbe": 25, "100gbe": 100, "400gbe": 400}


def network_bandwidth(text: str) -> float:
    """Return the bytes/s of a node, one direction, for `hdr`, `4xndr` (adapters x kind) or a number of Gbit/s."""
    match = re.fullmatch(r"(?:(\d+)x)?(\w+(?:\.\d+)?)", text.lower())
    count, kind = (int(match[1] or 1), match[2]) if match else (0, "")
    try:
        gigabits = NETWORKS[kind] if kind in NETWORKS else float(kind)
    except ValueError:
        gigabits = 0.0
    if not 0 < count * gigabits < float("inf"):
        raise InputError(
            f"--network {text}: should be Gbit/s of a node, or adapters such as hdr or 4xndr; adapters are "
            f"{', '.join(NETWORKS)}"
        )
    return count * gigabits * 1e9 / 8


class Cluster(NamedTuple):
    """A cluster that a recipe could be trained on: `gpus` in all, on `nodes`, with `network` adapters a node."""

    gpus: int
    gpu: str = "a100"
    nodes: int | None = None  # None: one for every four GPUs
    network: str = "hdr"

    @property
    def kind(self) -> Gpu:
        """The peaks of its GPUs."""
        return GPUS[self.gpu]

    @property
    def hosts(self) -> int:
        """The number of nodes."""
        return self.nodes or -(-self.gpus // 4)

    @property
    def local(self) -> int:
        """The number of GPUs of a node."""
        return self.gpus // self.hosts

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the slowest link of a ring over all GPUs: between nodes, or between GPUs on one node."""
        wire = network_bandwidth(self.network)
        return self.kind.link if self.hosts == 1 else min(wire, self.kind.link)

    def sharers(self, engine: str, sharding: str) -> int:
        """The number of GPUs that share what an engine shards."""
        return self.local if engine == "fsdp" and sharding == "hybrid" else self.gpus

    def check(self) -> None:
        """Raise `InputError` if there can be no such cluster."""
        if self.gpus < 1:
            raise InputError(f"--gpus {self.gpus}: must be at least 1")
        if self.nodes is not None and (self.nodes < 1 or self.gpus % self.nodes):
            raise InputError(f"--nodes {self.nodes}: must divide the {self.gpus} GPUs")
        network_bandwidth(self.network)


_OTHERS = {"pcie", "nvl", "ti", "mig"}  # PCIe cards (H100 NVL: 835 TFLOP/s of 989), an RTX 3090 Ti, parts of a GPU


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU of `GPUS` that CUDA calls so, such as "NVIDIA A100-SXM4-80GB"; None for others.

    Only the forms whose peaks are in the table: none of the same name with another speed.
    """
    words = name.lower().replace("geforce ", "").replace("rtx ", "rtx").replace("-", " ").split()
    return None if _OTHERS & {*words} else next((gpu for kind, gpu in GPUS.items() if kind in words), None)


def peak_fraction(recipe: Recipe, topology: "Topology") -> float | None:
    """Return the seconds that training on a sample takes at the peak of all GPUs: samples/s times this is the MFU.

    None on CPUs, on GPUs whose peak is not known, for products in float8 and fp32 by TF32, and where weights are
    frozen, whose backward pass is shorter. FLOPs are those of `model_cost`, forward and backward; what activation
    checkpointing computes again does not count.
    """
    import torch

    from widemix.models.cost import model_cost

    train = recipe.train
    if topology.device.type != "cuda" or train.freeze or train.fp8:
        return None
    peak = stated_peak(train, torch.cuda.get_device_name(topology.device))
    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    return cost.training_flops / (topology.world * peak) if peak else None


def stated_peak(train: TrainSection, device: str) -> float | None:
    """FLOPs a second on the data sheet of a GPU that CUDA calls so; None of others, and where TF32 computes fp32."""
    gpu, tf32 = find_gpu(device), train.precision == "fp32" and train.matmul_precision != "highest"
    return gpu.peak(train.precision) if gpu and not tf32 else None
