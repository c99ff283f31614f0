"""`python -m tests.faults.faulty FAULT ARGUMENTS...`: widemix.trainer with a fault built in.

FAULT is any of these, joined by commas, or "none":
nan@A-B      the images of data steps A to B (from 0) are NaN
gradient@A-B the gradients of data steps A to B are NaN, their losses are not
half@0       DeepSpeed trains in fp16 on a CPU
skipped_ranges@A-B data steps A to B are skipped from the start
die@S:R      rank R is killed after step S
kills@N:S    N times, a rank is killed S steps after its start, each time the next one
raise@S:R    rank R's loader raises at step S of the first epoch
loader@S:R   rank R's loader never delivers step S of the first epoch
stuck@S:R    rank R never reaches step S + 1
silent@S:R   all threads of rank R stop after step S, as if its machine had gone
full@A-B     the disk is full for saves at steps A to B
fill@A-B     the run folder's disk is filled after step A, and freed after step B
stop@S:R     rank R is asked to stop after step S
hold@S:R     rank R waits after step S until it is asked to stop, or killed
saved@S:R    rank R waits after step S until the last save is complete
rename@S     the run folder is renamed after step S, once it has a checkpoint
term@S       rank 0 is asked to stop while the save of step S is being written, and trains one step meanwhile
"""

import errno
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import widemix.trainer
from tests.forks import be_rank, be_widemix
from widemix.data.loader import TrainLoader
from widemix.run import checkpoint, run_dir
from widemix.training.loop import Loop

run = Path()  # the folder of the run, from its command


def each_step(around) -> None:
    """Call `around(loop, batches, step)` for each step, which `step(batches)` makes, in place of it.

    Both return whether the run is to stop.
    """
    advance = Loop.advance

    def faulty(loop, batches, steps):
        iterator = iter(batches)
        return any(around(loop, iterator, lambda given: advance(loop, given, 1)) for _ in range(steps))

    Loop.advance = faulty


def nan(first: int, last: int) -> None:
    def around(loop, batches, step):
        def poisoned():
            for batch in batches:
                if first <= loop.data_step <= last:
                    batch.inputs.fill_(float("nan"))
                yield batch

        return step(poisoned())

    each_step(around)


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def gradient(first: int, last: int) -> None:
    def around(loop, batches, step):
        loss = loop.engine.loss
        if first <= loop.data_step <= last:
            loop.engine.loss = lambda logits, targets: loss(NanGradient.apply(logits), targets)
        try:
            return step(batches)
        finally:
            loop.engine.loss = loss

    each_step(around)


def half(_: int, __: int) -> None:
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda _: True
    widemix.trainer.check_engine = lambda *_: None


def skipped_ranges(first: int, last: int) -> None:
    run_dir.read_skipped_ranges = lambda _: [(first, last + 1)]


def between(step: int, rank: int, action) -> None:
    """Do something between the steps of one rank, with its loop."""

    def around(loop, batches, make):
        stopping = make(batches)
        if (loop.step, dist.get_rank()) == (step, rank):
            action(loop)
        return stopping

    each_step(around)


def after(step: int, rank: int, action) -> None:
    """Do something between the steps of one rank."""
    between(step, rank, lambda loop: action())


def wait_until(condition) -> None:
    while not condition():
        time.sleep(0.01)


