"""Damaged and intact JPEGs through the C code, built with sanitizers, against libjpeg alone: see fuzz.c.

Then damaged run folders, tables and other files through their readers, for a minute: see readers.py.

python -m tests.stress.fuzz --cases 100000
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.stress.readers import faults
from widemix.cgroups import usable_cpus
from widemix.native.build import SOURCES

DECODER = ("crop", "planes", "idct", "colour", "entropy", "lookup", "scratch", "coefficients", "restore")
JPEG_SOURCES = (*DECODER, "pack", "recode", "restart", "huffman_encode", "shrink")
FLAGS = ("-std=gnu11", "-g", "-O1", "-ffp-contract=off", "-Wall", "-Wextra")
MACHINES = ((), ("-march=native",))  # without and with the instructions that our own inverse DCT needs
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
DIFFERING = "fuzz-case.jpg"  # in the current folder: the first case that differs


def build(folder: Path, machine: Sequence[str] = MACHINES[-1]) -> Path:
    """The program, compiled into a folder for some machine."""
    program = folder / "fuzz"
    sources = [Path(__file__).with_suffix(".c"), *(SOURCES / f"{name}.c" for name in JPEG_SOURCES)]
    flags = (*FLAGS, *machine, *SANITIZERS)
    subprocess.run(["cc", *flags, "-o", program, *sources, "-ljpeg", "-lpthread", "-lm"], check=True)
    return program


def run(program: Path, seed: int, first: int, cases: int) -> str:
    """Run some cases; returns what was found, or ""."""
    done = subprocess.run([program, *map(str, (seed, first, cases)), DIFFERING], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr or f"exit code {done.returncode}"


def main() -> int:
    """Run all cases, of JPEGs in parallel; returns 1 at the first that differs, or that a reader does not refuse."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100_000, help="number of JPEGs (default: 100000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other JPEGs (default: 0)")
    parser.add_argument("--seconds", type=float, default=60, help="time for the readers of other files (default: 60)")
    arguments = parser.parse_args()
    return fuzz_jpegs(arguments) or fuzz_readers(arguments)


def fuzz_readers(arguments: argparse.Namespace) -> int:
    """Run cases of damaged files until the time is over; returns 1 at the first that its reader does not refuse."""
    until, done = time.monotonic() + arguments.seconds, 0
    for said in faults(arguments.seed, range(sys.maxsize)):
        if said:
            print(said, file=sys.stderr)
            return 1
        done += 1
        if time.monotonic() > until:
            break
    print(f"{done} damaged files of seed {arguments.seed}: read or refused ({arguments.seconds:g} s)")
    return 0


def fuzz_jpegs(arguments: argparse.Namespace) -> int:
    """Run all cases of JPEGs, in parallel; returns 1 at the first that differs."""
    began, part = time.monotonic(), max(1, min(1000, arguments.cases // usable_cpus()))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(usable_cpus()) as pool:
        program = build(Path(name))
        jobs = [
            pool.submit(run, program, arguments.seed, first, min(part, arguments.cases - first))
            for first in range(0, arguments.cases, part)
        ]
        for job in jobs:
            if job.result():
                pool.shutdown(cancel_futures=True)
                print(f"{job.result()}\nthe JPEG is in {DIFFERING}", file=sys.stderr)
                return 1
    print(f"{arguments.cases} cases of seed {arguments.seed}: no difference ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
