"""When to save and evaluate: by steps, epochs and the clock of rank 0.

The clock decides only when a run saves and evaluates. Neither changes any number of the training, so loss curves do
not depend on it.
"""

import math
import time

from widemix.distributed.requests import Request
from widemix.recipe.eval import EvalSection
from widemix.recipe.train import TrainSection


class Cadence:
    """The keys of a recipe that say when to save and evaluate. All ranks ask it the same; see `SharedRequests`."""

    def __init__(self, train: TrainSection, evaluation: EvalSection):
        self._train, self._eval = train, evaluation
        self._timers = {
            request: Timer(minutes)
            for request, minutes in ((Request.SAVE, train.save_minutes), (Request.EVALUATE, evaluation.every_minutes))
            if minutes is not None
        }

    def requests(self) -> Request:
        """What this rank's clock asks for now: to evaluate once, until it is `evaluated`. Only rank 0's is shared."""
        due = Request.NONE
        for request, timer in self._timers.items():
            if timer.expired():
                due |= request
                if request == Request.SAVE:
                    timer.restart()
        return due

    def evaluated(self) -> None:
        """Count the minutes between evaluations from now."""
        if timer := self._timers.get(Request.EVALUATE):
            timer.restart()

    def saves(self, step: int, ends_epoch: bool, requests: Request) -> bool:
        """Whether to save after this step, counted from 1."""
        steps = self._train.save_every_steps
        if steps is None and self._train.save_minutes is None:
            return ends_epoch
        return Request.SAVE in requests or (steps is not None and step % steps == 0)

    def evaluates(self, epoch: int, requests: Request) -> bool:
        """Whether to evaluate at the end of this epoch, counted from 0."""
        in_time = self._eval.every_minutes is None or Request.EVALUATE in requests
        return in_time and (epoch + 1) % self._eval.every_epochs == 0


def rarely_kept(train: TrainSection, steps_per_epoch: int) -> str | None:
    """A warning where a run does not save at all steps that `train.keep_every_steps` divides; None elsewhere."""
    every, saved = train.keep_every_steps, train.save_every_steps or steps_per_epoch
    if every is None or every % saved == 0:
        return None
    kept = math.lcm(every, saved)
    return f"train.keep_every_steps {every}: a run that saves every {saved} steps keeps those of every {kept}"


class Timer:
    """Expires once, so many minutes after its start or `restart`."""

    def __init__(self, minutes: float):
        self._seconds = 60 * minutes
        self.restart()

    def restart(self) -> None:
        """Count the minutes from now."""
        self._due = time.monotonic() + self._seconds

    def expired(self) -> bool:
        """Return whether the minutes have passed, for the first time."""
        expired = time.monotonic() >= self._due
        if expired:
            self._due = math.inf
        return expired
