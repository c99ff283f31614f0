"""The program of each pod on Kubernetes: it stages the data, runs torchrun, and ends with a code that tells the
operator whether to start it again.

The operator says by torchrun's own variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...) which node this is.
torchrun itself ends with 1 whatever its ranks ended with; their status files tell more.
"""

import os
import sys
import tempfile
from pathlib import Path

from widemix.cli.arguments import Parser
from widemix.cli.commands import run_command
from widemix.distributed.rank_status import STATUS_DIR_VARIABLE, read_rank_statuses
from widemix.errors import Exit, InputError
from widemix.launch.torchrun import SHUTDOWN_TIMEOUT_S, data_for, run_torchrun, train_program
from widemix.terminal import print

# Codes from 128 mean to Kubeflow's operators that another start may help.
START_AGAIN = 128 + 15
STAGING_S = 24 * 3600  # for the slowest node, which the others wait for


def run_pod(train: list[str], stage_to: str) -> Exit:
    """Stage and train; return how the ranks of this pod ended. Raises `InputError`."""
    os.environ.setdefault("PET_RDZV_CONF", f"timeout={STAGING_S},join_timeout={STAGING_S}")
    os.environ.setdefault("PET_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    if not train:
        raise InputError("give the recipe, and what `widemix train` takes, after --")
    data = data_for(train, stage_to)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory() as folder:
        os.environ[STATUS_DIR_VARIABLE] = folder
        try:
            run_torchrun(["-m", *train_program(train, data)])
        except ChildFailedError as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            del os.environ[STATUS_DIR_VARIABLE]  # of the ranks, not of this process
        codes = [status.code for status in read_rank_statuses(Path(folder))]
    if Exit.WRONG_INPUT in codes:
        return Exit.WRONG_INPUT
    return Exit.DONE if codes and set(codes) == {Exit.DONE} else Exit.FAILED


def main() -> None:
    """Run as a pod's command; the words after `--` are the arguments of `widemix.trainer`."""
    parser = Parser(prog="python -m widemix.launch.pod", description=__doc__)
    parser.add_argument("--stage-to", default="", metavar="DIR", help="folder on the node's own disk for the data")
    separator = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    train = sys.argv[separator + 1 :]
    code = run_command(parser, lambda arguments: run_pod(train, arguments.stage_to), sys.argv[1:separator])
    sys.exit(code if code in (Exit.DONE, Exit.WRONG_INPUT) else START_AGAIN)


if __name__ == "__main__":
    main()
