"""The memory layout of a Mixer's blocks in training: plain, as they are written, or with the batch last.

`auto` takes the faster: it times both for one block of the network at the recipe's batch and precision, with its
gradients, on rank 0. The answer is kept in the user's cache by device, versions and shapes. Numbers differ by
rounding alone; those of an evaluation do not.
"""

import copy
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from widemix.data.precision import DTYPES, autocast
from widemix.distributed.topology import Topology, on_main
from widemix.errors import InputError
from widemix.files import atomic_write
from widemix.models.batch_last import by_c
from widemix.models.batch_last.block import arrange
from widemix.models.batch_last.layers import Block, features_of
from widemix.native.build import cache_folder
from widemix.native.library import open_library
from widemix.recipe.sections import EngineSection, TrainSection

_ROUNDS = 9
_SECONDS = 0.1  # at most for one pass of a block on a CPU: there the batch is cut down to fit
_CHECKED = 64  # images whose results are compared
_UNIT = 16  # images, of which the batch to time is a multiple then
_WORTH = 0.98  # of the plain blocks' time, from which on batch_last is taken
_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}  # relative: wrong kernels are farther off than rounding


def set_memory_layout(
    module: nn.Module, engine: EngineSection, train: TrainSection, topology: Topology
) -> str | None:
    """Let a Mixer's blocks compute as `engine.memory_layout` says; returns the layout, None for other networks.

    Every rank calls it, with the module on its device, or but on rank 0 on the meta device. Raises `InputError` where
    `batch_last` is asked for and impossible.
    """
    batch = train.micro_batch_size(topology.world)
    chosen = on_main(topology, partial(choose_memory_layout, module, engine, train, batch, topology.device))
    if not layout_blocks(module):
        return None
    use_memory_layout(module, chosen)
    return chosen


def choose_memory_layout(
    module: nn.Module, engine: EngineSection, train: TrainSection, batch: int, device: torch.device
) -> str:
    """`plain` or `batch_last`, from `engine.memory_layout` and for batches of this size. Raises `InputError`."""
    obstacle = _obstacle(module, engine, train)
    if engine.memory_layout == "batch_last" and obstacle:
        raise InputError(f"engine.memory_layout batch_last: {obstacle}; take auto or plain")
    if engine.memory_layout != "auto":
        return engine.memory_layout
    if obstacle or train.deterministic:
        return "plain"
    return _faster(layout_blocks(module)[-1], batch, train.precision, device)


def use_memory_layout(module: nn.Module, memory_layout: str) -> None:
    """Let the blocks compute in this layout."""
    for block in layout_blocks(module):
        block.batch_last = memory_layout == "batch_last"


def _faster(block: Block, batch: int, precision: str, device: torch.device) -> str:
    """The layout that takes less time on this device, on which the module is; from the cache if it was timed."""
    shape = (batch, *features_of(block))
    path = cache_folder() / f"memory_layout-{_key(block, shape, precision, device)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return str({"plain": "plain", "batch_last": "batch_last"}[json.loads(path.read_text())["memory_layout"]])
    ratio = _time_ratio(block, shape, precision, device)
    chosen = "batch_last" if ratio < _WORTH else "plain"
    with suppress(OSError):
        atomic_write(path, json.dumps({"memory_layout": chosen, "time_ratio": ratio}) + "\n")
    return chosen


@torch.inference_mode(False)  # the caller may be without gradients
def _time_ratio(block: Block, shape: Sequence[int], precision: str, device: torch.device) -> float:
    """The time of forward and backward with the batch last, over the plain block's; infinity if it fails or is wrong.

    The median over rounds in which both take turns, since other processes may use the machine too.
    """
    plain, other = copy.deepcopy(block).train(), copy.deepcopy(block).train()
    plain.batch_last, other.batch_last = False, True
    for way in (plain, other):
        way.drop_path1, way.drop_path2 = nn.Identity(), nn.Identity()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, DTYPES[precision])
    if device.type == "cpu":
        x = x[: _images(plain, x, precision)]
    packed = arrange(other, x)
    # In fp32, as PyTorch's LayerNorm in bf16 adds the gradients of its weights up in bf16 on CPUs, 8 to 23 % off.
    expected = _step(copy.deepcopy(plain).float(), x[:_CHECKED].float(), "fp32")
    try:
        _step(other, packed, precision)
        found = _step(other, x[:_CHECKED], precision)
    except Exception:  # of a kernel that this device can't run: Triton and its compilers have their own
        return float("inf")
    if not all(_apart(one, each) < _TOLERANCE[precision] for one, each in zip(found, expected, strict=True)):
        return float("inf")  # NaN too
    ratios = []
    for _ in range(_ROUNDS):
        times = [_now(device)]
        for way, inputs in ((plain, x), (other, packed)):
            _step(way, inputs, precision)
            times.append(_now(device))
        ratios.append((times[2] - times[1]) / (times[1] - times[0]))
    return statistics.median(ratios)


def _images(block: Block, x: torch.Tensor, precision: str) -> int:
    """How many of a batch x to time."""
    few = x[:_UNIT]
    _step(block, few, precision)
    start = time.perf_counter()
    _step(block, few, precision)
    units = int(_SECONDS / (time.perf_counter() - start))
    return min(len(x), max(1, units) * _UNIT)


def _step(block: Block, x: torch.Tensor, precision: str) -> tuple[torch.Tensor, ...]:
    """Output of a forward pass, and from the backward pass the gradients by the input and each weight."""
    block.zero_grad()
    x = x.detach().requires_grad_()
    with autocast(x.device, DTYPES[precision]):
        y = block(x)
    y.backward(y.detach())
    assert x.grad is not None
    by_weights = [parameter.grad for parameter in block.parameters() if parameter.grad is not None]
    return y.detach(), x.grad, *by_weights


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-30))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _key(block: Block, shape: Sequence[int], precision: str, device: torch.device) -> str:
    """Of all that the times depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    versions = (torch.__version__, version("widemix"))
    library = Path(open_library()._name).name if by_c.takes(block, torch.empty(0, device=device)) else None
    tf32 = torch.get_float32_matmul_precision()
    parts = [name, *versions, library, torch.get_num_threads(), precision, tf32, *shape, repr(block)]
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]


def _cpu() -> str:
    """The processor's name and instructions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _obstacle(module: nn.Module, engine: EngineSection, train: TrainSection) -> str | None:
    """Why the blocks can't be computed with the batch last."""
    blocks = layout_blocks(module)
    if not blocks:
        return "the network is no Mixer of images"
    if train.compile:
        return "train.compile compiles the blocks as they are written"
    if engine.kind == "deepspeed" and engine.zero_stage == 3:
        return "engine.zero_stage 3 gathers weights where layers are called"
    if not all(block.fits_batch_last() for block in blocks):
        return "groups of tokens and train.fp8 need the blocks as they are written"
    return None


def layout_blocks(module: nn.Module) -> list[Block]:
    """The blocks whose layout can be chosen; none of a network that does not say that it has some."""
    blocks: list[Block] = getattr(module, "layout_blocks", list)()
    return blocks
