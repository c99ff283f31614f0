"""Ranks that torchrun's own agent starts and, after one was killed, starts again; as forks, which saves seconds."""

import os
from pathlib import Path

from tests.faults.faulty import train_with
from tests.faults.ranks import arguments
from tests.forks import Forks


def killed_ranks(world: int, kills: int, data: Path, run: Path, *options: str) -> Forks:
    """`torchrun --standalone --nproc-per-node WORLD -m widemix train`; ranks are killed so often, in turn."""
    words = (f"kills@{kills}:3", *arguments(data, run, *options))
    return Forks(_torchrun, world, kills, words, log=run.with_suffix(".log"))


def _torchrun(world: int, restarts: int, words: tuple[str, ...]) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id="none",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, _rank)(*words)


def _rank(*words: str) -> None:
    from widemix.cli import commands

    # The agent waits for what the function returns.
    commands.exit_rank = lambda code: os._exit(code) if code else None
    train_with(*words)
