"""A training run as every rank runs it: the only file that knows every part."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from widemix.data.loader import EvalLoader, TrainLoader, check_model
from widemix.data.precision import DTYPES, bf16_warning
from widemix.distributed.requests import SharedRequests, Stopped, StopRequest
from widemix.distributed.startup_timing import StartTimes
from widemix.distributed.topology import (
    keep_freed_memory,
    on_main,
    process_group,
    read_topology,
    set_matmul_precision,
    set_torch_threads,
)
from widemix.distributed.watchdog import Watchdog
from widemix.engine import Engine, apply_training_options, broadcasts_rank0_weights, build_engine, check_engine
from widemix.engine.memory_layout import set_memory_layout
from widemix.errors import Exit, InputError, command, explaining_disk_errors
from widemix.estimate.hardware import peak_fraction
from widemix.evaluation.evaluate import evaluate_engine
from widemix.files import atomic_write
from widemix.metrics import BY_CLASS, main_metric
from widemix.models.registry import build_model, build_on_meta, empty_inputs
from widemix.recipe import Recipe, check_world
from widemix.run.checkpoint import RetentionPolicy
from widemix.run.choice import best_of
from widemix.run.log import RunLog
from widemix.run.records import Gains
from widemix.run.resume import keep_origin
from widemix.run.run_dir import (
    Run,
    acquire_run_dir,
    default_run_dir,
    describe_start,
    write_result,
)
from widemix.run.saving import Saver
from widemix.run.start_log import StartRecord
from widemix.run.trackers import Tracker, check_trackers, open_trackers
from widemix.terminal import print
from widemix.training.balance import balance_loss, suggest_balance
from widemix.training.faults import Rollback
from widemix.training.finetune import UNUSED, freeze, load_init_weights, unused_parameters
from widemix.training.loop import Loop
from widemix.training.misclassified import Misclassified
from widemix.training.profile import Profiler
from widemix.training.schedule import Schedule, build_run_schedule, rarely_kept, suggest_batch

Overrides = Sequence[tuple[str, str]]  # "section.key" and value, as on the command line


def train(
    recipe: Recipe,
    run_dir: Path | None,
    resume: str,
    recipe_path: Path,
    overrides: Overrides = (),
    verbosity: int = 0,
) -> Exit:
    """Train a recipe on the ranks that a launcher has started; every rank calls it.

    recipe: one that `match_folder` has returned. `resume` is "auto", "never" or the path of a run or checkpoint.
    `overrides`, those that the recipe has had, name a run without a folder. `verbosity` is that of `Run`. Returns
    REQUEUE if the run was asked to stop.
    `InputError` if recipe, ranks and run folder do not fit each other.
    """
    times = StartTimes()
    times.end("imports")
    topology = read_topology()
    check_world(recipe, topology.world)
    check_engine(recipe.engine, recipe.optim, recipe.train, topology)
    check_trackers(recipe.log)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        try:
            with stop.at_once():
                store = stack.enter_context(process_group(topology, recipe.engine.timeout_s))
        except Stopped as signal:
            with suppress(OSError):  # nothing reads it, or the log's disk is full
                text = f"stopped by {signal} before all ranks had met; start the run again to train"
                print(f"rank {topology.rank}: {text}", file=sys.stderr, flush=True)
            return Exit.REQUEUE
        times.end("rendezvous")
        set_torch_threads(topology)
        keep_freed_memory(topology.device)
        set_matmul_precision(recipe.train.matmul_precision)
        loader = TrainLoader(recipe.data, recipe.augment, recipe.train, topology)
        eval_loader = EvalLoader(recipe.data, recipe.eval.batch_size, topology, DTYPES[recipe.train.precision])
        check_model(recipe.model, loader, eval_loader)
        schedule = build_run_schedule(recipe.schedule, recipe.optim.lr, recipe.train, loader.steps)
        # Rank 0's name: the clocks of the ranks differ.
        folder = run_dir or on_main(topology, lambda: default_run_dir(recipe_path, overrides))
        start = stack.enter_context(acquire_run_dir(folder, recipe, resume, topology))
        run = Run(recipe, topology, start, store, stop, verbosity)
        if start.ends_early(recipe.train):
            schedule = replace(schedule, last_step=min(start.result_step, schedule.last_step))
        if start.done and start.is_complete(schedule.last_step):
            run.print(f"{folder}: already complete, {main_metric(start.done)}")
            return Exit.DONE
        _check_something_is_left(run, schedule.last_step)
        times.end("data and run folder")

        with explaining_disk_errors():
            loop = _build_loop(run, times, stack, schedule, loader, eval_loader)
            result = loop.fit(loader)
            loop.log.flush()
            return _finish(run, result, loop.health.failing)


def _check_something_is_left(run: Run, last_step: int) -> None:
    """Raise `InputError` where a new run would end before the checkpoint that it is to start from, or a complete one
    can't go on."""
    train, start = run.recipe.train, run.start
    if start.checkpoint and start.is_of_another_run and start.step >= last_step:
        limit = "train.max_steps" if train.max_steps == last_step else "train.epochs"
        limit = "train.patience_epochs" if start.ends_early(train) else limit
        raise InputError(
            f"{start.checkpoint.path}: is at step {start.step}, and this run would end at step {last_step}; raise "
            f"{limit}, or take its weights alone by train.init_from"
        )
    if start.done and not start.checkpoint:
        raise InputError(
            f"{start.run_dir}: is complete, and has no checkpoint from which to go on to step {last_step}; name "
            "another folder with --run-dir"
        )


