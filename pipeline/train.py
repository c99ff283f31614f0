"""Start a run: the only file that knows all. `python -m pipeline.train RECIPE ...` is what launchers start."""

import argparse
import atexit
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipeline.cli.commands import Exit, Parser, add_recipe_arguments, load_from_arguments, run_command
from pipeline.distributed.launchers import adopt
from pipeline.distributed.rank_status import write_rank_status
from pipeline.files import atomic_write
from pipeline.recipe import Recipe, check_world

if TYPE_CHECKING:
    from pipeline.data.loader import EvalLoader, TrainLoader
    from pipeline.distributed.signals import StopRequest
    from pipeline.distributed.topology import Topology
    from pipeline.distributed.watchdog import Watch
    from pipeline.run.checkpoint import RetentionPolicy
    from pipeline.run.run_dir import Start
    from pipeline.run.saving import Saver


def train(recipe: Recipe, run_dir: Path | None, resume: str, recipe_path: Path) -> Exit:
    """Train a recipe on the ranks that some launcher started. Every rank calls it."""
    # Heavy imports wait until the recipe has been found right.
    import torch

    from pipeline.data.loader import EvalLoader, TrainLoader, check_model
    from pipeline.data.precision import DTYPES
    from pipeline.distributed import topology
    from pipeline.distributed.signals import StopRequest
    from pipeline.distributed.watchdog import Watch
    from pipeline.engine import check_engine
    from pipeline.run import run_dir as runfolder
    from pipeline.run.saving import Saver

    here = topology.read_topology()
    check_world(recipe, here.world)
    check_engine(recipe.engine, recipe.optim, recipe.train, here)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        store = topology.start(here, recipe.engine.timeout_s)
        stack.callback(topology.stop)
        torch.set_num_threads(topology.share_cpus(here))

        section, dtype = recipe.train, DTYPES[recipe.train.precision]
        loader = TrainLoader(recipe.data, recipe.augment, recipe.train, here)
        evaluation = EvalLoader(recipe.data, recipe.eval.batch_size, here, dtype)
        check_model(recipe.model, loader, evaluation)
        folder = run_dir or runfolder.default_folder(recipe_path)
        start = topology.on_main(here, lambda: _claim(stack, folder, recipe, resume, here))
        last = min(section.epochs * loader.steps, section.max_steps or section.epochs * loader.steps)
        if start.done and start.step >= last:
            _say(here, f"{start.folder}: already complete, top-1 {start.done['top1']:.2f} %")
            return Exit.DONE
        if start.done and here.is_main:  # it goes on: to more steps, or from before a damaged checkpoint
            (start.folder / "done.json").unlink()
        for complaint in start.complaints:
            _say(here, f"warning: {complaint}; an older checkpoint is taken")
        watch = stack.enter_context(Watch(start.folder, here, store.clone(), recipe.faults.hang_timeout_s))
        saver = Saver(start.folder, here, store.clone(), _keep(recipe))
        return _run(recipe, here, loader, evaluation, start, last, stop, stack, watch, saver)


