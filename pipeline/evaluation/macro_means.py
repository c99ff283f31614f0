"""Metrics that are a mean over columns: over classes for recall, F1 and average precision, over targets for R2.

A class that no sample has, or a target that is the same for all samples, has no such value. It is left out of the
mean: counted as 0, the best predictor there can be would not reach the best metric.
"""

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_average_precision
from torchmetrics.utilities import dim_zero_cat


class MacroMean(Metric):
    """A mean over columns, computed by all ranks together; nan where no column has a value."""

    undefined: tuple[int, ...] = ()  # columns without a value, known after `compute`

    def compute(self) -> Tensor:
        """Return the mean, float64 []."""
        values = self.values()
        self.undefined = tuple(values.isnan().nonzero().flatten().tolist())
        return values[~values.isnan()].mean()

    def values(self) -> Tensor:
        """Return the value of each column, float64 [N]; nan where it has none."""
        raise NotImplementedError


class ClassCounts(MacroMean):
    """A mean over classes of what follows from these counts of each: none for a class that would be 0 / 0."""

    def __init__(self, classes: int):
        super().__init__()
        self.samples: Tensor
        self.predicted: Tensor
        self.correct: Tensor
        for name in ("samples", "predicted", "correct"):
            self.add_state(name, torch.zeros(classes, dtype=torch.float64, device="cpu"), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits [B, classes], labels int64 [B]."""
        guesses = logits.argmax(1)
        for state, column in (
            (self.samples, labels),
            (self.predicted, guesses),
            (self.correct, labels[guesses == labels]),
        ):
            state += column.bincount(minlength=len(state))


class BalancedAccuracy(ClassCounts):
    """The fraction of a class's samples that are predicted so."""

    def values(self) -> Tensor:
        """Return the recall of each class; none of one that no sample has."""
        return self.correct / self.samples


class MacroF1(ClassCounts):
    """The harmonic mean of a class's recall and precision."""

    def values(self) -> Tensor:
        """Return F1 of each class; none of one that no sample has, and none is predicted to have."""
        return 2 * self.correct / (self.samples + self.predicted)


class AveragePrecision(MacroMean):
    """Average precision by class; none for a class that no sample has."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor]
        self.targets: list[Tensor]
        for name in ("scores", "targets"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, scores: Tensor, targets: Tensor) -> None:
        """Add a batch, empty ones too: scores float64 [B, N]; 0 or 1, int64 [B, N]."""
        self.scores.append(scores)
        self.targets.append(targets)

    def values(self) -> Tensor:
        """Return the average precision of each class."""
        columns = zip(dim_zero_cat(self.scores).T, dim_zero_cat(self.targets).T, strict=True)
        values = [
            binary_average_precision(scores, targets, validate_args=False)
            if targets.any()
            else scores.new_tensor(torch.nan)
            for scores, targets in columns
        ]
        return torch.stack(values)


class R2(MacroMean):
    """The coefficient of determination by target; none for a target that does not vary."""

    def __init__(self, targets: int):
        super().__init__()
        self.moments: Tensor
        # Count, mean, sum of squared deviations from it, sum of squared errors, lowest, highest.
        empty = torch.tensor([0, 0, 0, 0, torch.inf, -torch.inf], dtype=torch.float64, device="cpu")
        self.add_state("moments", empty.repeat(targets, 1).T, dist_reduce_fx=_merged)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch that is not empty: float64 [B, N]."""
        mean = targets.mean(0)
        spread, errors = (targets - mean).square().sum(0), (outputs - targets).square().sum(0)
        count, ends = torch.full_like(mean, len(targets)), (targets.amin(0), targets.amax(0))
        self.moments = _merged(torch.stack([self.moments, torch.stack([count, mean, spread, errors, *ends])]))

    def values(self) -> Tensor:
        """Return R2 of each target; minus infinity where an output is not finite."""
        _, _, spread, errors, lowest, highest = self.moments
        errors = errors.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return torch.where(highest > lowest, 1 - errors / spread, torch.nan)


def _merged(parts: Tensor) -> Tensor:
    """The moments of parts of a sample together (Chan et al. 1979): [P, 6, N] -> [6, N]."""
    count, mean, spread, errors, lowest, highest = parts.unbind(1)
    total = count.sum(0)
    centre = (count * mean).sum(0) / total.clamp(min=1)
    spread = spread + count * (mean - centre).square()
    return torch.stack([total, centre, spread.sum(0), errors.sum(0), lowest.amin(0), highest.amax(0)])
