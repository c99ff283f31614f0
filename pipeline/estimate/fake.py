"""Networks of fake tensors, which have a shape and no memory, and dispatch modes that record what a step does.

Fake tensors are PyTorch's (`torch._subclasses.FakeTensorMode`): operators compute the shape of their result only.
"""

import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from widemix.engine import apply_training_options
from widemix.models.registry import build_model, empty_inputs
from widemix.models.sw_mlp.sparse import SparseLinear
from widemix.optim.dtensor import local_part
from widemix.recipe import Recipe
from widemix.recipe.sections import TrainSection
from widemix.training.finetune import UNUSED, freeze, unused_parameters

GPU = torch.device("cuda")

# Kinds of collectives, by the name of their operator in torch.ops.c10d.
_COLLECTIVES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
}


def fake_mode() -> FakeTensorMode:
    """Return the mode within which tensors are created fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_network(
    recipe: Recipe, mode: FakeTensorMode, dtype: torch.dtype | None = None, device: torch.device = GPU
) -> nn.Module:
    """Return the recipe's network, uncompiled, of fake tensors on the CPU.

    dtype: of its floating-point tensors (default: as built, fp32).
    device: by whose rule masked weights are multiplied.
    """
    with torch.device("meta"):
        module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes).to(dtype)
    unused = unused_of(recipe, module)
    fakes: dict[int, torch.Tensor] = {}
    with mode:
        for submodule in module.modules():
            if isinstance(submodule, SparseLinear):
                submodule.rule_device = device
            for table in (submodule._parameters, submodule._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = fakes.setdefault(id(tensor), _like(tensor))  # type: ignore[assignment]
    train = recipe.train.model_copy(update={"compile": False, "fp8": False, "head_bias": 0.0})
    prepare_to_train(module, train, torch.device("cpu"), unused)
    return module


def unused_of(recipe: Recipe, module: nn.Module) -> set[str]:
    """Return the parameters that `train.freeze: [unused]` means, before the network is prepared."""
    inputs = empty_inputs(recipe.model, 2, recipe.data.image_size)
    return unused_parameters(module, inputs) if UNUSED in recipe.train.freeze else set()


def prepare_to_train(module: nn.Module, train: TrainSection, device: torch.device, unused: set[str]) -> None:
    """Prepare the network in place as a run does, and freeze what `train.freeze` says."""
    apply_training_options(module, train, device)
    if train.freeze:
        freeze(module, train.freeze, unused)


def fake_inputs(recipe: Recipe, micro: int) -> torch.Tensor:
    """Return a micro-batch of zeros: images [B, 3, H, W] or token ids [B, T]; fake tensors within `fake_mode`."""
    inputs = empty_inputs(recipe.model, micro, recipe.data.image_size)
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.ndim == 4 else inputs


class MemoryTracker(TorchDispatchMode):
    """Counts, while it is active, the bytes of tensors that are alive, and calls and bytes of collectives.

    calls, bytes: by kind of collective; bytes are of the whole tensor that is summed, gathered or scattered.
    peak: the most bytes that were alive.

    It returns the result of all-reduces itself: DDP reads it, and PyTorch's fake process group returns none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.peak = 0
        self._alive: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._handles: list[dist.Work] = []

    def watch(self, *tensors: torch.Tensor) -> None:
        """Count tensors that were created before the mode was active."""
        for tensor in tensors:
            self._alive[local_part(tensor).untyped_storage()] = None
        if tensors:  # most operators ask a fake tensor for its device
            self.peak = max(self.peak, self.alive)

    @property
    def alive(self) -> int:
        """Bytes that are alive now. Summed on every call, because FSDP frees storages by resizing them to 0."""
        return sum(storage.nbytes() for ref in self._alive.keyrefs() if (storage := ref()) is not None)

    def reset(self) -> None:
        """Set calls, bytes and peak to 0."""
        self.calls.clear()
        self.bytes.clear()
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self._count(function, [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)])
            if function is torch.ops.c10d.allreduce_.default:
                self._handles.append(_CompletedWork(args[0]))
                return args[0], self._handles[-1].boxed()
        try:
            result = function(*args, **(kwargs or {}))
        except DataDependentOutputException:  # an engine checks that the gradient is finite
            return True
        self.watch(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)))
        return result

    def _count(self, function: Any, tensors: list[torch.Tensor]) -> None:
        kind = _COLLECTIVES.get(function._opname)
        if kind and tensors:
            self.calls[kind] += 1
            self.bytes[kind] += max(t.numel() * t.element_size() for t in tensors)


class OpRecorder(TorchDispatchMode):
    """Records precision, FLOPs and memory traffic (bytes) of every operator while it is active.

    Traffic is what an operator reads and writes, without fusion or caches; views have none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, int, int]] = []  # precision, FLOPs, bytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if written and not function.is_view:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            count = flop_registry.get(function._overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
            traffic = sum(tensor.numel() * tensor.element_size() for tensor in (*written, *read))
            precision = "bf16" if written[0].dtype is torch.bfloat16 else "fp32"
            self.operators.append((precision, flops, traffic))
        return result


class _CompletedWork(dist.Work):
    """The handle of a collective that is complete and has left its tensors unchanged."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self._future: torch.futures.Future = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout=None) -> bool:
        """True at once."""
        return True

    def get_future(self) -> torch.futures.Future:
        """A future that has the tensors."""
        return self._future


def _like(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