def _build_loop(
    run: Run, times: StartTimes, stack: ExitStack, schedule: Schedule, loader: TrainLoader, eval_loader: EvalLoader
) -> Loop:
    """Build network, engine and loop, with the state of the checkpoint that the run resumes from.

    stack: closes what the run opens.
    """
    recipe, topology, folder = run.recipe, run.topology, run.folder
    if recipe.train.precision == "bf16" and topology.is_main and (slow := bf16_warning(topology.device)):
        run.warn(slow)
    watchdog = stack.enter_context(Watchdog(folder, topology, run.store.clone(), recipe.faults.hang_timeout_s))
    retention = RetentionPolicy(recipe.train.keep_last, recipe.train.keep_best, recipe.train.keep_every_steps)
    saver = Saver(folder, topology, run.store.clone(), retention, watchdog.note_written)
    rollback = Rollback(folder, topology, recipe.faults.max_rollbacks, run.start.skipped_ranges)

    module = _build_model(run)
    memory_layout = set_memory_layout(module, recipe.engine, recipe.train, topology)
    engine = _build_engine(run, module)
    balance_loss(engine, recipe, loader)
    times.end("network and checkpoint")
    profiler = _build_profiler(run, schedule.last_step)
    if profiler:
        stack.enter_context(profiler)
    if unequal := suggest_balance(recipe):
        run.note(unequal)
    if few := suggest_batch(recipe, len(loader), topology.world):
        run.note(few)
    if rare := rarely_kept(recipe.train, schedule.steps_per_epoch):
        run.warn(rare)
    _begin(run, schedule.last_step)  # after all that may be wrong with the recipe

    trackers: list[Tracker] = []
    on_main(topology, lambda: trackers.extend(open_trackers(run)))
    log = stack.enter_context(RunLog(run, schedule.last_step, trackers))
    log.add_description()
    count = recipe.log.shown_mistakes(recipe.data.targets, recipe.data.num_classes)
    mistakes = Misclassified(count, eval_loader, log) if count else None
    options: dict[str, Any] = {"observe": mistakes.observe} if mistakes else {}
    options["by_class"] = (recipe.train.keep_best or "").removeprefix("ema_") in BY_CLASS
    evaluate = partial(evaluate_engine, engine, eval_loader, recipe.data.num_classes, watchdog.beat, **options)
    watchdog.beat()
    return Loop(
        run,
        engine,
        schedule,
        evaluate,
        log=log,
        saver=saver,
        rollback=rollback,
        watchdog=watchdog,
        requests=SharedRequests(topology, run.store.clone()),
        peak_fraction=peak_fraction(recipe, topology),
        profiler=profiler,
        mistakes=mistakes,
        start_record=StartRecord(run, times, memory_layout),
    )


