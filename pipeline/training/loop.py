"""When to step, log, evaluate, save, go back and stop."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from pipeline.data.grid import training_grid
from pipeline.data.loader import Batches, EvalLoader, TrainLoader
from pipeline.data.random import NETWORK, key
from pipeline.distributed.signals import StopRequest
from pipeline.distributed.topology import Agreement, Topology, mean_over_ranks, on_main, seed_device
from pipeline.distributed.watchdog import Watch
from pipeline.engine import Engine, StepResult
from pipeline.recipe import Recipe
from pipeline.recipe.data import DataSection
from pipeline.run.checkpoint import Position
from pipeline.run.metrics import Record, peak_memory, weight_norm
from pipeline.run.progress import Progress
from pipeline.run.saving import Saver
from pipeline.training.evaluate import evaluate_engine
from pipeline.training.faults import Diverged, HealthMonitor, Look, Rollback


@dataclass
class Window:
    """The steps since the last line of metrics.jsonl; their figures stay on the device until they are asked for."""

    pending: list[tuple[int, int, StepResult, int]] = field(default_factory=list)  # of steps not looked at
    seen: list[Look] = field(default_factory=list)
    replaced: int = 0  # samples that stand in for damaged ones, on all ranks
    began: float = field(default_factory=time.perf_counter)
    waited: float = 0.0  # seconds in which the step had no batch
    paused: float = 0.0  # seconds of evaluation and saving, which are not training

    def look(self) -> list[Look]:
        """The figures, over all ranks, of the steps that were not looked at yet. Every rank calls it."""
        steps, orders, results, replaced = zip(*self.pending, strict=True)
        losses = torch.stack([result.loss for result in results]).double()
        norms = torch.stack([result.grad_norm for result in results]).double()
        counts = torch.tensor(replaced, dtype=torch.float64, device=losses.device)
        *figures, counts = mean_over_ranks(torch.stack([losses, norms, counts]))
        found = [Look(*row) for row in zip(steps, orders, *(values.tolist() for values in figures), strict=True)]
        self.replaced += round(counts.sum().item() * dist.get_world_size())
        self.pending.clear()
        self.seen += found
        return found

    def summary(self, global_batch: int) -> dict[str, float] | None:
        """Means over the steps that did not fail; None if all did."""
        good = [look for look in self.seen if math.isfinite(look.loss)]
        if not good:
            return None
        seconds = time.perf_counter() - self.began - self.paused
        norms = [look.norm for look in good if math.isfinite(look.norm)]
        return {
            "loss": statistics.fmean(look.loss for look in good),
            **({"grad_norm": norms[-1]} if norms else {}),
            "images_per_s": len(self.seen) * global_batch / seconds,
            "data_wait": self.waited / seconds,
            **({"replaced": self.replaced} if self.replaced else {}),
        }


@dataclass
class Run:
    """What the loop works on."""

    recipe: Recipe
    topology: Topology
    engine: Engine
    train: TrainLoader
    evaluation: EvalLoader
    schedule: Callable[[int], float]
    record: Record | None  # on rank 0
    progress: Progress
    saver: Saver
    rollback: Rollback
    watch: Watch
    last: int  # the step to end with


class Loop:
    """Trains from a step to the end. Every rank has one, and all decide alike."""

    def __init__(self, run: Run, step: int, order: int, seconds: float, stop: StopRequest):
        self.run, self.step, self.order, self.stop = run, step, order, stop
        self.began = time.perf_counter() - seconds
        self.agreement = Agreement()
        self.health = HealthMonitor(run.recipe.faults, run.recipe.train.precision == "fp16")
        self.window = Window()
        self.result: dict[str, Any] | None = None  # of the last evaluation

    def fit(self) -> dict[str, Any] | None:
        """The last evaluation, or None when stopped on purpose with a checkpoint."""
        run, stopped = self.run, False
        while self.step < run.last and not stopped:
            try:
                stopped = self._stretch()
            except Diverged as diverged:
                self._go_back(diverged)
        self.agreement.finish()
        self._settle()
        if self.step < run.last:
            return None
        if self.result is None:  # nothing was left to do but to measure
            self._evaluate()
        assert self.result is not None
        return self.result | {"step": self.step, "seconds": round(time.perf_counter() - self.began, 3)}

    def _stretch(self) -> bool:
        """Train to the end of the epoch, or to where data is left out; whether the run is to stop."""
        run = self.run
        epoch, first_step = divmod(self.order, run.train.steps)
        end = min((epoch + 1) * run.train.steps, run.rollback.next_skipped(self.order))
        with run.train.batches(epoch, first_step) as batches:
            while self.order < end and self.step < run.last:
                self._train(batches)
                if self._between_steps(epoch):
                    return True
        return False

    def _train(self, batches: Batches) -> None:
        """One step."""
        run, section = self.run, self.run.recipe.train
        waited = batches.waited
        parts = list(islice(batches, section.grad_accum_steps))
        self.window.waited += batches.waited - waited
        data, pictures = run.recipe.data, run.recipe.log.images
        if self.step == 0 and run.record and pictures and isinstance(data, DataSection):
            run.record.picture(training_grid(parts[0], pictures, data), step=1)
        seed = key(section.seed, self.step, run.topology.rank, NETWORK)
        seed_device(run.topology.device, int(seed))  # of stochastic depth
        result = run.engine.step(parts, run.schedule(self.step))
        self.step += 1
        self.window.pending.append((self.step, self.order, result, sum(part.replaced for part in parts)))
        self.order = run.rollback.first_kept(self.order + 1)
        run.watch.beat()

    def _between_steps(self, epoch: int) -> bool:
        """Log, evaluate and save what is due; whether the run is to stop."""
        run, section = self.run, self.run.recipe.train
        stopping, ending = self.agreement.poll(self.stop.requested), self.step == run.last
        ends_epoch = self.order >= (epoch + 1) * run.train.steps
        evaluating = ending or (ends_epoch and (epoch + 1) % run.recipe.eval.every_epochs == 0)
        due = self.step % section.save_every_steps == 0 if section.save_every_steps else ends_epoch
        saving = stopping or ending or due or (evaluating and section.keep_best is not None)
        logging = stopping or ending or self.step % run.recipe.log.every == 0
        if saving or logging:  # nothing is saved that has not been looked at
            for event in self.health.look(self.window.look()):
                self._tell(event)
            self.health.check(allowed=0 if ending else None)
        if logging:
            self._log()
        paused = time.perf_counter()
        if evaluating:
            self._evaluate()
        if saving and not self.health.failing:
            self._save(self.result if evaluating else None)
        self._tell_failure(run.saver.failure())
        self.window.paused += time.perf_counter() - paused
        return stopping

    def _log(self) -> None:
        """A line for the window's steps, which are done with."""
        run = self.run
        line = self.window.summary(run.recipe.train.global_batch)
        self.window = Window()
        norm, memory = weight_norm(run.engine.module), peak_memory(run.topology.device)
        if line is not None:
            lr = run.schedule(self.step - 1)
            self._write({**line, "lr": lr, "split": "train", "weight_norm": norm, "memory_gb": memory})

    def _evaluate(self) -> None:
        run = self.run
        self.result = evaluate_engine(run.engine, run.evaluation, run.recipe.data.num_classes, run.watch.beat)
        self._write({**self.result, "split": "eval"})

    def _write(self, values: dict[str, Any]) -> None:
        line = {"step": self.step, "epoch": round(self.step / self.run.train.steps, 4), **values}
        self._record(line)
        self.run.progress.show(line)

    def _record(self, line: dict[str, Any]) -> None:
        failed = self.run.record.write(line) if self.run.record else None
        if failed is not None:
            self.run.progress.say(f"warning: {failed}; its lines wait until it can, training goes on")

    def _tell(self, event: dict[str, Any]) -> None:
        """Something that a person may want to know, in the record and on the screen."""
        self._record(event)
        words = (f"{name} {value}" for name, value in event.items() if name not in ("split", "event"))
        self.run.progress.say(f"warning: {event['event']}: {', '.join(words)}; training goes on")

    def _save(self, figures: dict[str, Any] | None) -> None:
        """Hand a copy of the state to the saver; the training goes on."""
        run = self.run
        position = Position(
            step=self.step,
            order=self.order,
            seconds=time.perf_counter() - self.began,
            scalars=run.engine.scalars(),
            figures=figures or {},
            recipe=run.recipe.model_dump(mode="json"),
        )
        self._tell_failure(run.saver.begin(run.engine.local_shards(), position))

    def _tell_failure(self, reason: str | None) -> None:
        """A save that fails within a run (a full disk) is told; the next one tries again."""
        if reason is not None:
            self._tell({"step": self.step, "split": "event", "event": "save failed", "reason": reason})

    def _settle(self) -> None:
        """Wait for the last save, which must succeed. No rank ends before: a launcher might then kill the others."""
        run = self.run
        failed = run.saver.finish()
        failed = on_main(run.topology, lambda: failed)
        if failed is not None:
            raise OSError(failed)

    def _go_back(self, diverged: Diverged) -> None:
        """To the last checkpoint, leaving out the data of the steps that failed."""
        run, came_from = self.run, self.step
        self._tell_failure(run.saver.finish())
        found = run.rollback.to(diverged)
        run.engine.load(found.load(verify=False))
        self.step, self.order = found.position.step, run.rollback.first_kept(found.position.order)
        self.window, self.result = Window(), None
        self.health.forget()
        if run.record:
            run.record.rewind(self.step)
        skipped_ranges = [diverged.first, diverged.stop]
        event = {
            "step": self.step,
            "split": "event",
            "event": "rollback",
            "from": came_from,
            "skipped_ranges": skipped_ranges,
        }
        self._tell({**event, "reason": str(diverged)})
        run.watch.beat()