def _run(
    recipe: Recipe,
    here: "Topology",
    loader: "TrainLoader",
    evaluation: "EvalLoader",
    start: "Start",
    last: int,
    stop: "StopRequest",
    stack: ExitStack,
    watch: "Watch",
    saver: "Saver",
) -> Exit:
    """Model, engine and record, then the loop; with the data opened and the folder ours."""
    import torch

    from pipeline.engine import build_engine, prepare
    from pipeline.models.registry import build_model
    from pipeline.run import run_dir as runfolder
    from pipeline.run.metrics import Record
    from pipeline.run.progress import Progress
    from pipeline.training.faults import Rollback
    from pipeline.training.finetune import freeze, start_from
    from pipeline.training.loop import Loop, Run
    from pipeline.training.schedule import build_schedule

    torch.manual_seed(recipe.train.seed)
    module = build_model(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    prepare(module, recipe.train)
    if recipe.train.init_from and not start.checkpoint:
        changes = start_from(module, recipe.train.init_from)
        _say(here, f"{start.folder}: starting from {', '.join([recipe.train.init_from, *changes])}")
    if recipe.train.freeze:
        _say(here, f"{start.folder}: {freeze(module, recipe.train.freeze):,} weights are frozen")
    engine = build_engine(recipe.engine, module.to(here.device), recipe.optim, recipe.train, here)
    if here.is_main and engine.config is not None:
        atomic_write(start.folder / "deepspeed.json", json.dumps(engine.config, indent=1) + "\n")
    if start.checkpoint:
        engine.load(start.checkpoint.load(verify=False))  # rank 0 has verified it
    begins = f"from {start.checkpoint.path} at step {start.step} to" if start.checkpoint else "for"
    ranks = "1 rank" if here.world == 1 else f"{here.world} ranks"
    _say(here, f"{start.folder}: training {begins} {last} steps on {ranks}")

    progress = Progress(here.is_main, start.step, last)
    stack.callback(progress.close)
    record = Record(start.folder, start.step, recipe.log.tensorboard) if here.is_main else None
    if record:
        stack.callback(record.close)
        record.describe(recipe, start.environment)
    schedule = build_schedule(recipe.schedule, recipe.optim.lr, loader.steps, recipe.train.epochs)
    rollback = Rollback(start.folder, here, recipe.faults.max_rollbacks, start.skipped_ranges)
    run = Run(recipe, here, engine, loader, evaluation, schedule, record, progress, saver, rollback, watch, last)
    watch.beat()
    loop = Loop(run, start.step, rollback.first_kept(start.order), start.seconds, stop)
    result = loop.fit()
    if result is None:
        how = "while steps fail, without a checkpoint of them" if loop.health.failing else "with a checkpoint"
        _say(here, f"{start.folder}: stopped {how}; start it again to go on")
        return Exit.REQUEUE
    if record:
        done = runfolder.finish(start.folder, recipe, result)
        record.finish(recipe, done)
        _say(here, f"{start.folder}: done, top-1 {done['top1']:.2f} % after {done['seconds']:.1f} s")
    return Exit.DONE


def _claim(stack: ExitStack, folder: Path, recipe: Recipe, resume: str, here: "Topology") -> "Start":
    """Rank 0 claims the run folder and holds its lock until the run ends."""
    from pipeline.run.run_dir import claim

    start, lock = claim(folder, recipe, resume, here)
    stack.callback(lock.close)
    return start


def _keep(recipe: Recipe) -> "RetentionPolicy":
    from pipeline.run.checkpoint import RetentionPolicy

    return RetentionPolicy(recipe.train.keep_last, recipe.train.keep_best, recipe.train.keep_every_steps)


def _say(here: "Topology", text: str) -> None:
    if here.is_main:
        print(text, file=sys.stderr, flush=True)


def add_arguments(parser: Parser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--run-dir", type=Path, help="run folder (default: runs/<recipe>-<time>)")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto: go on from the run folder's newest complete checkpoint; never: refuse a used folder; "
        "PATH: start a new folder from that checkpoint or run (default: auto)",
    )


def train_from_arguments(arguments: argparse.Namespace) -> Exit:
    adopt()
    write_rank_status(None)
    recipe = load_from_arguments(arguments)
    return train(recipe, arguments.run_dir, arguments.resume, Path(arguments.recipe))


def main() -> None:
    parser = Parser(prog="python -m pipeline.train", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it; LOCAL_RANK says it
    _leave(run_command(parser, train_from_arguments))


def _leave(code: int) -> NoReturn:
    """End the process with everything closed, but without tearing the interpreter down.

    Background threads of the collectives abort at times while that goes on, and a finished run then ends with exit
    code 134: seen once in some thirty runs of two ranks, with FSDP on gloo.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
