"""What a node or a pod does before it trains, and torchrun in the same process."""

import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from launch.relay import Relay
from launch.stage import stage
from pipeline.errors import InputError
from pipeline.recipe import load_recipe

SHUTDOWN_TIMEOUT_S = 270  # for the ranks to save; train.sbatch and the manifests ask for 300


def check_torch() -> None:
    """Raise `InputError` where torchrun has no options to forward Slurm's signals and to wait while ranks save."""
    found = version("torch")
    if Version(found).release < (2, 12):
        raise InputError(f"torch {found}: Slurm jobs need torch 2.12 or newer, whose torchrun lets ranks save first")


def data_for(train: Sequence[str], stage_to: str, relay: Relay | None = None) -> Path:
    """Return the path of a recipe's data on this node, where they are copied to if `stage_to` is not empty.

    train: recipe and overrides as `--section.key=VALUE`. stage_to: a folder; variables in it are those of this node.
    relay: hands blocks on from node to node.
    Raises `InputError`.
    """
    overrides = [_override(word) for word in train[1:] if word.startswith("--") and "=" in word]
    data = Path(load_recipe(train[0], overrides).data.path)
    if not stage_to:
        return data
    return stage(data, local_folder(stage_to), relay)


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
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.run import main

    with suppress(SignalException):
        main(list(command))


def _override(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name.removeprefix("--"), value