def _build_model(run: Run) -> nn.Module:
    """Build the model, with new weights or those of train.init_from, or without where the engine gives it some."""
    recipe, topology, section = run.recipe, run.topology, run.recipe.train
    torch.manual_seed(section.seed)
    from_main = broadcasts_rank0_weights(recipe.engine)
    on_meta = from_main and not topology.is_main
    side, classes = recipe.data.image_size, recipe.data.num_classes
    module = (build_on_meta if on_meta else build_model)(recipe.model, side, classes)
    unused = unused_parameters(module, empty_inputs(recipe.model, 2, side)) if UNUSED in section.freeze else set()
    apply_training_options(module, section, topology.device)
    if section.init_from and not run.start.checkpoint:
        load = partial(load_init_weights, module, section.init_from, section.reset_head)
        changes = on_main(topology, load) if from_main else load()
        run.note(f"{run.folder}: starting from {', '.join([section.init_from, *changes])}")
    if section.freeze:
        run.note(f"{run.folder}: {freeze(module, section.freeze, unused):,} weights are frozen")
    return module if on_meta else module.to(topology.device)


def _build_engine(run: Run, module: nn.Module) -> Engine:
    """Build the engine around the model, with the state of the checkpoint that the run resumes from."""
    recipe, origin = run.recipe, run.start.checkpoint
    engine = build_engine(recipe.engine, module, recipe.optim, recipe.train, run.topology)
    if run.topology.is_main and engine.config is not None:
        atomic_write(run.folder / "deepspeed.json", json.dumps(engine.config, indent=1) + "\n")
    if origin:
        engine.load(origin.load(verify=False))  # rank 0 has verified it
    return engine


def _build_profiler(run: Run, last_step: int) -> Profiler | None:
    """Return the profiler of rank 0, if the recipe asks for a trace."""
    steps = run.recipe.train.profile
    if steps is None:
        return None
    first, _, stop = steps.partition(":")
    if int(first) >= last_step:
        raise InputError(f"train.profile {steps}: the run ends after {last_step} steps")
    return Profiler(run.folder, int(first), int(stop)) if run.topology.is_main else None


def _begin(run: Run, last_step: int) -> None:
    """Print where training starts, and remove the result of a run that is to continue, with more steps."""
    start, folder = run.start, run.folder
    if start.done and run.topology.is_main:
        describe_start(folder, run.recipe, start.environment)
        (folder / "done.json").unlink()
        run.print(f"{folder}: was complete after {start.done.get('step')} steps; its done.json is removed")
    instead = "an older checkpoint is used" if start.checkpoint else "there is no older one, so training starts anew"
    for problem in start.problems:
        run.warn(f"{problem}; {instead}")
    if run.topology.is_main and start.is_of_another_run:
        try:
            keep_origin(start)
        except OSError as error:
            run.warn(f"{folder}: the checkpoint that it starts from could not be kept there ({error})")
    begins = f"from {start.checkpoint.path} at step {start.step} to" if start.checkpoint else "for"
    ranks = "1 rank" if run.topology.world == 1 else f"{run.topology.world} ranks"
    run.note(f"{folder}: training {begins} {last_step} steps on {ranks}")
    if run.recipe.train.compile:
        run.note("train.compile: the first step and the first evaluation compile the network, which may take minutes")


def _finish(run: Run, result: dict[str, Any] | None, failing: bool) -> Exit:
    """Write done.json, and print how the run has ended.

    result: None if it was stopped. failing: whether its last steps have failed.
    """
    if result is None:
        how = "while steps fail, without a checkpoint of them" if failing else "with a checkpoint"
        run.print(f"{run.folder}: stopped {how}; start it again to continue")
        return Exit.REQUEUE
    if run.topology.is_main:
        best = best_of(run.folder)
        done = write_result(run.folder, run.recipe, result, best)
        early = f", {Gains(**done['ended_early']).sentence()}" if "ended_early" in done else ""
        kept = f"; best checkpoint: {best.sentence()}" if best else ""
        result_line = f"{run.folder}: done, {main_metric(done)} after {done['seconds']:.1f} s{early}{kept}"
        run.print(f"{result_line}; see {command('report', run.folder)}")
    return Exit.DONE
