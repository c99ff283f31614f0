"""The training loop: when to step, log, evaluate, save, roll back and stop."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from widemix.data.batches import Batch
from widemix.data.grid import training_grid
from widemix.data.loader import TrainLoader
from widemix.data.random import DROPOUT, key
from widemix.distributed.requests import Request, SharedRequests
from widemix.distributed.topology import random_states, seed_device
from widemix.distributed.watchdog import Watchdog
from widemix.engine import Engine
from widemix.recipe.data import DataSection
from widemix.run.checkpoint import Position
from widemix.run.log import RunLog
from widemix.run.metrics import peak_memory
from widemix.run.records import Gains
from widemix.run.run_dir import Run
from widemix.run.saving import Saver
from widemix.run.start_log import StartRecord, read_starts
from widemix.training.faults import Diverged, GradientWatch, HealthMonitor, Rollback
from widemix.training.misclassified import Misclassified
from widemix.training.profile import Profiler
from widemix.training.schedule import Cadence, LogInterval, Schedule


class Loop:
    """Trains from the step at which `run` starts to the schedule's last. Every rank has one; all decide alike.

    `step` counts optimizer steps; `data_step` counts steps of the data order, which a rollback skips some of.

    evaluate: returns the metrics of the evaluation split, on every rank.
    peak_fraction: FLOPs of training on a sample, over the FLOP/s of all GPUs at their peak.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        schedule: Schedule,
        evaluate: Callable[[], dict[str, float]],
        *,
        log: RunLog,
        saver: Saver,
        rollback: Rollback,
        watchdog: Watchdog,
        requests: SharedRequests,
        peak_fraction: float | None = None,
        profiler: Profiler | None = None,
        mistakes: Misclassified | None = None,
        start_record: StartRecord | None = None,
    ):
        recipe, resume = run.recipe, run.start
        self.run, self.recipe, self.engine, self.schedule = run, recipe, engine, schedule
        self.log, self.saver, self._rollback, self._watchdog = log, saver, rollback, watchdog
        self.requests, self._peak_fraction = requests, peak_fraction
        self._profiler, self._mistakes, self._start_record = profiler, mistakes, start_record
        self.step, self.data_step = resume.step, rollback.next_used(resume.data_step)
        self._cadence = Cadence(recipe.train, recipe.eval)
        self._asked = Request.NONE  # of any rank, not yet met
        position = resume.checkpoint.position if resume.checkpoint else None
        self._evaluation_due = position is not None and position.evaluation_due  # since before this start
        self.health = HealthMonitor(recipe.faults, recipe.train.precision == "fp16")
        self._watch, self._failed = GradientWatch(engine.device), False  # whether the step that is due has
        self._evaluate = evaluate
        self._began = time.perf_counter() - resume.seconds
        self._is_first_step = True
        self._interval = LogInterval(position.unlogged) if position else LogInterval()
        self._gains = Gains.of(recipe.train, position.gains if position else None)
        self._result: dict[str, Any] | None = None  # of the last evaluation

    def fit(self, loader: TrainLoader) -> dict[str, Any] | None:
        """Train to the last step and return the last evaluation; None if the run was asked to stop before.

        It ends before where `train.patience_epochs` says so.

        Raises `Diverged` when steps fail and no rollback is left, and `RunError` if the last checkpoint is not saved.
        """
        if self._evaluation_due:
            began = time.perf_counter()
            self._evaluate_and_log()
            self._save(self._result)
            self._interval.paused += time.perf_counter() - began
        stopped = False
        while self.step < self.schedule.last_step and not stopped and not self._ends_early:
            try:
                stopped = self._fit_range(loader)
            except Diverged as diverged:
                self._roll_back(diverged)
        self.requests.finish()
        self.saver.finish_all_ranks()
        if stopped:
            self.log.record({"step": self.step, "split": "event", "event": "stopped"})
            return None
        if self._result is None:  # resumed from the last step's checkpoint: only the evaluation is left
            self._evaluate_and_log()
        assert self._result is not None
        early = {"ended_early": self._gains.model_dump()} if self._gains and self._ends_early else {}
        return self._result | {"step": self.step, "seconds": round(time.perf_counter() - self._began, 3), **early}

    @property
    def _ends_early(self) -> bool:
        return self._gains is not None and self._gains.end_run(self.recipe.train)

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
        skipped = self._rollback.next_skipped(self.data_step)
        if skipped is not None:
            end = min(end, skipped)
        with loader.batches(epoch, first_step) as batches:
            return self.advance(batches, min(end - self.data_step, self.schedule.last_step - self.step))

    def _train_step(self, iterator: Iterator[Batch]) -> None:
        if self._profiler:
            self._profiler.before(self.step)
        section, log = self.recipe.train, self.log
        asked = time.perf_counter()
        batches = list(islice(iterator, section.grad_accum_steps))
        self._interval.waited += time.perf_counter() - asked
        if self._start_record:
            self._start_record.got_batch()
        data, images = self.recipe.data, self.recipe.log.images
        if self.step == 0 and log.writer and images and isinstance(data, DataSection):
            log.writer.add_image("first_batch", training_grid(batches[0], images, data), step=1)
        seed = key(section.seed, self.step, dist.get_rank(), DROPOUT)
        seed_device(self.engine.device, int(seed))  # for dropout in timm's networks
        seeded = random_states(self.engine.device) if self._is_first_step else []
        self.engine.wants_block_norms = self.recipe.log.block_norms and self._logs_after(self.step + 1)
        result = self.engine.step(batches, self.schedule.lr(self.step))
        if self._is_first_step and not all(map(torch.equal, seeded, random_states(self.engine.device))):
            self._note_randomness()
        self._is_first_step = False
        self.step += 1
        if self._start_record:
            self._start_record.stepped(self.step)
        self._interval.pending.append((self.step, self.data_step, result, sum(b.replaced for b in batches)))
        self._failed = self._watch.failed(result.grad_norm)
        self.data_step = self._rollback.next_used(self.data_step + 1)
        self._watchdog.beat()

    def _note_randomness(self) -> None:
        """Say that the network has drawn random numbers, which belong to a rank's micro-batch and to no sample."""
        text = (
            f"{self.run.folder}: the network draws random numbers, as for dropout, for each rank and micro-batch: "
            "with another number of ranks or train.grad_accum_steps its losses differ by more than rounding"
        )
        before = [ranks for start in read_starts(self.run.folder)[-1:] if (ranks := start.get("ranks"))]
        if before and before != [dist.get_world_size()]:
            text += f", as from now on: its last start had {before[0]} rank{'s' * (before[0] > 1)}"
        self.log.note(text)

    def _after_step(self, epoch: int) -> bool:
        """Log, evaluate and save what is due; return whether the run is to stop."""
        section = self.recipe.train
        own = self._cadence.requests() | (Request.STOP if self.run.stop.requested else Request.NONE)
        self._asked |= self.requests.poll(own)
        stopping, ending = Request.STOP in self._asked, self.step == self.schedule.last_step
        ends_epoch = self.data_step >= (epoch + 1) * self.schedule.steps_per_epoch
        evaluating = ending or (ends_epoch and self._cadence.evaluates(epoch, self._asked))
        due = self._cadence.saves(self.step, ends_epoch, self._asked)
        saving = stopping or ending or due or (evaluating and section.keep_best is not None)
        logging = self._logs_after(self.step)
        if saving or logging or self._failed:  # no step is saved that has not been checked
            for event in self.health.check_steps(self._interval.collect()):
                self.log.report_event(event)
            if ending:  # steps that failed were as many as may be skipped, and have changed nothing
                self.health.reset()
        if logging:
            self._log_interval()
        paused = time.perf_counter()
        if evaluating or saving:
            self.engine.average_buffers()
        self._evaluation_due = evaluating and stopping  # a stop leaves no time for it: the next start evaluates
        if evaluating and not stopping:
            self._evaluate_and_log()
            self._asked &= ~Request.EVALUATE
        if saving and not self.health.failing:
            self._save(self._result if evaluating and not stopping else None)
            self._asked &= ~Request.SAVE
        if not (stopping or ending or self._ends_early):  # the last save's failure ends the run: finish_all_ranks
            self._report_save_failure(self.saver.failure())
        self._interval.paused += time.perf_counter() - paused
        return stopping

    def _logs_after(self, step: int) -> bool:
        """Whether a line is written after this many steps."""
        return step == self.schedule.last_step or step % self.recipe.log.every == 0

    def _log_interval(self) -> None:
        """Write a line for the interval's steps, and start the next interval."""
        line = self._interval.summary(self.recipe.train.global_batch)
        norms = dict(zip(self.engine.blocks(), self._interval.block_norms, strict=False))
        self._interval = LogInterval()
        norm, memory = self.engine.weight_norm(), peak_memory(self.engine.device)
        if line is not None:
            if self._peak_fraction:
                line["mfu"] = line["images_per_s"] * self._peak_fraction
            line |= {f"grad_norm/{name}": value for name, value in norms.items()}
            line |= {"lr": self.schedule.lr(self.step - 1), "weight_norm": norm, "memory_gib": memory}
            # Of a last step that was skipped norms may not be finite: JSON has no such number.
            self._write({name: value for name, value in line.items() if math.isfinite(value)} | {"split": "train"})

    def _evaluate_and_log(self) -> None:
        """Evaluate, and write the line; metrics that are not finite are an event, and null in the result."""
        metrics = self._evaluate()
        self._cadence.evaluated()
        if self._mistakes:
            self._mistakes.write(self.step)
        self._result = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._evaluation_due = False
        bad = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
        if bad:
            self.log.report_event({"step": self.step, "split": "event", "event": "evaluation_failed", **bad})
        else:
            self._write({**metrics, "split": "eval"})
        if self._gains and not self._ends_early:
            epoch = self.data_step // self.schedule.steps_per_epoch
            self._gains = self._gains.after(self._result, self.step, epoch, self.recipe.train.patience_gain)
            if self._ends_early:
                event = {"step": self.step, "split": "event", "event": "ended_early"}
                self.log.record(event | self._gains.model_dump())

    def _write(self, values: dict[str, Any]) -> None:
        epoch = round(self.step / self.schedule.steps_per_epoch, 4)
        self.log.write({"step": self.step, "epoch": epoch, **values})

    def _save(self, metrics: dict[str, Any] | None) -> None:
        """Start saving a copy of the state."""
        position = Position(
            step=self.step,
            data_step=self.data_step,
            seconds=time.perf_counter() - self._began,
            scalars=self.engine.scalars(),
            metrics={name: value for name, value in (metrics or {}).items() if value is not None},
            evaluation_due=self._evaluation_due,
            gains=self._gains,
            unlogged=self._interval.steps,
            data=self.run.start.data,
            prepared=self.run.start.prepared,
            recipe=self.recipe.model_dump(mode="json"),
        )
        self._report_save_failure(self.saver.begin(self.engine.local_shards(), position))

    def _report_save_failure(self, reason: str | None) -> None:
        """Warn of a save that failed, as on a full disk; the next save tries again."""
        if reason is not None:
            event = {"step": self.step, "split": "event", "event": "save_failed", "reason": reason}
            self.log.report_event(event)

    def _roll_back(self, diverged: Diverged) -> None:
        """Resume from the last checkpoint, and skip the data of the steps that failed."""
        last_step = self.step
        self._report_save_failure(self.saver.finish())
        try:
            origin = self._rollback.exclude(diverged)
        except Diverged as final:
            self.log.record({"step": last_step, "split": "event", "event": "diverged", "reason": str(final)})
            raise
        self.engine.load(origin.load(verify=False))
        self.step, self.data_step = origin.position.step, self._rollback.next_used(origin.position.data_step)
        self._interval, self._result = LogInterval(origin.position.unlogged), None
        self._gains = Gains.of(self.recipe.train, origin.position.gains)
        self.health.reset()
        self._watch.reset()
        self.log.rewind(self.step)
        event = {"step": self.step, "split": "event", "event": "rollback", "from": last_step}
        event |= {"skipped_ranges": [diverged.first, diverged.stop], "reason": str(diverged)}
        self.log.report_event(event)
        self._watchdog.beat()
