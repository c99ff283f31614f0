"""A policy run on one picture: what was drawn, done in place."""

import numpy as np

from pipeline.data.augment.blend import blend
from pipeline.data.augment.draw import SKIP, draw_chain, draw_shares, mixed_chain
from pipeline.data.augment.operations import apply
from pipeline.data.augment.program import MIX, NO_POLICY
from pipeline.data.compiled import jit, pixels


@jit
def run_policy(picture, program, stream, scratch, chain):
    """Do to picture uint8 [H, W, 3] what the policy draws from `stream`. Chain [layers or 3, 3] is scratch.

    AugMix sums chains of the picture by their shares, or (`b1`) blends them over it one after the other.
    """
    if program.kind == NO_POLICY:
        return
    mixing = program.kind == MIX
    shares = np.empty(program.width, np.float32)
    share = np.float32(1)
    if mixing:
        share = draw_shares(program, stream, shares)
        _start_mixture(picture, scratch)
        if program.blended:
            _blend_shares(shares, share)
    for k in range(program.width):
        own, depth = mixed_chain(program, stream, k) if mixing else (stream, program.layers)
        draw_chain(program, own, chain[:depth])
        for step in chain[:depth]:
            if step[0] != SKIP:
                apply(picture, int(step[0]), step[1], step[2] != 0.0, np.uint32(program.fill), scratch)
        if mixing:
            _add_to_mixture(picture, scratch, shares[k], program.blended)
    if mixing:
        _end_mixture(picture, scratch, share, program.blended)


@jit
def _start_mixture(picture, scratch):
    scratch.original[:] = picture
    scratch.copy.reshape(-1)[:] = picture.reshape(-1)  # free for the blends: no operation of AugMix uses it
    scratch.mixed[:] = 0


@jit
def _add_to_mixture(picture, scratch, share, blended):
    """Take in the picture at the end of a chain, and start the next one afresh."""
    if blended:
        blend(scratch.copy.reshape(-1), picture.reshape(-1), share)
    else:
        _accumulate(scratch.mixed.reshape(-1), picture.reshape(-1), share)
    picture[:] = scratch.original


@jit
def _end_mixture(picture, scratch, share, blended):
    if blended:
        picture.reshape(-1)[:] = scratch.copy.reshape(-1)
    else:
        mixture = scratch.copy.reshape(-1)
        _cut(scratch.mixed.reshape(-1), mixture)
        blend(picture.reshape(-1), mixture, share)


@jit
def _blend_shares(shares, share):
    """timm's weights of blends one after the other that come to the same mixture."""
    left = np.float32(1.0)
    for k in range(len(shares) - 1, -1, -1):
        shares[k] = shares[k] * share / left
        left *= np.float32(1.0) - shares[k]


@pixels
def _accumulate(sums, values, share):
    for i in range(sums.size):
        sums[i] += share * np.float32(values[i])


@pixels
def _cut(sums, values):
    for i in range(sums.size):
        values[i] = np.uint8(np.int32(min(max(sums[i], np.float32(0)), np.float32(255))))
