"""The training loop: when to step, log, evaluate, save, roll back and stop."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from pipeline.data.grid import training_grid
from pipeline.data.loader import Batch, TrainLoader
from pipeline.data.random import DROPOUT, key
from pipeline.distributed.signals import StopRequest
from pipeline.distributed.topology import SharedFlag, mean_over_ranks, seed_device
from pipeline.distributed.watchdog import Watchdog
from pipeline.engine import Engine, StepResult
from pipeline.recipe import Recipe
from pipeline.recipe.data import DataSection
from pipeline.run.checkpoint import Position
from pipeline.run.log import RunLog
from pipeline.run.metrics import peak_memory
from pipeline.run.run_dir import ResumeState
from pipeline.run.saving import Saver
from pipeline.training.faults import Diverged, HealthMonitor, Rollback, StepMetrics
from pipeline.training.schedule import Schedule


@dataclass
class LogInterval:
    """The steps since the last line of metrics.jsonl. Their metrics stay on the device until `collect` is called."""

    pending: list[tuple[int, int, StepResult, int]] = field(default_factory=list)  # step, data step, result, replaced
    collected: list[StepMetrics] = field(default_factory=list)
    replaced: int = 0  # samples that replaced unreadable ones, on all ranks
    began: float = field(default_factory=time.perf_counter)
    waited: float = 0.0  # seconds spent waiting for batches
    paused: float = 0.0  # seconds of evaluation and saving, which are not training time

    def collect(self) -> list[StepMetrics]:
        """Return the metrics, over all ranks, of the steps since the last call. Every rank calls it."""
        steps, data_steps, results, replaced = zip(*self.pending, strict=True)
        losses = torch.stack([result.loss for result in results]).double()
        norms = torch.stack([result.grad_norm for result in results]).double()
        counts = torch.tensor(replaced, dtype=torch.float64, device=losses.device)
        *values, counts = mean_over_ranks(torch.stack([losses, norms, counts]))
        columns = (column.tolist() for column in values)
        metrics = [StepMetrics(*row) for row in zip(steps, data_steps, *columns, strict=True)]
        self.replaced += round(counts.sum().item() * dist.get_world_size())
        self.pending.clear()
        self.collected += metrics
        return metrics

    def summary(self, global_batch: int) -> dict[str, float] | None:
        """Return the means over the steps that did not fail; None if all failed."""
        finite = [step for step in self.collected if math.isfinite(step.loss)]
        if not finite:
            return None
        seconds = time.perf_counter() - self.began - self.paused
        norms = [step.grad_norm for step in finite if math.isfinite(step.grad_norm)]
        return {
            "loss": statistics.fmean(step.loss for step in finite),
            **({"grad_norm": statistics.fmean(norms)} if norms else {}),
            "images_per_s": len(finite) * global_batch / seconds,
            "data_wait": self.waited / seconds,
            **({"replaced": self.replaced} if self.replaced else {}),
        }


@dataclass(frozen=True)
class RunContext:
    """Where the loop writes its metrics and checkpoints, and what may interrupt it."""

    log: RunLog
    saver: Saver
    rollback: Rollback
    watchdog: Watchdog
    stop: StopRequest


class Loop:
    """Trains from the step of `resume` to the schedule's last. Every rank has one, and all take the same decisions.

    `step` counts optimizer steps; `data_step` counts steps of the data order, which a rollback skips some of.
    `evaluate` returns the figures of the evaluation split, on every rank.
    """

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        schedule: Schedule,
        evaluate: Callable[[], dict[str, float]],
        context: RunContext,
        resume: ResumeState,
    ):
        self.recipe, self.engine, self.schedule, self.context = recipe, engine, schedule, context
        self.step, self.data_step = resume.step, context.rollback.next_used(resume.data_step)
        self.stop_flag = SharedFlag()
        self.health = HealthMonitor(recipe.faults, recipe.train.precision == "fp16")
        self._evaluate = evaluate
        self._began = time.perf_counter() - resume.seconds
        self._interval = LogInterval()
        self._result: dict[str, Any] | None = None  # of the last evaluation

    def fit(self, loader: TrainLoader) -> dict[str, Any] | None:
        """Train to the last step and return the last evaluation; None if the run was asked to stop before.

        Raises `Diverged` when steps fail and no rollback is left, and `RunError` if the last checkpoint is not saved.
        """
        stopped = False
        while self.step < self.schedule.last_step and not stopped:
            try:
                stopped = self._fit_range(loader)
            except Diverged as diverged:
                self._roll_back(diverged)
        self.stop_flag.finish()
        self.context.saver.finish_all_ranks()
        if self.step < self.schedule.last_step:
            return None
        if self._result is None:  # resumed from the last step's checkpoint: only the evaluation is left
            self._evaluate_and_log()
        assert self._result is not None
        return self._result | {"step": self.step, "seconds": round(time.perf_counter() - self._began, 3)}

    def advance(self, batches: Iterable[Batch], steps: int) -> bool:
        """Train for `steps` steps; log, evaluate and save when due. Return whether the run is to stop.

        `batches` yields `train.grad_accum_steps` micro-batches a step, of the data order from `data_step` on; the
        steps must not pass the end of an epoch or a skipped range. Raises `Diverged`.
        """
        iterator = iter(batches)
        for _ in range(steps):
            epoch = self.data_step // self.schedule.steps_per_epoch
            self._train_step(iterator)
            if self._after_step(epoch):
                return True
        return False

    def _fit_range(self, loader: TrainLoader) -> bool:
        """Train to the end of the epoch, or to the next skipped range; return whether the run is to stop."""
        epoch, first_step = divmod(self.data_step, self.schedule.steps_per_epoch)
        end = (epoch + 1) * self.schedule.steps_per_epoch
        skipped = self.context.rollback.next_skipped(self.data_step)
        if skipped is not None:
            end = min(end, skipped)
        with loader.batches(epoch, first_step) as batches:
            return self.advance(batches, min(end - self.data_step, self.schedule.last_step - self.step))

    def _train_step(self, iterator: Iterator[Batch]) -> None:
        section, log = self.recipe.train, self.context.log
        asked = time.perf_counter()
        batches = list(islice(iterator, section.grad_accum_steps))
        self._interval.waited += time.perf_counter() - asked
        data, images = self.recipe.data, self.recipe.log.images
        if self.step == 0 and log.writer and images and isinstance(data, DataSection):
            log.writer.add_image(training_grid(batches[0], images, data), step=1)
        seed = key(section.seed, self.step, dist.get_rank(), DROPOUT)
        seed_device(self.engine.device, int(seed))  # for dropout in timm's networks
        result = self.engine.step(batches, self.schedule.lr(self.step))
        self.step += 1
        self._interval.pending.append((self.step, self.data_step, result, sum(b.replaced for b in batches)))
        self.data_step = self.context.rollback.next_used(self.data_step + 1)
        self.context.watchdog.beat()

    def _after_step(self, epoch: int) -> bool:
        """Log, evaluate and save what is due; return whether the run is to stop."""
        section = self.recipe.train
        stopping, ending = self.stop_flag.poll(self.context.stop.requested), self.step == self.schedule.last_step
        ends_epoch = self.data_step >= (epoch + 1) * self.schedule.steps_per_epoch
        evaluating = ending or (ends_epoch and (epoch + 1) % self.recipe.eval.every_epochs == 0)
        due = self.step % section.save_every_steps == 0 if section.save_every_steps else ends_epoch
        saving = stopping or ending or due or (evaluating and section.keep_best is not None)
        logging = stopping or ending or self.step % self.recipe.log.every == 0
        if saving or logging:  # no step is saved that has not been checked
            for event in self.health.check_steps(self._interval.collect()):
                self.context.log.report_event(event)
            self.health.raise_if_diverged(allowed=0 if ending else None)
        if logging:
            self._log_interval()
        paused = time.perf_counter()
        if evaluating or saving:
            self.engine.average_buffers()
        if evaluating:
            self._evaluate_and_log()
        if saving and not self.health.failing:
            self._save(self._result if evaluating else None)
        self._report_save_failure(self.context.saver.failure())
        self._interval.paused += time.perf_counter() - paused
        return stopping

    def _log_interval(self) -> None:
        """Write a line for the interval's steps, and start the next interval."""
        line = self._interval.summary(self.recipe.train.global_batch)
        self._interval = LogInterval()
        norm, memory = self.engine.weight_norm(), peak_memory(self.engine.device)
        if line is not None:
            lr = self.schedule.lr(self.step - 1)
            self._write({**line, "lr": lr, "split": "train", "weight_norm": norm, "memory_gb": memory})

    def _evaluate_and_log(self) -> None:
        """Evaluate, and write the line; figures that are not finite are an event, and null in the result."""
        figures = self._evaluate()
        self._result = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        bad = {name: str(value) for name, value in figures.items() if not math.isfinite(value)}
        if bad:
            self.context.log.report_event({"step": self.step, "split": "event", "event": "evaluation_failed", **bad})
        else:
            self._write({**figures, "split": "eval"})

    def _write(self, values: dict[str, Any]) -> None:
        epoch = round(self.step / self.schedule.steps_per_epoch, 4)
        self.context.log.write({"step": self.step, "epoch": epoch, **values})

    def _save(self, figures: dict[str, Any] | None) -> None:
        """Start saving a copy of the state."""
        position = Position(
            step=self.step,
            data_step=self.data_step,
            seconds=time.perf_counter() - self._began,
            scalars=self.engine.scalars(),
            figures={name: value for name, value in (figures or {}).items() if value is not None},
            recipe=self.recipe.model_dump(mode="json"),
        )
        self._report_save_failure(self.context.saver.begin(self.engine.local_shards(), position))

    def _report_save_failure(self, reason: str | None) -> None:
        """Warn of a save that failed, as on a full disk; the next save tries again."""
        if reason is not None:
            event = {"step": self.step, "split": "event", "event": "save_failed", "reason": reason}
            self.context.log.report_event(event)

    def _roll_back(self, diverged: Diverged) -> None:
        """Resume from the last checkpoint, and skip the data of the steps that failed."""
        context, last_step = self.context, self.step
        self._report_save_failure(context.saver.finish())
        origin = context.rollback.exclude(diverged)
        self.engine.load(origin.load(verify=False))
        self.step, self.data_step = origin.position.step, context.rollback.next_used(origin.position.data_step)
        self._interval, self._result = LogInterval(), None
        self.health.reset()
        context.log.rewind(self.step)
        event = {"step": self.step, "split": "event", "event": "rollback", "from": last_step}
        event |= {"skipped_ranges": [diverged.first, diverged.stop], "reason": str(diverged)}
        context.log.report_event(event)
        context.watchdog.beat()
