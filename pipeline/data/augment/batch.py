"""A batch of pictures augmented in the decoding threads, pictures shared out, without the GIL."""

import functools
from dataclasses import dataclass

import numpy as np

from pipeline.data.augment.appearance import Appearance, appearance, change_appearance
from pipeline.data.augment.program import MIX, NO_POLICY, Program, compile_policy
from pipeline.data.augment.run import run_mixture, run_policy
from pipeline.data.augment.scratch import scratch_for
from pipeline.data.compiled import jit
from pipeline.data.random import APPEARANCE, AUGMENT, key
from pipeline.data.threads import run_on_threads
from pipeline.recipe.augment import AugmentSection
from pipeline.recipe.policy import parse_policy


@dataclass(frozen=True)
class Augmentation:
    """What becomes of a training picture between crop and device. Each picture's numbers are its own."""

    program: Program
    looks: Appearance

    def __call__(self, pictures: np.ndarray, samples: np.ndarray, seed: int, epoch: int, threads: int) -> None:
        """Augment uint8 [B, H, W, 3], which show `samples`, in place. What is off is not even compiled."""
        if self.program.kind != NO_POLICY:
            work = _mix_share if self.program.kind == MIX else _run_share
            run_on_threads(functools.partial(work, pictures, samples, seed, epoch, self.program), threads)
        if max(self.looks.jitter_prob, self.looks.gray_prob, self.looks.blur_prob) > 0:
            run_on_threads(functools.partial(_look_share, pictures, samples, seed, epoch, self.looks), threads)


def augmentation(section: AugmentSection, mean: tuple[float, float, float]) -> Augmentation:
    policy = parse_policy(section.auto_augment) if section.auto_augment else None
    return Augmentation(compile_policy(policy, mean), appearance(section))


@jit
def _run_share(pictures, samples, seed, epoch, program, chunk, chunks):
    """The policy on every `chunks`-th picture from `chunk` on."""
    scratch = scratch_for(pictures.shape[1], pictures.shape[2])
    chain = np.empty((program.layers, 3))
    for b in range(chunk, len(samples), chunks):
        run_policy(pictures[b], program, key(seed, epoch, samples[b], AUGMENT), scratch, chain)


@jit
def _mix_share(pictures, samples, seed, epoch, program, chunk, chunks):
    """AugMix on them."""
    scratch = scratch_for(pictures.shape[1], pictures.shape[2])
    chain = np.empty((max(program.layers, 3), 3))
    for b in range(chunk, len(samples), chunks):
        run_mixture(pictures[b], program, key(seed, epoch, samples[b], AUGMENT), scratch, chain)


@jit
def _look_share(pictures, samples, seed, epoch, looks, chunk, chunks):
    scratch = scratch_for(pictures.shape[1], pictures.shape[2])
    for b in range(chunk, len(samples), chunks):
        change_appearance(pictures[b], looks, key(seed, epoch, samples[b], APPEARANCE), scratch)
