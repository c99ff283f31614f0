"""submitit: `python submitit_job.py RECIPE RUN_DIR [PARTITION]`, on this machine without a Slurm partition.

On Slurm `widemix submit` does more: staging, checks of nodes, requeueing, arrays.
"""

import os
import sys
from typing import Any

import submitit

import widemix

os.environ.setdefault("SUBMITIT_PREEMPT_SIGNAL", "USR1")  # on which a run saves; it continues where it stopped


def train(recipe: str, run_dir: str) -> dict[str, Any] | None:
    """One rank; returns the run's metrics on rank 0, None if a signal stopped it."""
    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    return widemix.train(recipe, run_dir)


def run(recipe: str, run_dir: str, ranks: int = 4, nodes: int = 1, partition: str = "") -> dict[str, Any]:
    """Submit jobs, one after the other, until the run is complete; return its metrics."""
    executor = submitit.AutoExecutor(folder=f"{run_dir}-submitit", cluster="slurm" if partition else "local")
    executor.update_parameters(nodes=nodes, tasks_per_node=ranks, timeout_min=24 * 60)
    if partition:
        executor.update_parameters(slurm_partition=partition, slurm_gpus_per_node=ranks, slurm_exclusive=True)
    while True:
        metrics = executor.submit(train, recipe, run_dir).results()[0]
        if metrics is not None:
            return metrics


if __name__ == "__main__":
    print(run(*sys.argv[1:3], partition="".join(sys.argv[3:])))
