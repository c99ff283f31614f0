"""Augments batches of decoded images on the CPU: each thread takes a part of the batch, without the GIL."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from widemix.data.augment.color_jitter import ColorJitter, apply_color_jitter, build_color_jitter
from widemix.data.augment.operations import apply
from widemix.data.augment.program import MIX, NO_POLICY, Program, compile_policy
from widemix.data.augment.registry import OPERATIONS, SKIP, Function
from widemix.data.augment.run import run_mixture, run_policy
from widemix.data.augment.sampling import sample_chain
from widemix.data.augment.scratch import scratch_for
from widemix.data.compiled import jit
from widemix.data.random import AUGMENT, COLOR_JITTER, key
from widemix.data.threads import run_on_threads
from widemix.recipe.augment import AugmentSection
from widemix.recipe.policy import parse_policy


@dataclass(frozen=True)
class Augmentation:
    """A policy, then colour jitter. The random numbers of an image are keyed by (seed, epoch, view id)."""

    program: Program
    color_jitter: ColorJitter
    functions: Mapping[int, Function] = field(default_factory=dict)  # registered operations of the policy, by number

    def __call__(self, images: np.ndarray, view_ids: np.ndarray, seed: int, epoch: int, threads: int) -> None:
        """Augment images uint8 [B, H, W, 3] with these view ids in place. What is off is not even compiled."""
        if self.program.kind != NO_POLICY:
            work = functools.partial(self._policy_worker(), images, view_ids, seed, epoch, self.program)
            run_on_threads(work, threads)
        if self.color_jitter.is_on:
            work = functools.partial(_run_color_jitter, images, view_ids, seed, epoch, self.color_jitter)
            run_on_threads(work, threads)

    def _policy_worker(self) -> Callable[..., Any]:
        if self.functions:
            assert self.program.kind != MIX, "AugMix has no sets of operations"
            return functools.partial(_run_with_functions, self.functions)
        return _run_augmix if self.program.kind == MIX else _run_policy


def build_augmentation(section: AugmentSection, mean: tuple[float, float, float], interpolation: str) -> Augmentation:
    """The section's augmentation; `mean`, on a scale of 0 to 1, is the fill colour of pixels from outside.

    `interpolation` is `data.interpolation`, for the operations of a policy that move pixels.
    """
    policy = parse_policy(section.auto_augment) if section.auto_augment else None
    program = compile_policy(policy, mean, interpolation)
    registered = {operation.number: operation.function for operation in OPERATIONS if operation.function is not None}
    functions = {int(number): registered[number] for number in set(program.table[:, 0]) & registered.keys()}
    return Augmentation(program, build_color_jitter(section), functions)


@jit
def _run_policy(images, view_ids, seed, epoch, program, chunk, chunks):
    """RandAugment or AutoAugment on every `chunks`-th image from `chunk` on."""
    scratch = scratch_for(images.shape[1], images.shape[2])
    chain = np.empty((program.layers, 3))
    for b in range(chunk, len(view_ids), chunks):
        run_policy(images[b], program, key(seed, epoch, view_ids[b], AUGMENT), scratch, chain)


@jit
def _run_augmix(images, view_ids, seed, epoch, program, chunk, chunks):
    """AugMix on them."""
    scratch = scratch_for(images.shape[1], images.shape[2])
    chain = np.empty((max(program.layers, 3), 3))
    for b in range(chunk, len(view_ids), chunks):
        run_mixture(images[b], program, key(seed, epoch, view_ids[b], AUGMENT), scratch, chain)


def _run_with_functions(functions, images, view_ids, seed, epoch, program, chunk, chunks):
    """`_run_policy` from Python, step by step: the compiled operations and those registered as `functions`."""
    scratch = scratch_for(images.shape[1], images.shape[2])
    chain = np.empty((program.layers, 3))
    for b in range(chunk, len(view_ids), chunks):
        sample_chain(program, np.uint64(key(seed, epoch, view_ids[b], AUGMENT)), chain)
        for number, argument, cubic in chain.tolist():
            if number in functions:
                functions[number](images[b], argument)
            elif number != SKIP:
                apply(images[b], int(number), argument, bool(cubic), np.uint32(program.fill), scratch)


@jit
def _run_color_jitter(images, view_ids, seed, epoch, color_jitter, chunk, chunks):
    scratch = scratch_for(images.shape[1], images.shape[2])
    for b in range(chunk, len(view_ids), chunks):
        apply_color_jitter(images[b], color_jitter, key(seed, epoch, view_ids[b], COLOR_JITTER), scratch)
