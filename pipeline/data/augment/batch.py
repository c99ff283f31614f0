"""Augments batches of decoded images on the CPU: each thread takes a part of the batch, without the GIL."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from widemix.data.augment.color_jitter import ColorJitter, apply_color_jitter, build_color_jitter
from widemix.data.augment.filters import REACH
from widemix.data.augment.operations import apply, apply_chain
from widemix.data.augment.program import (
    MIX,
    NO_POLICY,
    Program,
    compile_policy,
    mixed_chain,
    sample_chain,
    sample_chain_weights,
)
from widemix.data.augment.registry import OPERATIONS, SKIP, Function
from widemix.data.augment.values import blend, copy_values
from widemix.data.compiled import jit, jit_inline, jit_noalias, run_on_threads
from widemix.data.random import AUGMENT, COLOR_JITTER, key
from widemix.recipe.augment import AugmentSection
from widemix.recipe.policy import parse_policy


class Scratch(NamedTuple):
    """Work space for images [H, W, 3]. No operation relies on what another has left there."""

    counts: np.ndarray  # int32 [3, 256]: a histogram a channel
    tables: np.ndarray  # uint8 [3, 256]: one table a channel
    seen: np.ndarray  # int32 [256]
    table: np.ndarray  # uint8 [256]
    rows: np.ndarray  # uint8 [2, 3 W]
    columns: np.ndarray  # uint16 [9 W + 224]: sums of three values
    sums: np.ndarray  # uint32 [3 W]
    weighted: np.ndarray  # float32 [3 W]
    wide: np.ndarray  # float32 [3 (W + 22)]: a row with mirrored ends
    taps: np.ndarray  # float32 [23]
    copy: np.ndarray  # uint8 [H, 3 W]: for filters that work over rows
    original: np.ndarray  # uint8 [H, W, 3]: the image before AugMix
    mixed: np.ndarray  # float32 [H, W, 3]: the sum of AugMix's chains, rows of the blur


@jit
def scratch_for(height, width):
    """Work space for images of this size; arrays that are not used take no memory."""
    return Scratch(
        np.empty((3, 256), np.int32),
        np.empty((3, 256), np.uint8),
        np.empty(256, np.int32),
        np.empty(256, np.uint8),
        np.empty((2, 3 * width), np.uint8),
        np.empty(9 * width + 224, np.uint16),
        np.empty(3 * width, np.uint32),
        np.empty(3 * width, np.float32),
        np.empty(3 * (width + 2 * REACH), np.float32),
        np.empty(2 * REACH + 1, np.float32),
        np.empty((height, 3 * width), np.uint8),
        np.empty((height, width, 3), np.uint8),
        np.empty((height, width, 3), np.float32),
    )


@jit_inline
def run_policy(image, program, stream, scratch, chain):
    """RandAugment or AutoAugment on image uint8 [H, W, 3], in place. Chain [layers, 3] is scratch."""
    sample_chain(program, stream, chain)
    apply_chain(image, chain, program.fill, scratch)


@jit_inline
def run_mixture(image, program, stream, scratch, chain):
    """AugMix on image uint8 [H, W, 3], in place. Chain [layers or 3, 3] is scratch.

    The chains' images are summed by their weights, or (`b1`) blended one after the other.
    """
    values, original = image.reshape(-1), scratch.original.reshape(-1)
    mixture, sums = scratch.copy.reshape(-1), scratch.mixed.reshape(-1)  # no operation of AugMix uses these
    weights = np.empty(program.width, np.float32)
    weight = sample_chain_weights(program, stream, weights)
    copy_values(values, original)
    if program.blended:
        _blend_weights(weights, weight)
        copy_values(values, mixture)
    else:
        _clear(sums)
    for k in range(program.width):
        own, depth = mixed_chain(program, stream, k)
        sample_chain(program, own, chain[:depth])
        apply_chain(image, chain[:depth], program.fill, scratch)
        if program.blended:
            blend(mixture, values, weights[k])
        else:
            _accumulate(sums, values, weights[k])
        copy_values(original, values)
    if program.blended:
        copy_values(mixture, values)
    else:
        _cut(sums, mixture)
        blend(values, mixture, weight)


@jit
def _blend_weights(weights, weight):
    """timm's weights of successive blends that give the same mixture."""
    left = np.float32(1.0)
    for k in range(len(weights) - 1, -1, -1):
        weights[k] = weights[k] * weight / left
        left *= np.float32(1.0) - weights[k]


@jit_noalias
def _clear(sums):
    for i in range(sums.size):
        sums[i] = np.float32(0)


@jit_noalias
def _accumulate(sums, values, weight):
    for i in range(sums.size):
        sums[i] += weight * np.float32(values[i])


@jit_noalias
def _cut(sums, values):
    for i in range(sums.size):
        values[i] = np.uint8(np.int32(min(max(sums[i], np.float32(0)), np.float32(255))))


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
