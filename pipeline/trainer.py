"""A training run as every rank runs it: the only file that knows every part."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from widemix.distributed.signals import Stopped, StopRequest
from widemix.distributed.start_times import StartTimes
from widemix.errors import Exit, InputError, command
from widemix.files import atomic_write
from widemix.metrics import main_figure
from widemix.recipe import Recipe, check_world, match_folder

if TYPE_CHECKING:  # heavy imports wait, inside the functions, until the recipe has been checked
    from torch import nn

    from widemix.data.loader import EvalLoader, TrainLoader
    from widemix.distributed.topology import Topology
    from widemix.engine import Engine
    from widemix.run.run_dir import ResumeState
    from widemix.training.profile import Profiler

Note = Callable[[str], None]  # prints a line
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

    `resume` is "auto", "never" or the path of a run or checkpoint. `overrides`, those that the recipe has had, name a
    run without a folder. `verbosity` -1 prints only warnings and the last line, 1 every line of
    metrics.jsonl. Returns REQUEUE if the run was asked to stop.
    `InputError` if recipe, data, ranks and run folder do not fit each other.
    """
    times = StartTimes()
    recipe = match_folder(recipe)

    from widemix.data.precision import bf16_warning
    from widemix.distributed.requests import SharedRequests
    from widemix.distributed.topology import (
        keep_freed_memory,
        on_main,
        process_group,
        read_topology,
        set_matmul_precision,
        set_torch_threads,
    )
    from widemix.distributed.watchdog import Watchdog
    from widemix.engine import check_engine
    from widemix.engine.memory_layout import set_memory_layout
    from widemix.estimate.utilisation import peak_share
    from widemix.evaluation.evaluate import evaluate_engine
    from widemix.run.checkpoint import RetentionPolicy
    from widemix.run.log import RunLog
    from widemix.run.run_dir import acquire_run_dir, default_run_dir, write_result
    from widemix.run.saving import Saver
    from widemix.run.starts import StartRecord
    from widemix.run.trackers import Tracker, check_trackers, open_trackers
    from widemix.training.faults import Rollback
    from widemix.training.loop import Loop, RunContext
    from widemix.training.mistakes import Mistakes
    from widemix.training.schedule import build_run_schedule

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
            _say(f"rank {topology.rank}: stopped by {signal} before all ranks had met; start the run again to train")
            return Exit.REQUEUE
        times.end("rendezvous")
        set_torch_threads(topology)
        keep_freed_memory(topology.device)
        set_matmul_precision(recipe.train.matmul_precision)

        loader, eval_loader = _open_data(recipe, topology)
        schedule = build_run_schedule(recipe.schedule, recipe.optim.lr, recipe.train, loader.steps)

        # Rank 0's name: the clocks of the ranks differ.
        folder = run_dir or on_main(topology, lambda: default_run_dir(recipe_path, overrides))
        start = stack.enter_context(acquire_run_dir(folder, recipe, resume, topology))
        if start.done and start.is_complete(schedule.last_step):
            _print(topology, f"{folder}: already complete, {main_figure(start.done)}")
            return Exit.DONE
        _check_something_is_left(recipe, resume, start, schedule.last_step)
        note = partial(_print, topology) if verbosity >= 0 else _silent
        times.end("data and run folder")
        if recipe.train.precision == "bf16" and topology.is_main and (slow := bf16_warning(topology.device)):
            _warn(topology, slow)
        watchdog = stack.enter_context(Watchdog(folder, topology, store.clone(), recipe.faults.hang_timeout_s))
        retention = RetentionPolicy(recipe.train.keep_last, recipe.train.keep_best, recipe.train.keep_every_steps)
        saver = Saver(folder, topology, store.clone(), retention)
        rollback = Rollback(folder, topology, recipe.faults.max_rollbacks, start.skipped_ranges)

        module = _build_model(recipe, start, topology, note)
        memory_layout = set_memory_layout(module, recipe.engine, recipe.train, topology)
        engine = _build_engine(recipe, module, start, topology)
        times.end("network and checkpoint")
        profiler = _open_profiler(recipe, folder, schedule.last_step, topology, stack)
        _begin(start, recipe, schedule.last_step, topology, note)  # after all that may be wrong with the recipe

        trackers: list[Tracker] = []
        warn = partial(_warn, topology)
        on_main(topology, lambda: trackers.extend(open_trackers(recipe.log, folder, recipe, warn)))
        log = stack.enter_context(
            RunLog(recipe.log, start, schedule.last_step, topology, verbosity=verbosity, trackers=trackers)
        )
        log.add_description(recipe, start.environment)
        mistakes = Mistakes(recipe.log.mistakes, eval_loader, log) if recipe.log.mistakes else None
        observe = {"observe": mistakes.observe} if mistakes else {}
        evaluate = partial(evaluate_engine, engine, eval_loader, recipe.data.num_classes, watchdog.beat, **observe)
        watchdog.beat()
        context = RunContext(
            log,
            saver,
            rollback,
            watchdog,
            stop,
            SharedRequests(topology, store.clone()),
            peak_share(recipe, topology),
            profiler,
            mistakes,
            StartRecord(folder, times, topology, recipe.train.compile, memory_layout),
        )
        loop = Loop(recipe, engine, schedule, evaluate, context, start)
        result = loop.fit(loader)
        if result is None:
            how = "while steps fail, without a checkpoint of them" if loop.health.failing else "with a checkpoint"
            _print(topology, f"{folder}: stopped {how}; start it again to continue")
            return Exit.REQUEUE
        if topology.is_main:
            done = write_result(folder, recipe, result)
            result_line = f"{folder}: done, {main_figure(done)} after {done['seconds']:.1f} s"
            _print(topology, f"{result_line}; see {command('report', folder)}")
        return Exit.DONE


