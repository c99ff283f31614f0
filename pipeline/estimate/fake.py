"""Networks of tensors that have shapes and no memory, and what happens to such tensors in a step.

Fake tensors are PyTorch's (`torch._subclasses.FakeTensorMode`): every operator says what it would return.
"""

import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipeline.engine import prepare
from pipeline.models.registry import build_model
from pipeline.recipe import Recipe
from pipeline.recipe.text import TextSection

# Which tensor of a collective's arguments is the whole: what is summed, gathered to, or scattered from.
_COLLECTIVES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
}


def fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_network(recipe: Recipe, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """The recipe's network as it is trained, of fake tensors on the CPU, uncompiled; its floats in `dtype`."""
    with torch.device("meta"):
        module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes).to(dtype)
    made: dict[int, torch.Tensor] = {}
    with mode:
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = made.setdefault(id(tensor), _like(tensor))  # type: ignore[assignment]
    prepare(module, recipe.train.model_copy(update={"compile": False, "head_bias": 0.0}))
    return module


def fake_inputs(recipe: Recipe, micro: int) -> torch.Tensor:
    """A micro-batch for the recipe's network: pictures [B, 3, H, W], or token ids [B, T]. Fake under `fake_mode`."""
    if isinstance(recipe.model, TextSection):
        return torch.zeros(micro, recipe.model.tokens, dtype=torch.long)
    side = recipe.data.image_size
    return torch.zeros(micro, 3, side, side).contiguous(memory_format=torch.channels_last)


class MemoryTracker(TorchDispatchMode):
    """Counts while it is on: bytes alive (now, at most) of what was made or seen, and collectives, which it answers.

    DDP reads the result of its all-reduce, which PyTorch's fake process group has none of; so that is answered here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # of the whole tensors, by kind of collective
        self.peak = 0
        self._alive: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._answers: list[dist.Work] = []

    def watch(self, *tensors: torch.Tensor) -> None:
        """Count what was made before."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._alive[local.untyped_storage()] = None
        self.peak = max(self.peak, self.alive)

    @property
    def alive(self) -> int:
        """Bytes. Summed anew each time, because FSDP frees storages by making them empty."""
        return sum(storage.nbytes() for storage in list(self._alive))

    def reset(self) -> None:
        """Count calls, bytes and the peak from here on."""
        self.calls.clear()
        self.bytes.clear()
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self._count(function, [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)])
            if function is torch.ops.c10d.allreduce_.default:
                self._answers.append(_Answer(args[0]))
                return args[0], self._answers[-1].boxed()
        try:
            result = function(*args, **(kwargs or {}))
        except DataDependentOutputException:  # an engine asks whether the gradient is finite: it is
            return True
        self.watch(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)))
        return result

    def _count(self, function: Any, tensors: list[torch.Tensor]) -> None:
        kind = _COLLECTIVES.get(function._opname)
        if kind and tensors:
            self.calls[kind] += 1
            self.bytes[kind] += max(t.numel() * t.element_size() for t in tensors)


class Work(TorchDispatchMode):
    """Products and memory traffic of every operator while it is on, by the type of number that it computes in.

    Traffic is what an operator reads and writes when nothing is fused or cached; views cost nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, int, int]] = []  # precision, FLOPs, bytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if made and not function.is_view:
            count = flop_registry.get(function._overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
            traffic = sum(tensor.numel() * tensor.element_size() for tensor in (*made, *read))
            precision = "bf16" if made[0].dtype is torch.bfloat16 else "fp32"
            self.operators.append((precision, flops, traffic))
        return result


class _Answer(dist.Work):
    """A collective that has been done: its tensors are what they were."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self._future: torch.futures.Future = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout=None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        return self._future


def _like(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
