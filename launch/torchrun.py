"""Check and stage on a node or in a pod before it trains, and run torchrun in the same process."""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from widemix.cli.commands import split_overrides
from widemix.errors import InputError
from widemix.launch.relay import Relay
from widemix.launch.stage import stage
from widemix.recipe import load_recipe
from widemix.recipe.yaml_text import yaml_text
from widemix.versions import OLDEST, TORCHRUN_STOPS_RANKS, torch_is_at_least

SHUTDOWN_TIMEOUT_S = 270  # for the ranks to save; train.sbatch and the manifests ask for 300


def check_torch() -> None:
    """Raise `InputError` where torch is older than the oldest that jobs have been tested with."""
    if not torch_is_at_least(OLDEST):
        raise InputError(f"torch {version('torch')}: Slurm jobs need torch {OLDEST} or newer")


def stop_options() -> list[str]:
    """torchrun's options to forward signals to the ranks and to wait while they save.

    An older torchrun has none: `run_torchrun` then lets it do the same.
    """
    if not torch_is_at_least(TORCHRUN_STOPS_RANKS):
        return []
    names = ("SIGUSR1", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    return ["--signals-to-handle", ",".join(names), "--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]


def data_for(train: Sequence[str], stage_to: str, relay: Relay | None = None) -> Path:
    """Return the path of a recipe's data on this node, where they are copied to if `stage_to` is not empty.

    train: recipe, and what else `widemix train` takes. stage_to: a folder; variables in it are those of this node.
    relay: hands blocks on from node to node.
    Raises `InputError`.
    """
    words, overrides = split_overrides(train)
    if not words or words[0].startswith("-"):
        raise InputError("give the recipe first, then what else `widemix train` takes")
    data = Path(load_recipe(words[0], overrides).data.path)
    if not stage_to:
        return data
    return stage(data, local_folder(stage_to), relay)


def train_program(train: Sequence[str], data: Path) -> list[str]:
    """Return the module that each rank runs, and its arguments, with the path of the data on this node."""
    return ["widemix", "train", *train, f"--data.path={yaml_text(str(data))}"]


def local_folder(stage_to: str) -> Path:
    """Return the folder with the variables of this node in it replaced; raises `InputError` if one is not set."""
    local = Path(os.path.expandvars(stage_to))
    if not local.is_absolute():
        raise InputError(f"--stage-to {stage_to}: is {local} on this node; is the variable set there?")
    return local


def run_torchrun(command: Sequence[str]) -> None:
    """Run torchrun with these arguments until all ranks have ended; after a signal they have written their status."""
    # Otherwise, with torch 2.15, restarted ranks read the addresses of the first attempt from torchrun's store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing import PContext, SignalException
    from torch.distributed.run import main

    if not torch_is_at_least(TORCHRUN_STOPS_RANKS):  # which handles all signals but this one, and waits for 30 s

        def forward(number: int, _frame: object) -> None:
            raise SignalException(f"torchrun got {signal.Signals(number).name}", signal.Signals(number))

        signal.signal(signal.SIGUSR1, forward)
        PContext.close.__defaults__ = (None, SHUTDOWN_TIMEOUT_S)  # signal and timeout
    with suppress(SignalException):
        main(list(command))
