"""Ranks with faults built in."""

from pathlib import Path

from tests.conftest import SMALL
from tests.faults.faulty import train_with
from tests.forks import Forks, group_of

RECIPE = "recipes/digits/rp_mixer.yaml"
BATCH = 48  # divides by 1, 2, 3 and 4 ranks, in groups of 4
FIXED = (*SMALL, "--train.epochs", "2", "--schedule.warmup_epochs", "1", "--augment.mix_group", "4")


def arguments(data: Path, run: Path, *options: str) -> tuple[str, ...]:
    """What `python -m widemix train` is given to train on the digits."""
    return (
        RECIPE,
        "--data.path",
        f"{data}",
        "--run-dir",
        f"{run}",
        "--train.global_batch",
        f"{BATCH}",
        *FIXED,
        *options,
    )


def ranks(world: int, fault: str, data: Path, run: Path, *options: str) -> Forks:
    """`world` ranks of `python -m widemix train` on the digits, with a fault built in; see `tests.faults.faulty`."""
    log, environs = run.with_suffix(".log"), group_of(world)
    return Forks(train_with, fault, *arguments(data, run, *options), log=log, environs=environs)
