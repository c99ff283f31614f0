"""widemix train, eval, export."""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from pipeline.cli.commands import Exit, load_from_arguments
from pipeline.distributed.launchers import export_torchrun_env
from pipeline.errors import InputError
from pipeline.recipe import check_world


def add_train(commands) -> None:
    """Add `widemix train`."""
    from pipeline.train import add_arguments

    parser = commands.add_parser("train", help="train a recipe", description="Train a recipe, or continue a run.")
    add_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        default=0,
        metavar="N",
        help="number of processes to start on this machine, one for each GPU if it has GPUs (default: the number of "
        "GPUs, or 1). On several nodes start `python -m pipeline.train` with torchrun instead",
    )
    parser.set_defaults(command=_train)


def _train(arguments: argparse.Namespace) -> int:
    from pipeline.train import train_from_arguments

    if export_torchrun_env():
        return train_from_arguments(arguments)
    recipe = load_from_arguments(arguments)
    ranks = count_ranks(arguments.ranks)
    check_world(recipe, ranks)
    if ranks == 1:
        return train_from_arguments(arguments)
    from launch.local import launch

    os.environ["WIDEMIX_COMMAND"] = shlex.join(["widemix", *sys.argv[1:]])  # for environment.json
    command = ["-m", "pipeline.train", arguments.recipe, "--resume", arguments.resume]
    if arguments.run_dir:
        command += ["--run-dir", str(arguments.run_dir)]
    return launch([*command, *(f"--{name}={value}" for name, value in arguments.overrides)], ranks)


def count_ranks(asked: int) -> int:
    """Return `asked`, or if it is 0 the number of GPUs, but at least 1."""
    if asked < 0:
        raise InputError(f"--ranks {asked}: must be at least 1")
    if asked:
        return asked
    import torch

    return max(1, torch.cuda.device_count())


def add_eval(commands) -> None:
    """Add `widemix eval`."""
    parser = commands.add_parser(
        "eval",
        help="evaluate a checkpoint",
        description="Print loss, top-1 and top-5 of a run's newest checkpoint, or of one checkpoint, on a split.",
    )
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT", help="run folder or checkpoints/<step>")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared folder (default: the recipe's data.path)")
    parser.add_argument(
        "--split", metavar="NAME", help="split to evaluate on (default: the recipe's data.eval_split)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="batch size (default: the recipe's eval.batch_size)")
    parser.add_argument("--ema", action="store_true", help="use the averaged weights of train.ema_decay")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.set_defaults(command=_eval)


def _eval(arguments: argparse.Namespace) -> Exit:
    from pipeline.training.trained import evaluate_checkpoint

    result = evaluate_checkpoint(arguments.path, arguments.data, arguments.split, arguments.batch, arguments.ema)
    print("  ".join(f"{name} {value:.4f}" for name, value in result.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return Exit.DONE


def add_export(commands) -> None:
    """Add `widemix export`."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint as safetensors, for timm",
        description="Write the network of a run's newest checkpoint, or of one checkpoint, as model.safetensors and "
        "config.json. After `import pipeline.models.timm_registry`, timm.create_model('local-dir:DIR', "
        "pretrained=True) loads it.",
    )
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT", help="run folder or checkpoints/<step>")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to create")
    parser.add_argument("--ema", action="store_true", help="use the averaged weights of train.ema_decay")
    parser.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> Exit:
    from pipeline.training.trained import export_checkpoint

    labels = export_checkpoint(arguments.path, arguments.to, arguments.ema)
    print(f"{arguments.to}: {len(labels)} classes; timm.create_model('local-dir:{arguments.to}', pretrained=True)")
    return Exit.DONE
