"""Our order of samples in FFCV's `Loader`, and what an operation learns from it: the seed and the epoch."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from ffcv.pipeline.operation import Operation
from ffcv.traversal_order.base import TraversalOrder

from widemix.api.loader_arguments import process_topology
from widemix.arguments import Epoch, Size, Whole, check_arguments
from widemix.data.order import RandomOrder, rank_slices, steps_per_epoch
from widemix.errors import InputError

_orders: "weakref.WeakValueDictionary[int, Order]" = weakref.WeakValueDictionary()  # by id of the loader's metadata


class Order(TraversalOrder):
    """widemix's order for `ffcv.Loader(order=Order(seed))`: each epoch another permutation by (seed, epoch).

    Step k of all ranks has the same samples for every number of ranks. rank, world: by default those of
    torch.distributed, or of the launcher's variables; FFCV's `distributed` stays False. Without `drop_last` ranks may
    differ by a batch.
    """

    @check_arguments
    def __init__(self, seed: Whole = 0, rank: Whole | None = None, world: Size | None = None):
        topology = process_topology(rank, world, "cpu")
        self.seed, self.rank, self.world = seed, topology.rank, topology.world
        self.epoch = np.zeros(1, np.int64)  # that is loaded
        self.first = 0, 0  # epoch and step that `resume` has set

    def __call__(self, loader: Any) -> "Order":
        """The order of one loader; FFCV calls this."""
        bound = copy.copy(self)
        bound.loader, bound.epoch = loader, np.zeros(1, np.int64)
        _orders[id(loader.reader.metadata)] = bound
        return bound

    def sample_order(self, epoch: int) -> np.ndarray:
        """The samples of this rank, in order: uint64."""
        self.epoch[0] = epoch
        indices, batch, drop_last = self.loader.indices, self.loader.batch_size, self.loader.drop_last
        order = RandomOrder(len(indices), batch * self.world, self.seed)
        steps = range(self.first[1] if epoch == self.first[0] else 0, self._steps(drop_last))
        parts = [
            places[rank_slices(len(places), self.rank, self.world, 1)[0]]
            for places in map(order.step, [epoch] * len(steps), steps)
        ]
        return indices[np.concatenate([np.empty(0, np.int64), *parts])].astype(np.uint64)

    def _steps(self, drop_last: bool) -> int:
        return steps_per_epoch(len(self.loader.indices), self.loader.batch_size * self.world, drop_last)


@check_arguments
def resume(loader: Any, epoch: Epoch, step: Whole) -> None:
    """Begin the next iteration of an FFCV loader that has an `Order` with this step of this epoch."""
    if not isinstance(loader.traversal_order, Order):
        raise InputError("widemix.ffcv.resume: the loader has no widemix.ffcv.Order")
    loader.traversal_order.first, loader.next_epoch = (epoch, step), epoch


class Keyed(Operation):
    """An operation whose random numbers are a function of (seed, epoch, sample)."""

    order: Order

    def accept_globals(self, metadata: np.ndarray, memory_read: Callable) -> None:
        """Find the loader's order, which knows seed and epoch."""
        super().accept_globals(metadata, memory_read)
        order = _orders.get(id(metadata.base))
        if order is None or order.loader.reader.metadata is not metadata.base:
            name = type(self).__name__
            raise InputError(
                f"widemix.ffcv.{name} is random by epoch: give the loader order=widemix.ffcv.Order(seed=...)"
            )
        self.order = order
