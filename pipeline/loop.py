"""When to step, log, evaluate, save and stop."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from pipeline import checkpoint
from pipeline.checkpoint import Position
from pipeline.data.grid import training_grid
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.data.random import NETWORK, key
from pipeline.engine import Engine, StepResult
from pipeline.evaluate import evaluate_engine
from pipeline.metrics import Record, peak_memory, weight_norm
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.recipe.data import DataSection
from pipeline.signals import StopRequest
from pipeline.topology import Agreement, Topology, mean_over_ranks, wait_for_all


class Diverged(RuntimeError):
    """The loss or the gradient is no longer a number."""


@dataclass
class Window:
    """The steps since the last line of metrics.jsonl, on the device until they are asked for."""

    first_step: int
    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)  # samples that stand in for damaged ones, times the ranks
    began: float = field(default_factory=time.perf_counter)
    waited: float = 0.0  # seconds in which the step had no batch
    paused: float = 0.0  # seconds of evaluation and saving, which are not training

    def add(self, result: StepResult, waited: float, replaced: int) -> None:
        self.losses.append(result.loss)
        self.replaced.append(replaced)
        self.norms.append(result.grad_norm)
        self.waited += waited

    def summary(self, global_batch: int, fp16: bool) -> dict[str, float]:
        """Means over steps and ranks; `Diverged` names the first step that was not finite. Every rank calls it."""
        losses, norms = torch.stack(self.losses).double(), torch.stack(self.norms).double()
        replaced = torch.tensor(self.replaced, dtype=torch.float64, device=losses.device)
        losses, norms, replaced = mean_over_ranks(torch.stack([losses, norms, replaced]))
        finite = losses.isfinite() if fp16 else losses.isfinite() & norms.isfinite()  # fp16 skips such a gradient
        if not finite.all():
            bad = int((~finite).nonzero()[0])
            what = "gradient norm" if losses[bad].isfinite() else "loss"
            value = norms[bad] if losses[bad].isfinite() else losses[bad]
            raise Diverged(
                f"the {what} is {value:g} at step {self.first_step + bad + 1}, and nothing was saved since; "
                "lower optim.lr, lengthen schedule.warmup_epochs or set optim.clip_grad"
            )
        seconds = time.perf_counter() - self.began - self.paused
        return {
            "loss": losses.mean().item(),
            "grad_norm": norms[-1].item(),
            "images_per_s": len(losses) * global_batch / seconds,
            "data_wait": self.waited / seconds,
            **({"replaced": round(replaced.sum().item())} if replaced.any() else {}),
        }


@dataclass
class Run:
    """What one call of the loop works on."""

    recipe: Recipe
    folder: Path
    topology: Topology
    engine: Engine
    train: TrainLoader
    evaluation: EvalLoader
    schedule: Callable[[int], float]
    record: Record | None  # on rank 0
    progress: Progress
    last: int  # the step to end with


def fit(run: Run, step: int, seconds: float, stop: StopRequest) -> dict[str, Any] | None:
    """Train from `step` to the end; the last evaluation, or None when stopped on purpose with a checkpoint."""
    section, per_epoch = run.recipe.train, run.train.steps
    last = run.last
    began, agreement = time.perf_counter() - seconds, Agreement()
    window = Window(step)
    result: dict[str, Any] | None = None

    while step < last:
        epoch = step // per_epoch
        with run.train.batches(epoch, first_step=step % per_epoch) as batches:
            while step < min((epoch + 1) * per_epoch, last):
                waited = batches.waited
                parts = list(islice(batches, section.accumulation))
                waited = batches.waited - waited
                lr = run.schedule(step)
                if step == 0 and run.record and run.recipe.log.images and isinstance(run.recipe.data, DataSection):
                    run.record.picture(training_grid(parts[0], run.recipe.log.images, run.recipe.data), step=1)
                torch.manual_seed(key(section.seed, step, run.topology.rank, NETWORK))  # of stochastic depth
                replaced = run.topology.world * sum(part.replaced for part in parts)
                window.add(run.engine.step(parts, lr), waited, replaced)
                step += 1

                stopping = agreement.poll(stop.requested)
                ends_epoch = step % per_epoch == 0
                saving = (
                    stopping or step == last or (step % section.save_every == 0 if section.save_every else ends_epoch)
                )
                logging = stopping or step == last or step % run.recipe.log.every == 0
                if saving or logging:  # nothing is saved that a loss has not been found finite for
                    line = window.summary(section.global_batch, section.precision == "fp16")
                if logging:
                    _log(run, step, line | {"lr": lr, "split": "train"})
                    window = Window(step)
                paused = time.perf_counter()
                if step == last or (ends_epoch and (epoch + 1) % run.recipe.eval.every == 0):
                    result = _evaluate(run)
                    _log(run, step, result | {"split": "eval"})
                if saving:
                    _save(run, step, time.perf_counter() - began, must=stopping or step == last)
                window.paused += time.perf_counter() - paused
                if stopping and step < last:
                    agreement.finish()
                    wait_for_all()  # a launcher that sees one rank end may kill rank 0 while it still writes
                    return None
    agreement.finish()
    if result is None:  # nothing was left to do but to measure
        result = _evaluate(run)
    return result | {"step": step, "seconds": round(time.perf_counter() - began, 3)}


def _evaluate(run: Run) -> dict[str, float]:
    return evaluate_engine(run.engine, run.evaluation, run.recipe.data.num_classes)


def _log(run: Run, step: int, values: dict[str, Any]) -> None:
    line = {"step": step, "epoch": round(step / run.train.steps, 4), **values}
    if values["split"] == "train":
        line |= {"weight_norm": weight_norm(run.engine.module), "memory_gb": peak_memory(run.topology.device)}
    if run.record:
        run.record.write(line)
    run.progress.show(line)


def _save(run: Run, step: int, seconds: float, must: bool) -> None:
    """A save that fails within a run (a full disk) is told, and the next one tries again; the last must succeed."""
    state = run.engine.state()
    if not run.topology.is_main:
        return
    position = Position(step=step, seconds=seconds, scalars=state.scalars, recipe=run.recipe.model_dump(mode="json"))
    try:
        checkpoint.save(run.folder, state, position, run.recipe.train.keep)
    except OSError as error:
        if must:
            raise
        run.progress.say(f"warning: {error}; training goes on")
