"""The instruction sets that the wheels' libraries are compiled for, and which of them this processor runs."""

import os
import platform
from pathlib import Path
from typing import NamedTuple

from widemix.errors import InputError

VARIABLE = "WIDEMIX_NATIVE"  # the code to use: a level or one of OTHERS; the best there is if it is not set
OTHERS = ("native", "none")  # compiled here for this processor; no compiled code


class Level(NamedTuple):
    """A set of instructions. A processor that runs it runs those before it in the table."""

    flags: tuple[str, ...]  # of the compiler
    features: frozenset[str]  # as Linux names them


def _level(flags: str, features: str) -> Level:
    return Level(tuple(flags.split()), frozenset(features.split()))


LEVELS = {
    "x86_64": {
        "v2": _level("-march=x86-64-v2", "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"),
        "v3": _level("-march=x86-64-v3", "abm avx avx2 bmi1 bmi2 f16c fma movbe"),
        "v4": _level("-march=x86-64-v4", "avx512bw avx512cd avx512dq avx512f avx512vl"),
        "vbmi": _level("-march=x86-64-v4 -mavx512vbmi -mpclmul -mvpclmulqdq", "avx512vbmi pclmulqdq vpclmulqdq"),
    },
    "aarch64": {
        "v8": _level("-march=armv8-a", "asimd"),
        "v8.1": _level("-march=armv8.1-a", "asimdrdm atomics crc32"),
    },
}


def runnable() -> dict[str, Level]:
    """The levels that this processor runs, by name, the lowest first."""
    features, found = frozenset(processor().split()), {}
    for name, level in LEVELS.get(platform.machine(), {}).items():
        if not level.features <= features:
            break
        found[name] = level
    return found


def processor() -> str:
    """The line of Linux on the instruction sets of this processor; "" on other systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def wanted() -> str:
    """The value of WIDEMIX_NATIVE, or "". Raises `InputError` for one that this processor does not run."""
    value, known, runs = os.environ.get(VARIABLE, ""), LEVELS.get(platform.machine(), {}), runnable()
    if value not in ("", *OTHERS, *known):
        raise InputError(f"{VARIABLE}={value}: is none of {', '.join((*known, *OTHERS))}")
    if value in known and value not in runs:
        missing = sorted(known[value].features.difference(processor().split()))
        lacks = f"has no {' '.join(missing)}" if missing else "lacks instructions of a lower level"
        raise InputError(f"{VARIABLE}={value}: this processor {lacks}; it runs {', '.join(runs) or 'none of them'}")
    return value
