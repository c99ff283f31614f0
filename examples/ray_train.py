"""Ray Train: `python ray_train.py RECIPE RUN_DIR WORKERS`, with a GPU for each worker if there are any."""

import os
import subprocess
import sys

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def rank(config: dict[str, str]) -> None:
    """One rank, as a process of its own: Ray runs this in a thread, and has joined a process group already."""
    environ = os.environ | {"MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1)}
    command = [sys.executable, "-m", "widemix", "train", config["recipe"], "--run-dir", config["run_dir"]]
    subprocess.run(command, env=environ, cwd=config["folder"], check=True)


def run(recipe: str, run_dir: str, workers: int) -> None:
    """Train on so many workers; the same call continues a run that has stopped."""
    gpu = torch.cuda.is_available()
    config = {"recipe": recipe, "run_dir": os.path.abspath(run_dir), "folder": os.getcwd()}
    scaling = ScalingConfig(num_workers=workers, use_gpu=gpu)
    TorchTrainer(rank, train_loop_config=config, scaling_config=scaling).fit()


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
