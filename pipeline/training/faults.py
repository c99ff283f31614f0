"""Steps that fail: losses and gradient norms watched step by step, and going back to the last checkpoint without the
data that ruined the steps since."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.distributed.topology import Topology, on_main
from pipeline.recipe.faults import FaultsSection
from pipeline.run import checkpoint
from pipeline.run.checkpoint import Checkpoint
from pipeline.run.run_dir import write_skipped_ranges

_REMEMBERED, _ENOUGH = 100, 20  # losses that a spike is held against, and without which none is called one
_SCALINGS = 20  # times in a row that half precision may halve its loss scale: from 2^16 it is below 1 then
_ADVICE = "lower optim.lr, lengthen schedule.warmup_epochs or set optim.clip_grad"


class Diverged(RuntimeError):
    """More steps in a row than a run puts up with have failed; `first` and `stop` are theirs in the data's order."""

    def __init__(self, text: str, first: int, stop: int):
        super().__init__(text)
        self.first, self.stop = first, stop


@dataclass(frozen=True)
class Look:
    """A step, its place in the data's order, and its loss and gradient norm over all ranks."""

    step: int
    order: int
    loss: float
    norm: float


class HealthMonitor:
    """Looks at every step in turn; the same on every rank, as their figures are."""

    def __init__(self, section: FaultsSection, fp16: bool):
        self.section, self.fp16 = section, fp16
        self._failed: list[Look] = []  # in a row, up to the last step seen
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._scalings = 0  # of half precision, in a row

    @property
    def failing(self) -> bool:
        """Whether the last step failed, so that nothing should be saved."""
        return bool(self._failed)

    def forget(self) -> None:
        """Begin anew, from an earlier step."""
        self._failed.clear()
        self._losses.clear()
        self._scalings = 0

    def look(self, steps: Sequence[Look]) -> list[dict[str, Any]]:
        """Lines of the record about steps that failed or stand out; `Diverged` when too many failed in a row."""
        events = []
        for step in steps:
            if self._fails(step):
                self._failed.append(step)
                events.append(_event("skipped", step, grad_norm=_number(step.norm)))
                continue
            self.check()
            self._failed.clear()
            expected = self._spikes(step.loss)
            if expected is not None:
                events.append(_event("spike", step, expected=round(expected, 6)))
            self._losses.append(step.loss)
        self.check()
        return events

    def check(self, allowed: int | None = None) -> None:
        """`Diverged` if more steps in a row have failed than `faults.max_skipped_steps`, or `allowed`."""
        if len(self._failed) <= (self.section.max_skipped_steps if allowed is None else allowed):
            return
        first, last = self._failed[0], self._failed[-1]
        what, value = ("gradient norm", first.norm) if math.isfinite(first.loss) else ("loss", first.loss)
        raise Diverged(f"the {what} is {value:g} at step {first.step}", first.order, last.order + 1)

    def _fails(self, step: Look) -> bool:
        """Half precision's loss scale is found by gradients that are not finite: a few are no fault."""
        overflows = not math.isfinite(step.norm)
        self._scalings = self._scalings + 1 if overflows and self.fp16 else 0
        return not math.isfinite(step.loss) or (overflows and not 0 < self._scalings <= _SCALINGS)

    def _spikes(self, loss: float) -> float | None:
        """The mean that a loss stands far above, if it does."""
        if self.section.loss_spike_std is None or len(self._losses) < _ENOUGH:
            return None
        mean = statistics.fmean(self._losses)
        deviation = math.sqrt(statistics.fmean((loss - mean) ** 2 for loss in self._losses))
        return mean if loss > mean + self.section.loss_spike_std * deviation else None


class Rollback:
    """Which steps of the data's order a run leaves out, and how often it may still go back. Every rank has one.

    skipped_ranges: first and stop of each stretch, as skipped_ranges.json in the run folder has them, one for each
    time that the run has gone back, before restarts too.
    """

    def __init__(self, run: Path, topology: Topology, most: int, skipped_ranges: Iterable[tuple[int, int]]):
        self._run, self._topology, self._most = run, topology, most
        self.skipped_ranges = list(skipped_ranges)

    def first_kept(self, order: int) -> int:
        """`order`, or the first step after it that is not left out."""
        for first, stop in sorted(self.skipped_ranges):
            if first <= order < stop:
                order = stop
        return order

    def next_skipped(self, order: int) -> float:
        """The first step from `order` on that is left out, or infinity."""
        return min((first for first, _ in self.skipped_ranges if first >= order), default=float("inf"))

    def to(self, diverged: Diverged) -> Checkpoint:
        """Where to go back to, with those steps left out from now on; `Diverged` if there is no way back."""
        if len(self.skipped_ranges) >= self._most:
            times = (
                f"the run has gone back {self._most} times (faults.max_rollbacks)" if self._most else "no way back"
            )
            raise Diverged(f"{diverged}; {times}; {_ADVICE}", diverged.first, diverged.stop)
        found = on_main(self._topology, lambda: self._find(diverged))
        if found is None:
            raise Diverged(f"{diverged}, and nothing was saved before; {_ADVICE}", diverged.first, diverged.stop)
        self.skipped_ranges.append((diverged.first, diverged.stop))
        return found

    def _find(self, diverged: Diverged) -> Checkpoint | None:
        """On rank 0: a sound checkpoint. One whose very next steps failed is part of what went wrong."""
        found, _ = checkpoint.newest_sound(self._run)
        older = len(checkpoint.all_complete(self._run)) > 1
        if found is not None and older and found.position.order == diverged.first:
            checkpoint.retire(found.path)
            found, _ = checkpoint.newest_sound(self._run)
        if found is not None:
            stretches = [*self.skipped_ranges, (diverged.first, diverged.stop)]
            write_skipped_ranges(self._run, stretches)
        return found


def _event(name: str, step: Look, **values: Any) -> dict[str, Any]:
    return {"step": step.step, "split": "event", "event": name, "loss": _number(step.loss), **values}


def _number(value: float) -> float | str:
    """JSON has no NaN."""
    return value if math.isfinite(value) else str(value)
