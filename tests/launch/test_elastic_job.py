"""Nodes of a job that meet before each attempt to train. A real Slurm whose node fails is in test_slurm.py."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from tests.conftest import System
from widemix.launch.local import free_ports
from widemix.launch.slurm.elastic import GRACE_S, Meeting, train_elastic

DIED, SLEEP = "died", time.sleep


class Job:
    """Threads as nodes: `events[attempt]` says what each node's attempt ends with: "died", "failed" or nothing.

    The clock stands still until all nodes that live have come: none is late because this machine is busy.
    """

    def __init__(self, nodes: int, sizes: list[int], events: list[dict[int, str]], absent=(), restarts=2):
        port = free_ports(60_000 + os.getpid())["rendezvous"]
        self.events, self.absent, self.trained = events, absent, []
        wait = {"timeout": timedelta(seconds=60), "wait_for_workers": False}
        self.stores = [TCPStore("127.0.0.1", port, is_master=node == 0, **wait) for node in range(nodes)]
        self.now, self.attempt, self.living = 0.0, 0, set(range(nodes)) - set(absent)
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(nodes) as pool:
            System(patch)({"time.monotonic": lambda: self.now, "time.sleep": self._sleep})
            meetings = [Meeting(store, node, nodes, sizes) for node, store in enumerate(self.stores)]
            jobs = [pool.submit(self._run, meeting, node, restarts) for node, meeting in enumerate(meetings)]
            self.ends = [job.exception(600) for job in jobs]

    def _sleep(self, seconds: float) -> None:
        """In the thread of node 0, which waits for the others, and seldom looks."""
        SLEEP(0.01)
        if all(self.stores[0].check([f"{self.attempt}/{node}"]) for node in list(self.living)):
            self.now += GRACE_S / 4

    def _run(self, meeting: Meeting, node: int, restarts: int) -> None:
        if node in self.absent:
            return
        try:
            self._train(meeting, node, restarts)
        finally:
            self.living.discard(node)

    def _train(self, meeting: Meeting, node: int, restarts: int) -> None:

        def train(attempt: int, size: int) -> None:
            self.trained.append((attempt, node, size))
            if node == 0:
                self.attempt = attempt + 1
            event = self.events[attempt].get(node)
            if event == DIED:
                raise KeyboardInterrupt  # which nothing catches
            if event == "failed" and node == 1:  # which may learn of it as a torchrun that is gone
                raise RendezvousConnectionError("lost")
            if event == "failed":
                raise ChildFailedError("train", {0: ProcessFailure(0, 1, 1, "none")})

        train_elastic(meeting, node, train, restarts)

    def sizes(self) -> list[tuple[int, ...]]:
        """The nodes of each attempt."""
        attempts = 1 + max((attempt for attempt, _, _ in self.trained), default=-1)
        return [tuple(sorted(node for a, node, _ in self.trained if a == attempt)) for attempt in range(attempts)]


def fails(*nodes: int, died: int | None = None) -> dict[int, str]:
    return dict.fromkeys(nodes, "failed") | ({} if died is None else {died: DIED})


CRASHES, LOST = [fails(0, 1)] * 9, [fails(0, 1, 2, died=3), fails(0, 1, died=2)]
FAILED = ChildFailedError
LEFT = "{} of 5 nodes are left; 2 of them train"


@pytest.mark.parametrize(
    ("nodes", "sizes", "events", "options", "trained", "ends", "said"),
    [
        (4, [4, 2], [{}], {}, [(0, 1, 2, 3)], [None] * 4, []),
        (5, [5, 2], [fails(0, 1, 2, 4, died=3), fails(0, died=1), {}], {}, [(0, 1, 2, 3, 4), (0, 1), (0, 2)],
         [None, DIED, None, DIED, None], [LEFT.format(4), LEFT.format(3)]),
        (3, [3, 2], [fails(0, 1, died=2), fails(0, died=1)], {}, [(0, 1, 2), (0, 1)], [FAILED, DIED, DIED],
         ["1 nodes are left, and --elastic needs 2"]),
        (2, [2, 1], CRASHES, {}, [(0, 1)] * 3, [FAILED, None], []),
        *((4, [4, 3, 2], [*LOST, *CRASHES], {"restarts": n},
           [(0, 1, 2, 3), (0, 1, 2), *[(0, 1)] * (1 + n)], [FAILED, None, DIED, DIED], []) for n in (0, 1)),
        (3, [3, 2], [{}], {"absent": (2,)}, [(0, 1)], [None] * 3, []),
    ],
    ids=["no failure", "as many as divide", "too few", "crashes", "no restarts", "one restart", "one never came"],
)  # fmt: skip
def test_an_elastic_job_trains_on_the_nodes_left(nodes, sizes, events, options, trained, ends, said, capsys):
    """A lost node costs no restart, a crash does; with too few nodes the failure is the job's."""
    job = Job(nodes, sizes, events, **options)
    assert job.sizes() == trained
    assert all(size == len(trained[attempt]) for attempt, _, size in job.trained)
    kinds = {DIED: KeyboardInterrupt, None: type(None)}
    assert [type(end) for end in job.ends] == [kinds.get(end, end) for end in ends]
    output = capsys.readouterr().out
    assert [text for text in said if text not in output] == []
    assert not options.get("absent") or job.now > GRACE_S


class Store(dict):
    """In place of the first node's store, in which nodes appear by a clock that goes on while it is polled."""

    def __init__(self, arrivals: dict[int, float], system: System):
        self.arrivals, self.now, self.timeouts = arrivals, 0.0, []
        system({"time.monotonic": lambda: self.now, "time.sleep": self.sleep})
        self.set_timeout = self.timeouts.append
        self.set, self.get = self.__setitem__, self.__getitem__

    def sleep(self, seconds):
        self.now += 1.0

    def check(self, keys):
        [key] = keys
        return key in self or self.arrivals[int(key.partition("/")[2])] <= self.now


@pytest.mark.parametrize(
    ("attempt", "arrivals", "members", "seconds"),
    [
        (0, [0, 0, 0, 0], [0, 1, 2, 3], 0),
        (0, [0, 500, 700, 900], [0, 1, 2, 3], 900),  # enough at 500 s: the others have as long again
        (0, [0, 500, 700, 1002], [0, 1], 1001),
        (0, [0, 5, 60, 9999], [0, 1], 66),  # a minute at least
        (0, [0, 5, 66, 60], [0, 1, 2, 3], 66),
        (1, [0, 9999, 9999, 60], [0, 3], 61),  # no longer, however long they staged
        (2, [0, 9999, 62, 60], [0, 3], 61),
        (1, [0, 9999, 9999, 9999], [], 61),
    ],
)
def test_how_long_nodes_are_waited_for(attempt, arrivals, members, seconds, system):
    store = Store(dict(enumerate(arrivals)), system)
    meeting = Meeting(store, 0, 4, [4, 2])
    assert meeting.gather(attempt) == members
    assert store.now == seconds
    assert store[f"{attempt}/0"] == "here"
    assert store.timeouts == [timedelta(days=30)]  # of those that wait for the first node to decide


def test_the_first_node_alone_decides_who_trains(system):
    store = Store({}, system)
    store["3/members"] = "[0, 2]"
    first, other = (Meeting(store, node, 3, [3, 2]) for node in (0, 2))
    assert other.gather(3) == [0, 2]
    assert store["3/2"] == "here"
    other.end(3)
    assert "4/members" not in store
    first.end(3)
    assert store["4/members"] == "[]"