def _check_something_is_left(recipe: Recipe, resume: str, start: "ResumeState", last_step: int) -> None:
    """`InputError` where a new run would end before the checkpoint that it is to start from, or a complete one can't
    go on."""
    if resume != "auto" and start.checkpoint and start.step >= last_step:
        limit = "train.max_steps" if recipe.train.max_steps == last_step else "train.epochs"
        raise InputError(
            f"{start.checkpoint.path}: is at step {start.step}, and this run would end at step {last_step}; raise "
            f"{limit}, or take its weights alone by train.init_from"
        )
    if start.done and not start.checkpoint:
        raise InputError(
            f"{start.run_dir}: is complete, and has no checkpoint from which to go on to step {last_step}; name "
            "another folder with --run-dir"
        )


def _open_data(recipe: Recipe, topology: "Topology") -> tuple["TrainLoader", "EvalLoader"]:
    from widemix.data.loader import EvalLoader, TrainLoader, check_model
    from widemix.data.precision import DTYPES

    loader = TrainLoader(recipe.data, recipe.augment, recipe.train, topology)
    eval_loader = EvalLoader(recipe.data, recipe.eval.batch_size, topology, DTYPES[recipe.train.precision])
    check_model(recipe.model, loader, eval_loader)
    return loader, eval_loader


def _begin(start: "ResumeState", recipe: Recipe, last_step: int, topology: "Topology", note: Note) -> None:
    """Print where training starts, and remove the result of a run that is to continue, with more steps."""
    from widemix.run.run_dir import describe_start

    if start.done and topology.is_main:
        describe_start(start.run_dir, recipe, start.environment)
        (start.run_dir / "done.json").unlink()
        _print(
            topology, f"{start.run_dir}: was complete after {start.done.get('step')} steps; its done.json is removed"
        )
    instead = "an older checkpoint is used" if start.checkpoint else "there is no older one, so training starts anew"
    for problem in start.problems:
        _print(topology, f"warning: {problem}; {instead}")
    begins = f"from {start.checkpoint.path} at step {start.step} to" if start.checkpoint else "for"
    ranks = "1 rank" if topology.world == 1 else f"{topology.world} ranks"
    note(f"{start.run_dir}: training {begins} {last_step} steps on {ranks}")


def _build_model(recipe: Recipe, start: "ResumeState", topology: "Topology", note: Note) -> "nn.Module":
    """Build the model, with new weights or those of train.init_from, or without where the engine gives it some."""
    import torch

    from widemix.distributed.topology import on_main
    from widemix.engine import broadcasts_rank0_weights, prepare
    from widemix.models.registry import build_model, build_on_meta, empty_inputs
    from widemix.models.unused import unused_parameters
    from widemix.training.finetune import UNUSED, freeze, load_init_weights

    section = recipe.train
    torch.manual_seed(section.seed)
    from_main = broadcasts_rank0_weights(recipe.engine)
    on_meta = from_main and not topology.is_main
    side, classes = recipe.data.image_size, recipe.data.num_classes
    module = (build_on_meta if on_meta else build_model)(recipe.model, side, classes)
    unused = unused_parameters(module, empty_inputs(recipe.model, 2, side)) if UNUSED in section.freeze else set()
    prepare(module, section, topology.device)
    if section.init_from and not start.checkpoint:
        load = partial(load_init_weights, module, section.init_from, section.reset_head)
        changes = on_main(topology, load) if from_main else load()
        note(f"{start.run_dir}: starting from {', '.join([section.init_from, *changes])}")
    if section.freeze:
        note(f"{start.run_dir}: {freeze(module, section.freeze, unused):,} weights are frozen")
    return module if on_meta else module.to(topology.device)


def _build_engine(recipe: Recipe, module: "nn.Module", start: "ResumeState", topology: "Topology") -> "Engine":
    """Build the engine around the model, with the state of the checkpoint that the run resumes from."""
    from widemix.engine import build_engine

    engine = build_engine(recipe.engine, module, recipe.optim, recipe.train, topology)
    if topology.is_main and engine.config is not None:
        atomic_write(start.run_dir / "deepspeed.json", json.dumps(engine.config, indent=1) + "\n")
    if start.checkpoint:
        engine.load(start.checkpoint.load(verify=False))  # rank 0 has verified it
    return engine


def _open_profiler(
    recipe: Recipe, folder: Path, last_step: int, topology: "Topology", stack: ExitStack
) -> "Profiler | None":
    """The profiler of rank 0, if the recipe asks for a trace."""
    if recipe.train.profile is None:
        return None
    first, _, stop = recipe.train.profile.partition(":")
    if int(first) >= last_step:
        raise InputError(f"train.profile {recipe.train.profile}: the run ends after {last_step} steps")
    if not topology.is_main:
        return None
    from widemix.training.profile import Profiler

    return stack.enter_context(Profiler(folder, int(first), int(stop)))


def _print(topology: "Topology", text: str) -> None:
    """Print a line on rank 0."""
    if topology.is_main:
        _say(text)


def _say(text: str) -> None:
    with suppress(OSError):  # nothing reads it, or the log's disk is full
        print(text, file=sys.stderr, flush=True)


def _warn(topology: "Topology", text: str) -> None:
    _print(topology, f"warning: {text}")


def _silent(_text: str) -> None:
    pass
