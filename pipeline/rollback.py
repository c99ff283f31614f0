"""Going back to the last checkpoint without the data that ruined the steps since."""

from collections.abc import Iterable
from pathlib import Path

from pipeline import checkpoint
from pipeline.checkpoint import Checkpoint
from pipeline.health import Diverged
from pipeline.runfolder import write_left_out
from pipeline.topology import Topology, on_main

_ADVICE = "lower optim.lr, lengthen schedule.warmup_epochs or set optim.clip_grad"


class Retreat:
    """Which steps of the data's order a run leaves out, and how often it may still go back. Every rank has one.

    left_out: first and stop of each stretch, as left_out.json in the run folder has them, one for each time that the
    run has gone back, before restarts too.
    """

    def __init__(self, run: Path, topology: Topology, most: int, left_out: Iterable[tuple[int, int]]):
        self._run, self._topology, self._most = run, topology, most
        self.left_out = list(left_out)

    def first_kept(self, order: int) -> int:
        """`order`, or the first step after it that is not left out."""
        for first, stop in sorted(self.left_out):
            if first <= order < stop:
                order = stop
        return order

    def next_left_out(self, order: int) -> float:
        """The first step from `order` on that is left out, or infinity."""
        return min((first for first, _ in self.left_out if first >= order), default=float("inf"))

    def to(self, diverged: Diverged) -> Checkpoint:
        """Where to go back to, with those steps left out from now on; `Diverged` if there is no way back."""
        if len(self.left_out) >= self._most:
            times = f"the run has gone back {self._most} times (faults.rollbacks)" if self._most else "no way back"
            raise Diverged(f"{diverged}; {times}; {_ADVICE}", diverged.first, diverged.stop)
        found = on_main(self._topology, lambda: self._find(diverged))
        if found is None:
            raise Diverged(f"{diverged}, and nothing was saved before; {_ADVICE}", diverged.first, diverged.stop)
        self.left_out.append((diverged.first, diverged.stop))
        return found

    def _find(self, diverged: Diverged) -> Checkpoint | None:
        """On rank 0: a sound checkpoint. One whose very next steps failed is part of what went wrong."""
        found, _ = checkpoint.newest_sound(self._run)
        older = len(checkpoint.all_complete(self._run)) > 1
        if found is not None and older and found.position.order == diverged.first:
            checkpoint.retire(found.path)
            found, _ = checkpoint.newest_sound(self._run)
        if found is not None:
            stretches = [*self.left_out, (diverged.first, diverged.stop)]
            write_left_out(self._run, stretches)
        return found
