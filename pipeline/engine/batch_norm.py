"""Batch norms whose statistics are those of the batch over all ranks, on CPUs too.

torch's `SyncBatchNorm` runs on accelerators only. This one is plain tensor code around two all-reduces: at any number
of ranks it computes what `nn.BatchNorm` computes on the ranks' batches together, and so do its gradients and buffers.
Batch norms of frozen parameters stay in evaluation mode. `ForwardBuffers` takes back what a forward pass changed, and
`average_over_ranks` makes ranks agree on it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from widemix.errors import InputError
from widemix.models.registry import build_on_meta
from widemix.recipe import Recipe


class _SumOverRanks(torch.autograd.Function):
    """torch's own, in torch.distributed.nn.functional, warns of its end since 2.15."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The sum, in a new tensor."""
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Each rank's x is in the sum of every rank."""
        total = g.contiguous().clone()
        dist.all_reduce(total)
        return total


def _sum_over_ranks(x: Tensor) -> Tensor:
    return _SumOverRanks.apply(x)


class _OverRanks(nn.modules.batchnorm._BatchNorm):
    """A batch norm over the ranks' batches, which are of one size: [B, C, ...] -> the same shape.

    Mixed into a batch norm, in front of its class. Every rank calls it in the same forward and backward passes.
    Alone, and in evaluation, it is the class's own.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Statistics in float32, whatever x is in; the result in x's type."""
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(x)
        return self._normalised(x)

    def _normalised(self, x: Tensor) -> Tensor:
        dims = [0, *range(2, x.ndim)]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        wide = x.float()
        count = x.numel() // x.shape[1] * dist.get_world_size()
        mean = _sum_over_ranks(wide.sum(dims)) / count
        centred = wide - mean.view(shape)
        variance = _sum_over_ranks(centred.square().sum(dims)) / count
        self._update(mean.detach(), variance.detach() * count / (count - 1))
        scaled = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            scaled = scaled * self.weight.view(shape) + self.bias.view(shape)
        return scaled.to(x.dtype)

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor) -> None:
        """The running statistics, as `nn.BatchNorm1d` keeps them: the variance unbiased."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        fraction = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), fraction)
        self.running_var.lerp_(variance.to(self.running_var.dtype), fraction)


class _ActOverRanks(_OverRanks):
    """The same for timm's batch norm with an activation."""

    drop: nn.Module
    act: nn.Module

    def _normalised(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super()._normalised(x)))


_FORWARD: Any = nn.modules.batchnorm._BatchNorm.forward
_SYNCED: dict[Any, type[nn.Module]] = {_FORWARD: _OverRanks, BatchNormAct2d.forward: _ActOverRanks}


def sync_batch_norms(module: nn.Module) -> None:
    """Take the statistics of a network's batch norms over all ranks, in place; parameters, buffers and names stay.

    `InputError` on several ranks where a norm of the batch is of a class that computes something else.
    """
    for part in module.modules():
        if isinstance(part, (_OverRanks, nn.SyncBatchNorm)) or not depends_on_batch(part):
            continue
        synced = _SYNCED.get(type(part).forward)
        if synced is not None:
            part.__class__ = type(f"Sync{type(part).__name__}", (synced, type(part)), {})
        elif dist.is_initialized() and dist.get_world_size() > 1:
            raise InputError(
                f"train.sync_batch_norm true: {type(part).__name__} has a forward pass of its own, whose statistics "
                "cannot be taken over all ranks; set it to false"
            )


def depends_on_batch(part: nn.Module) -> bool:
    """Whether a module is a batch norm, of torch's or, as EvoNorm-B0, by its weights and its running variance."""
    if isinstance(part, nn.modules.batchnorm._NormBase):
        return isinstance(part, nn.modules.batchnorm._BatchNorm)
    return hasattr(part, "running_var") and any(True for _ in part.parameters(recurse=False))


def has_batch_norms(recipe: Recipe) -> bool:
    """Whether the recipe's network takes statistics of a batch: then its numbers depend on train.grad_accum_steps."""
    network = build_on_meta(recipe.model, recipe.data.image_size, max(1, recipe.data.num_classes))
    return any(depends_on_batch(part) or hasattr(part, "running_var") for part in network.modules())


class Frozen(nn.Module):
    """Mixed into a batch norm whose parameters are frozen: always in evaluation mode, so its statistics stay too."""

    def train(self, mode: bool = True) -> "Frozen":
        """Stay in evaluation mode, whatever `mode` is."""
        return super().train(False)


