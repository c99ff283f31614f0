"""Whether training goes well: losses and gradient norms, step by step, and what is to be done about them."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.recipe.faults import FaultsSection

_REMEMBERED, _ENOUGH = 100, 20  # losses that a spike is held against, and without which none is called one
_SCALINGS = 20  # times in a row that half precision may halve its loss scale: from 2^16 it is below 1 then


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


class Health:
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
        """`Diverged` if more steps in a row have failed than `faults.skips`, or `allowed`."""
        if len(self._failed) <= (self.section.skips if allowed is None else allowed):
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
        if self.section.spike is None or len(self._losses) < _ENOUGH:
            return None
        mean = statistics.fmean(self._losses)
        deviation = math.sqrt(statistics.fmean((loss - mean) ** 2 for loss in self._losses))
        return mean if loss > mean + self.section.spike * deviation else None


def _event(name: str, step: Look, **values: Any) -> dict[str, Any]:
    return {"step": step.step, "split": "event", "event": name, "loss": _number(step.loss), **values}


def _number(value: float) -> float | str:
    """JSON has no NaN."""
    return value if math.isfinite(value) else str(value)
