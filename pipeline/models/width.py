"""Tokens and channels of Mixers with a given mean number of connections, and the widest of them.

Hayase & Karakida 2024, section 4.
"""

import math
from collections.abc import Iterable

from widemix.errors import InputError


def tokens_of(channels: float, omega: float, gamma: float) -> float:
    """The S that gives Omega = gamma (C S^2 + C^2 S) / 2 at this C: (sqrt(C^2 + 8 Omega / (gamma C)) - C) / 2."""
    return (math.sqrt(channels**2 + 8 * omega / (gamma * channels)) - channels) / 2


def widest(omega: float, gamma: float) -> float:
    """C* = S* = (Omega / gamma)^(1/3), where the effective width m = S*C is greatest."""
    return (omega / gamma) ** (1 / 3)


def pairs(omega: float, gamma: float, channels: Iterable[int]) -> list[tuple[int, int]]:
    """(C, S) with S rounded to whole tokens, for each C; `InputError` where S would be below 1."""
    result = []
    for count in channels:
        tokens = round(tokens_of(count, omega, gamma))
        if tokens < 1:
            raise InputError(
                f"C = {count}: at Omega = {omega:g}, gamma = {gamma:g} less than one token is left; take a smaller C"
            )
        result.append((count, tokens))
    return result
