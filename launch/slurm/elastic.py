"""A job that goes on with the nodes that are left after one has failed: `widemix submit --elastic`.

Before each attempt to train the nodes meet in a store of the first node, which decides how many of them take part:
the most by which the batch divides. The others wait for the next attempt. The job is lost only with its first node,
on which Slurm runs its script too.
"""

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING

from widemix.terminal import print

if TYPE_CHECKING:  # importing torch takes seconds
    from torch.distributed import Store

GRACE_S = 60.0  # for nodes that notice later that an attempt has failed: ranks end within a minute
_POLL_S = 0.2
_LONG = timedelta(days=30)


class Meeting:
    """Agree with the other nodes of a job on who trains, as one of `nodes`.

    store: a client of the first node's. sizes: the numbers of nodes that may train, the largest first.
    """

    def __init__(self, store: "Store", node: int, nodes: int, sizes: Sequence[int]):
        self._store, self._node, self._nodes, self._sizes = store, node, nodes, sizes
        store.set_timeout(_LONG)

    def gather(self, attempt: int) -> list[int]:
        """Wait for the other nodes and return those that take part; none if it is over, or too few are left."""
        self._store.set(f"{attempt}/{self._node}", "here")
        if self._node == 0:
            present = self._await_others(attempt)
            size = next((size for size in self._sizes if size <= len(present)), 0)
            if not size:
                print(f"{len(present)} nodes are left, and --elastic needs {self._sizes[-1]}", flush=True)
            elif size < self._nodes:
                print(f"{len(present)} of {self._nodes} nodes are left; {size} of them train", flush=True)
            self._decide(attempt, present[:size])
        return json.loads(self._store.get(f"{attempt}/members"))

    def end(self, attempt: int) -> None:
        """Tell the nodes that wait for the next attempt that there is none."""
        if self._node == 0:
            self._decide(attempt + 1, [])

    def _await_others(self, attempt: int) -> list[int]:
        """Return all nodes; without those that are not here in time, once there are enough to train.

        How long staging takes nobody knows: before the first attempt the others have as long again.
        """
        began, enough = time.monotonic(), None
        while True:
            present = [node for node in range(self._nodes) if self._store.check([f"{attempt}/{node}"])]
            now = time.monotonic()
            if enough is None and (attempt or len(present) >= self._sizes[-1]):
                enough = now
            if len(present) == self._nodes or (
                enough is not None and now - enough > max(GRACE_S, 0 if attempt else enough - began)
            ):
                return present
            time.sleep(_POLL_S)

    def _decide(self, attempt: int, members: list[int]) -> None:
        self._store.set(f"{attempt}/members", json.dumps(members))


def train_elastic(meeting: Meeting, node: int, train: Callable[[int, int], None], restarts: int) -> None:
    """Train in as many attempts as it takes. Raises what an attempt raised if no other one is allowed.

    train: `train(attempt, size)` trains on this node, which is one of `size`, and raises if a rank or a node failed.
    restarts: how many attempts may fail without having lost a node.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    before: list[int] = []
    failure: Exception | None = None
    for attempt in count():
        members = meeting.gather(attempt)
        restarts -= members == before
        if not members or restarts < 0:
            meeting.end(attempt)
            if failure is not None and node == 0:
                raise failure
            return
        before = members
        if node not in members:
            continue
        try:
            train(attempt, len(members))
        except (ChildFailedError, RendezvousError) as error:
            failure = error
        else:
            meeting.end(attempt)
            return