def freeze_batch_norms(module: nn.Module) -> None:
    """Keep the running statistics of batch norms all of whose parameters are frozen, in place; names stay."""
    for part in module.modules():
        if not isinstance(part, nn.modules.batchnorm._NormBase) or not part.track_running_stats:
            continue
        trained = [parameter.requires_grad for parameter in part.parameters()]
        if trained and not any(trained):
            part.__class__ = type(f"Frozen{type(part).__name__}", (Frozen, type(part)), {})
            part.eval()


Version = tuple[str, torch.Tensor, int]  # a buffer by its name, and how often it was written to in place
_Place = tuple[str, dict[str, torch.Tensor | None], str]  # a buffer's name, its module's buffers and its name there


class ForwardBuffers:
    """The buffers of a network that a forward pass may change, and copies of them to go back to.

    They are those of floating point and the single numbers (counts). Larger tables of integers (permutations, offsets
    between tokens) are indices, which stay as they are. Nothing here waits for the device.
    """

    def __init__(self, module: nn.Module):
        self._groups: dict[tuple[torch.device, torch.dtype], list[_Place]] = defaultdict(list)
        self._tables: list[_Place] = []
        for name, buffer in module.named_buffers():
            owner, _, own = name.rpartition(".")
            place = name, module.get_submodule(owner)._buffers, own  # a forward pass may put another tensor there
            changes = buffer.is_floating_point() or buffer.numel() == 1
            (self._groups[buffer.device, buffer.dtype] if changes else self._tables).append(place)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now, by name."""
        return {name: buffer for group in self._groups.values() for name, buffer in _now(group)}

    def versions(self) -> list[Version]:
        """Return what `changed` compares."""
        return [(name, tensor, tensor._version) for name, tensor in self.tensors().items()]

    def table_versions(self) -> list[Version]:
        """The same of the tables of integers, which a forward pass must not change."""
        return [(name, table, table._version) for name, table in _now(self._tables)]

    def copy(self) -> list[torch.Tensor]:
        """The values that they have now, for `restore`."""
        return [torch.cat([buffer.reshape(-1) for _, buffer in _now(group)]) for group in self._groups.values()]

    @torch.no_grad()
    def restore(self, copies: Sequence[torch.Tensor], unless: torch.Tensor | None = None) -> None:
        """Give them the values of `copies` again, unless the bool tensor [] `unless` is true."""
        if unless is not None:
            now = self.copy()
            copies = [torch.where(unless.to(n.device), n, c) for n, c in zip(now, copies, strict=True)]
        for group, values in zip(self._groups.values(), copies, strict=True):
            buffers = [buffer for _, buffer in _now(group)]
            parts = values.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [part.view(b.shape) for part, b in zip(parts, buffers, strict=True)])


def changed(before: Sequence[Version], after: Sequence[Version]) -> list[str]:
    """The names of the buffers that have been written to in between, or replaced."""
    pairs = zip(before, after, strict=True)
    return [name for (name, *one), (_, *other) in pairs if one[0] is not other[0] or one[1] != other[1]]


def _now(places: Sequence[_Place]) -> list[tuple[str, torch.Tensor]]:
    found = ((name, table[own]) for name, table, own in places)
    return [(name, buffer) for name, buffer in found if buffer is not None]


@torch.no_grad()
def average_over_ranks(tensors: Mapping[str, torch.Tensor]) -> None:
    """Give tensors on one device their means over ranks, where these differ. Every rank calls it.

    `InputError` where numbers that are not of floating point differ.
    """
    if not tensors:
        return
    values = torch.cat([tensor.reshape(-1).double() for tensor in tensors.values()])
    mean, bounds = values / dist.get_world_size(), torch.stack([values, -values])
    dist.all_reduce(mean)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    differ = (bounds[0] != -bounds[1]) | mean.isnan()
    sizes = [tensor.numel() for tensor in tensors.values()]
    parts = zip(tensors.items(), differ.split(sizes), mean.split(sizes), strict=True)
    for (name, tensor), differs, averaged in parts:
        if tensor.is_floating_point():
            tensor.copy_(torch.where(differs.view(tensor.shape), averaged.view(tensor.shape), tensor))
        elif differs.any():
            raise InputError(
                f"model: {name} is another number on each rank after the forward passes of training; use a "
                "floating-point number, which is averaged over ranks"
            )