def die(step: int, rank: int) -> None:
    after(step, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


def kills(most: int, steps: int) -> None:
    own = itertools.count(1)
    before = 0  # kills of the starts before; no rank gets a step ahead of another

    def around(loop, batches, make):
        nonlocal before
        stopping = make(batches)
        killed, step = run.with_suffix(".kills"), next(own)
        if step == 1 and killed.exists():
            before = killed.stat().st_size
        if step == steps and before < most and dist.get_rank() == before % dist.get_world_size():
            killed.write_bytes(bytes(before + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return stopping

    each_step(around)


def stuck(step: int, rank: int) -> None:
    after(step, rank, lambda: time.sleep(3600))


def stop(step: int, rank: int) -> None:
    after(step, rank, lambda: os.kill(os.getpid(), signal.SIGTERM))


def hold(step: int, rank: int) -> None:
    between(step, rank, lambda loop: wait_until(lambda: loop.run.stop.requested))


def saved(step: int, rank: int) -> None:
    def wait(loop: Loop) -> None:
        newest, every = run / "checkpoints", loop.recipe.train.save_every_steps
        assert every
        wait_until((newest / f"{loop.step // every * every:08d}/COMPLETE").exists)

    between(step, rank, wait)


def rename(step: int, rank: int) -> None:
    def move() -> None:
        wait_until(lambda: any(run.glob("checkpoints/*/COMPLETE")))  # a thread writes it
        run.rename(run.with_name("elsewhere"))

    after(step, rank, move)


def silent(step: int, rank: int) -> None:
    after(step, rank, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def fill(first: int, last: int) -> None:
    def take(loop: Loop) -> None:
        wait_until(lambda: not loop.saver.writing)  # a save that failed now would leave space again
        with run.with_name("others").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    between(first, 0, take)
    after(last, 0, lambda: run.with_name("others").unlink())


def within_loader(step: int, rank: int, action) -> None:
    """Do something in the thread that reads, before it reads a step of one rank."""
    batches, seen = TrainLoader.batches, []

    def faulty(self, epoch, first_step=0):
        order = self.order

        def of_step(epoch, number):
            if (epoch * self.steps + number, self.topology.rank) == (step, rank):
                action()
            return order.step(epoch, number)

        if not seen:  # the loader's order is kept
            seen.append(self)
            self.order = SimpleNamespace(step=of_step, prefetch_ranges=order.prefetch_ranges)
        return batches(self, epoch, first_step)

    TrainLoader.batches = faulty


def raise_(step: int, rank: int) -> None:
    def action():
        raise OSError(errno.EIO, "Input/output error")

    within_loader(step, rank, action)


def loader(step: int, rank: int) -> None:
    within_loader(step, rank, threading.Event().wait)


def within_save(first: int, last: int, action) -> None:
    save = checkpoint.save

    def faulty(folder, state, position, *others):
        save_tensors = checkpoint.save_tensors

        def half(tensors, path):
            path.write_bytes(b"half a file")
            action()
            save_tensors(tensors, path)

        if first <= position.step <= last:
            checkpoint.save_tensors = half
        try:
            return save(folder, state, position, *others)
        finally:
            checkpoint.save_tensors = save_tensors

    checkpoint.save = faulty


def full(first: int, last: int) -> None:
    def action():
        raise OSError(errno.ENOSPC, "No space left on device")

    within_save(first, last, action)


def term(step: int, _=None) -> None:
    asked = threading.Event()
    within_save(step, step, lambda: (os.kill(os.getpid(), signal.SIGTERM), asked.set(), time.sleep(1)))
    between(step + 1, 0, lambda loop: asked.wait(60))  # the thread that saves may begin late


FAULTS = {
    "nan": nan,
    "gradient": gradient,
    "half": half,
    "skipped_ranges": skipped_ranges,
    "die": die,
    "kills": kills,
    "stuck": stuck,
    "stop": stop,
    "hold": hold,
    "saved": saved,
    "rename": rename,
    "silent": silent,
    "raise": raise_,
    "loader": loader,
    "full": full,
    "fill": fill,
    "term": term,
}


def build_in(fault: str, words: Sequence[str]) -> None:
    global run
    if "--run-dir" in words:
        run = Path(words[words.index("--run-dir") + 1])
    for name, one, other in re.findall(r"(\w+)@(\d+)(?:[-:](\d+))?", fault):
        FAULTS[name](int(one), int(other or 0))


def train_with(fault: str, *arguments: str) -> None:
    """Be a rank of `python -m widemix train ARGUMENTS` with a fault; ends the process."""
    build_in(fault, arguments)
    be_rank(*arguments)


def widemix_with(fault: str, *words: str) -> None:
    """`widemix WORDS` with a fault."""
    build_in(fault, words)
    be_widemix(*words)


if __name__ == "__main__":
    train_with(*sys.argv[1:])
