"""Runs a policy on one image: samples its steps and applies them in place."""

import numpy as np

from widemix.data.augment.blend import blend
from widemix.data.augment.operations import apply_chain
from widemix.data.augment.sampling import mixed_chain, sample_chain, sample_chain_weights
from widemix.data.augment.tables import copy_values
from widemix.data.compiled import jit, jit_inline, jit_noalias


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
