"""`train.patience_epochs`: a run ends early whose metric of `train.keep_best` gains nothing more.

What is known of the gains so far is in each checkpoint, so that a run that goes on ends where it would have ended.
"""

import math
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from widemix.metrics import METRICS, show_metric
from widemix.recipe.train import TrainSection


class Gains(BaseModel):
    """The best value of a metric so far, and the epochs (ended ones) of that and of the last evaluation."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    metric: str  # with the prefix ema_ that of the averaged weights
    best: float | None = None
    best_step: int = 0
    best_epoch: int = 0
    last_epoch: int = 0

    @classmethod
    def of(cls, train: TrainSection, known: "Gains | None") -> "Gains | None":
        """What a run starts with that goes on from a checkpoint with `known`; None without patience."""
        if train.patience_epochs is None or train.keep_best is None:
            return None
        return known if known and known.metric == train.keep_best else cls(metric=train.keep_best)

    def after(self, metrics: Mapping[str, float | None], step: int, epoch: int, least: float) -> "Gains":
        """With another evaluation, of which a gain below `least` does not count."""
        value = metrics.get(self.metric)
        sign = 1 if METRICS[self.metric.removeprefix("ema_")].higher else -1
        gain = -math.inf if value is None else math.inf if self.best is None else sign * (value - self.best)
        if gain > 0 and gain >= least:
            return Gains(metric=self.metric, best=value, best_step=step, best_epoch=epoch, last_epoch=epoch)
        return self.model_copy(update={"last_epoch": epoch})

    def end_run(self, train: TrainSection) -> bool:
        """Whether a run of this section ends after the last evaluation."""
        patience, waited = train.patience_epochs, self.last_epoch - self.best_epoch
        return patience is not None and waited >= patience and self.metric == train.keep_best

    def sentence(self) -> str:
        """Return when and why a run has ended early."""
        if self.best is None:
            return f"ended early, after epoch {self.last_epoch}: its {self.metric} was never finite"
        average = " of the averaged weights" if self.metric.startswith("ema_") else ""
        best = show_metric(self.metric.removeprefix("ema_"), self.best)
        at = f"epoch {self.best_epoch}, step {self.best_step}"
        return f"ended early, after epoch {self.last_epoch}: best {best}{average} ({at})"
