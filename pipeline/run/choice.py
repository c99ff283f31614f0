"""Which checkpoint of a run a command takes: its newest, the best by `train.keep_best`, or that of a step."""

import sys
from dataclasses import dataclass
from pathlib import Path

from widemix.errors import InputError
from widemix.metrics import show_metric
from widemix.run import checkpoint
from widemix.terminal import print

LAST, BEST = "last", "best"


@dataclass(frozen=True)
class Best:
    """The best checkpoint that a run has kept. metric: that of its recipe's `train.keep_best`, with its prefix."""

    path: Path
    step: int
    metric: str
    value: float

    def sentence(self) -> str:
        """Return its step and its metric, such as `step 120, top-1 93.10 %`."""
        return f"step {self.step}, {show_metric(self.metric, self.value)}"


def best_of(run_dir: Path) -> Best | None:
    """Return the best checkpoint of a run folder; None without `train.keep_best`, or before an evaluation."""
    try:
        newest = checkpoint.newest(run_dir)
        metric = str(newest.position.recipe["train"]["keep_best"] or "") if newest else ""
        found = checkpoint.best(run_dir, metric) if metric else None
    except (InputError, KeyError, TypeError):  # damaged: whoever loads it says so
        return None
    return Best(found.path, found.position.step, metric, found.position.metrics[metric]) if found else None


def choose(run_dir: Path, which: str = LAST, note: bool = True) -> Path:
    """Return the checkpoint folder of a run that `which` names: last, best, or a step.

    With `note` a line on stderr says what was taken, where the best is another. `InputError` if there is none.
    """
    newest, best = checkpoint.find(run_dir), best_of(run_dir)
    if newest.path == run_dir:
        if which != LAST:
            raise InputError(f"--checkpoint {which}: is for a run folder; {run_dir} is one checkpoint")
        return run_dir
    if which == BEST:
        if best is None:
            raise InputError(f"--checkpoint best: {run_dir} has none, since its recipe sets no train.keep_best")
        if note:
            print(f"{run_dir}: the best checkpoint, {best.sentence()}", file=sys.stderr)
        return best.path
    if which == LAST:
        if note and best and best.path != newest.path:
            other = f"--checkpoint best takes {best.sentence()}"
            print(f"{run_dir}: the last checkpoint, step {newest.position.step}; {other}", file=sys.stderr)
        return newest.path
    steps = [int(path.name) for path in checkpoint.complete_checkpoints(run_dir)]
    if not which.isdecimal() or int(which) not in steps:
        known = [LAST, *([BEST] if best else []), *map(str, steps)]
        raise InputError(f"--checkpoint {which}: no such checkpoint of {run_dir}; it has {', '.join(known)}")
    return run_dir / "checkpoints" / f"{int(which):08d}"
